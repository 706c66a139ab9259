"""The first program of each container: refuses to start in an environment that is not the one the image was built with.

    start.py COMMAND [ARGUMENT ...]

Compares torch, CUDA, transformers and whatever else versions.toml named at the build (contents.json, beside this file)
with what this interpreter now finds, and becomes the command where they are the same. Takes a tenth of a second and
imports none of them. Standard library only.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NoReturn

from check_versions import faults  # type: ignore[import-not-found]  # beside it, not a package

NOT_STARTED = (
    "not started: this is not what the image was built with. Build it again from its lock, and look for what was "
    "installed or mounted into it"
)
CONTENTS = Path(__file__).with_name("contents.json")


def main(command: list[str]) -> NoReturn:
    if not command:
        sys.exit("usage: start.py COMMAND [ARGUMENT ...]")
    contents = json.loads(CONTENTS.read_text())
    if found := faults(contents["image"], contents["variant"], contents["expected"]):
        lines = [*found, NOT_STARTED]
        sys.exit("\n".join(lines))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
