"""Scripts that run inside an image, given to its Python from outside: an image of any age can be asked.

They import from the standard library alone; what only some images have is looked up by name.
"""

from pathlib import Path


def script(name: str) -> str:
    """The text of a script of this folder."""
    return Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
