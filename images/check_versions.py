"""Compares what an environment holds with images/versions.toml; a build runs it, with that environment's Python.

    check_versions.py IMAGE VARIANT [VERSIONS.TOML]

Prints one line for each difference and exits 1 when there is one. Standard library only.
"""

# ruff: noqa: T201  (a command: what it prints is for the one who called it)
from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

Expected = Mapping[str, str | list[str]]


def differences(expected: Expected, actual: Mapping[str, str | None]) -> Iterator[str]:
    """What `actual` (name to version, None where absent) has otherwise than a table of versions.toml says."""
    for name, wanted in expected.items():
        if isinstance(wanted, list):
            for package in wanted:
                if actual.get(package) is not None:
                    yield f"{package}: must not be here, is {actual[package]}"
        elif (found := actual.get(name)) != wanted:
            yield f"{name}: must be {wanted}, is {found or 'not here'}"


def installed(expected: Expected) -> dict[str, str | None]:
    """What this interpreter has of the names that a table of versions.toml mentions."""
    found: dict[str, str | None] = {}
    for name, wanted in expected.items():
        if name == "python":
            found[name] = f"{sys.version_info[0]}.{sys.version_info[1]}"
        elif name == "cuda":
            found[name] = _torch_cuda()
        else:
            for package in wanted if isinstance(wanted, list) else [name]:
                found[package] = _version(package)
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    """torch.version.cuda, read from the file: importing torch would need the libraries to load."""
    try:
        source = metadata.distribution("torch").locate_file("torch/version.py")
    except metadata.PackageNotFoundError:
        return None
    values: dict[str, str | None] = {}
    exec(Path(str(source)).read_text(), values)
    return values["cuda"] or "none"


def main(arguments: list[str]) -> int:
    if len(arguments) not in (2, 3):
        print("usage: check_versions.py IMAGE VARIANT [VERSIONS.TOML]", file=sys.stderr)
        return 2
    image, variant = arguments[:2]
    path = Path(arguments[2]) if len(arguments) == 3 else Path(__file__).with_name("versions.toml")
    versions: dict[str, dict[str, Expected]] = tomllib.loads(path.read_text())
    expected = versions.get(image, {}).get(variant)
    if expected is None:
        print(f"{path}: there is no [{image}.{variant}]", file=sys.stderr)
        return 2
    found = list(differences(expected, installed(expected)))
    for line in found:
        print(f"{image}/{variant}: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
