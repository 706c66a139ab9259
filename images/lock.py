"""Renews the hashed locks: one per image and variant, the containers' init, the operator's, the tools'.

    python images/lock.py [--upgrade] [NAME ...]        NAME: trainer, trainer/cu128, init, stack, tests

Needs `uv`, which is in the tools' environment (python3 services/environments.py tests). A lock is resolved from
`requirements.in` and `<variant>.in`; `<variant>-excludes.txt` and `<variant>-overrides.txt`, where they exist,
take away or replace what a package asks for. Without --upgrade, pins already in a lock are kept where they fit.
No lock holds an index address: where a build is not on the default index (torch's CPU build), pip has to be
told by its own settings, at locking and at installing alike (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL).
"""

# ruff: noqa: T201  (a command: what it prints is for the one who called it)
from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

IMAGES = Path(__file__).resolve().parent
ROOT = IMAGES.parent
UV = ROOT / ".envs/tests/bin/uv"
# Debian 12's glibc: sglang's wheels ask for 2.34 at least.
PLATFORM = ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_36"]


class Lock(NamedTuple):
    name: str
    path: Path
    inputs: list[Path]
    options: list[str]


def locks() -> list[Lock]:
    """Every lock of the project, the images' variants as versions.toml lists them."""
    found = []
    for image, variants in tomllib.loads((IMAGES / "versions.toml").read_text()).items():
        folder = IMAGES / image
        for variant in variants:
            inputs = [p for p in (folder / "requirements.in", folder / f"{variant}.in") if p.exists()]
            options = [
                f"--{kind}={folder / f'{variant}-{kind}.txt'}"
                for kind in ("excludes", "overrides")
                if (folder / f"{variant}-{kind}.txt").exists()
            ]
            found.append(Lock(f"{image}/{variant}", folder / f"{variant}.lock", inputs, options))
    found.append(Lock("init", IMAGES / "init.lock", [IMAGES / "init.in"], []))
    for name, folder in (("stack", ROOT / "services/stack"), ("tests", ROOT / "tests")):
        found.append(Lock(name, folder / "requirements.lock", [folder / "requirements.in"], []))
    return found


def renew(lock: Lock, upgrade: bool) -> int:
    """Resolves one lock; returns uv's exit code, its own words go to stderr."""
    command = [
        str(UV), "pip", "compile", "--quiet", "--no-header", "--no-annotate",
        "--generate-hashes", "--only-binary=:all:", *PLATFORM, *lock.options, *(["--upgrade"] if upgrade else []),
        "--output-file", str(lock.path), *map(str, lock.inputs),
    ]  # fmt: skip
    environment = dict(os.environ)
    for pip_name, uv_name in (("PIP_FIND_LINKS", "UV_FIND_LINKS"), ("PIP_EXTRA_INDEX_URL", "UV_EXTRA_INDEX_URL")):
        if pip_name in os.environ:
            environment.setdefault(uv_name, os.environ[pip_name])
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description="Renew the hashed locks.")
    parser.add_argument("names", nargs="*", help="an image, IMAGE/VARIANT, init, stack or tests; all if none")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions the inputs allow")
    arguments = parser.parse_args()
    known = locks()
    if not UV.exists():
        print(f"lock: {UV} is not there: python3 services/environments.py tests")
        return 1
    chosen = [x for x in known if not arguments.names or {x.name, x.name.split("/")[0]} & set(arguments.names)]
    if not chosen:
        print(f"lock: no lock is named {' '.join(arguments.names)}; there are {', '.join(x.name for x in known)}")
        return 2
    failed = 0
    for lock in chosen:
        if renew(lock, arguments.upgrade) == 0:
            print(f"lock: {lock.path.relative_to(ROOT)}")
        else:
            print(f"lock: {lock.name} could not be resolved (above); {lock.path.relative_to(ROOT)} is unchanged")
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
