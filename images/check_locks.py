"""Compares every lock with images/versions.toml: when one moves torch or CUDA, the other has to say so with it.

    check_locks.py [IMAGES FOLDER]

Prints a line for each difference and exits 1 when there is one. `make lint` runs it. Standard library only.
"""

# ruff: noqa: T201  (a command: what it prints is for the one who called it)
from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

IMAGES = Path(__file__).resolve().parent


def pins(lock: str) -> dict[str, str]:
    """Version by package."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", lock, flags=re.MULTILINE))


def cuda_of(locked: Mapping[str, str]) -> str | None:
    """torch.version.cuda of the torch that a lock brings, "none" for a CPU build; None where there is no torch.

    torch's wheels are of one CUDA and pin the runtime that they were built with.
    """
    if "torch" not in locked:
        return None
    runtimes = [locked[name] for name in ("nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime") if name in locked]
    return ".".join(runtimes[0].split(".")[:2]) if runtimes else "none"


def differences(expected: Mapping[str, str | list[str]], locked: Mapping[str, str]) -> Iterator[str]:
    """What a lock has otherwise than its table of versions.toml says."""
    found = dict(locked) | ({"cuda": cuda} if (cuda := cuda_of(locked)) else {})
    for name, wanted in expected.items():
        if name == "absent":
            yield from (f"{package}: must not be in it, is {found[package]}" for package in wanted if package in found)
        elif name != "python" and found.get(name) != wanted:
            yield f"{name}: versions.toml says {wanted}, the lock has {found.get(name, 'none')}"
    for name in ("torch", "cuda"):
        if name in found and name not in expected and name not in expected.get("absent", []):
            yield f"{name}: the lock has {found[name]}, and versions.toml does not say so"


def main(images: Path) -> int:
    count = 0
    for image, variants in tomllib.loads((images / "versions.toml").read_text()).items():
        for variant, expected in variants.items():
            lock = images / image / f"{variant}.lock"
            if not lock.is_file():
                print(f"{image}/{variant}: there is no {lock.name}: make lock")
                count += 1
                continue
            for line in differences(expected, pins(lock.read_text())):
                print(f"{image}/{variant}: {line}")
                count += 1
    if count:
        print(
            "A lock and images/versions.toml have to change together: name the version there, if it is meant to move."
        )
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES))
