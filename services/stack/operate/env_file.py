"""The user's .env: read, and changed one line at a time, with everything else left as it is."""

import re
from pathlib import Path

from services.errors import UserError
from services.files import replace_text

ASSIGNED = re.compile(r"^([A-Za-z_][A-Za-z0-9_]*)=(.*)$")
QUOTED = re.compile(r"""(['"])(.*?)\1""")
OFFERED = re.compile(r"^#\s?([A-Z_][A-Z0-9_]*)=(.*)$")


def read_variables(path: Path) -> dict[str, str]:
    """The variables that a file sets, without quotes and what is said behind them, as Compose reads them.

    Raises:
        UserError: the file cannot be read.
    """
    matches = (ASSIGNED.match(line) for line in _lines(path))
    return {match[1]: _value(match[2]) for match in matches if match}


def set_variable(path: Path, name: str, value: str | None) -> None:
    """Set one variable, or take its line away (None)."""
    lines = _lines(path)
    places = [number for number, line in enumerate(lines) if line.startswith(f"{name}=")]
    kept = [line for number, line in enumerate(lines) if number not in places]
    if value is not None:
        kept.insert(places[0] if places else len(kept), f"{name}={value}")
    if kept != lines:
        write_lines(path, kept)


def write_lines(path: Path, lines: list[str]) -> None:
    """Replace the file's content; it is whole at any moment, and keeps its mode."""
    mode = path.stat().st_mode
    replace_text(path, "".join(f"{line}\n" for line in lines))
    path.chmod(mode)


def _value(written: str) -> str:
    written = written.strip()
    quoted = QUOTED.match(written)
    return quoted[2] if quoted else re.split(r"\s#", written)[0].rstrip()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; copy .env.example to {path} and fill it in (with no GPU: make up-cpu)"
        ) from error
