"""Compares what an environment holds with images/versions.toml; a build runs it, with that environment's Python.

    check_versions.py IMAGE VARIANT [--versions VERSIONS.TOML] [--record FILE]

Prints one line for each difference and exits 1 when there is one. Otherwise --record writes what start.py compares
with at each start of a container. Standard library only.
"""

# ruff: noqa: T201  (a command: what it prints is for the one who called it)
from __future__ import annotations

import argparse
import json
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


def faults(image: str, variant: str, expected: Expected) -> list[str]:
    """A line for each difference between this environment and what a table of versions.toml says."""
    return [f"{image}/{variant}: {line}" for line in differences(expected, installed(expected))]


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare this environment with images/versions.toml.")
    parser.add_argument("image")
    parser.add_argument("variant")
    parser.add_argument("--versions", type=Path, default=Path(__file__).with_name("versions.toml"))
    parser.add_argument("--record", type=Path, help="where to write what was compared with")
    arguments = parser.parse_args()
    versions: dict[str, dict[str, Expected]] = tomllib.loads(arguments.versions.read_text())
    expected = versions.get(arguments.image, {}).get(arguments.variant)
    if expected is None:
        print(f"{arguments.versions}: there is no [{arguments.image}.{arguments.variant}]", file=sys.stderr)
        return 2
    if found := faults(arguments.image, arguments.variant, expected):
        print("\n".join(found), file=sys.stderr)
        return 1
    if arguments.record:
        contents = {"image": arguments.image, "variant": arguments.variant, "expected": expected}
        arguments.record.write_text(json.dumps(contents, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
