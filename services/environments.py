"""Makes the local environments: one per image from that image's `cpu` lock, the operator's, and the tools'.

    python3 services/environments.py [NAME ...]         all of them when none is named

Needs nothing but Python 3.11. Each lands in `.envs/<name>`. An environment is whole when the digest of its lock
stands in it, which is written last: a second run is instant, an interrupted or outdated one is made anew.
"""

# ruff: noqa: T201  (a command: what it prints is for the one who called it)
from __future__ import annotations

import argparse
import fcntl
import hashlib
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PYTHON = (3, 11)
MARKER = "lock.sha256"


class Environment(NamedTuple):
    """What an environment is made from."""

    lock: str  # from the repository's root
    megabytes: int  # once installed
    project: bool  # whether `services` and `dflash` are importable in it


# The largest first, so that two at a time end together.
KNOWN = {
    "sglang": Environment("images/sglang/cpu.lock", 2600, project=False),
    "trainer": Environment("images/trainer/cpu.lock", 1500, project=True),
    "tokenizer": Environment("images/tokenizer/cpu.lock", 900, project=True),
    "stack": Environment("services/stack/requirements.lock", 400, project=True),
    "tests": Environment("tests/requirements.lock", 300, project=False),
    "producer": Environment("images/producer/cpu.lock", 250, project=True),
}


class CannotMakeError(Exception):
    """Why an environment was not made and what to do: one line."""


def interpreter(name: str, root: Path = ROOT) -> Path:
    """The Python of an environment, whether it is made yet or not."""
    return root / ".envs" / name / "bin" / "python"


def is_whole(folder: Path, lock: Path) -> bool:
    """Whether `folder` holds all of the lock as it is now."""
    marker = folder / MARKER
    return marker.is_file() and marker.read_text() == _digest(lock)


def make(name: str, root: Path = ROOT) -> float:
    """Makes one environment unless it is whole.

    Returns the seconds it took, 0 when there was nothing to do. Raises CannotMakeError.
    """
    environment, folder = KNOWN[name], root / ".envs" / name
    lock = root / environment.lock
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / f"{name}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # another run may be making the same one: wait for it
        if is_whole(folder, lock):
            return 0.0
        began = time.monotonic()
        if folder.exists():
            shutil.rmtree(folder)
        log = folder.parent / f"{name}.log"
        log.unlink(missing_ok=True)
        _run([sys.executable, "-m", "venv", str(folder)], name, log)
        python = interpreter(name, root)
        # The lock is whole and already resolved: --no-deps keeps pip from looking further.
        install = ["-m", "pip", "install", "--no-deps", "--require-hashes", "--no-compile", "-r", str(lock)]
        _run([str(python), *install], name, log)
        (_site_packages(folder) / "dflash_stack.pth").write_text(_path_file(root if environment.project else None))
        (folder / MARKER).write_text(_digest(lock))
        return time.monotonic() - began


def make_all(names: Sequence[str], root: Path = ROOT) -> None:
    """Makes the named environments, two at a time, telling each as it is done. Raises CannotMakeError."""
    _check_machine(names, root)
    with ThreadPoolExecutor(max_workers=2) as pool:
        making = {pool.submit(make, name, root): name for name in sorted(names, key=list(KNOWN).index)}
        for done in as_completed(making):
            seconds = done.result()
            print(f"environment {making[done]}: " + (f"made in {seconds:.0f} s" if seconds else "ready"), flush=True)


def _digest(lock: Path) -> str:
    return hashlib.sha256(lock.read_bytes()).hexdigest()


def _path_file(project: Path | None) -> str:
    # pip compiles nothing (--no-compile): a fraction is ever imported, and is kept compiled from then on.
    keep_bytecode = "import sys; sys.dont_write_bytecode = False\n"
    return keep_bytecode + (f"{project}\n" if project else "")


def _site_packages(folder: Path) -> Path:
    return folder / "lib" / f"python{PYTHON[0]}.{PYTHON[1]}" / "site-packages"


def _run(command: list[str], name: str, log: Path) -> None:
    with log.open("a") as output:
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    if status != 0:
        errors = [line for line in log.read_text().splitlines() if line.startswith("ERROR:")]
        cause = errors[-1].removeprefix("ERROR: ") if errors else f"`{' '.join(command[:4])}` failed"
        raise CannotMakeError(f"environment {name} was not made: {cause} (all of it in {log})")


def _check_machine(names: Sequence[str], root: Path) -> None:
    if sys.version_info[:2] != PYTHON:
        have, need = (f"{major}.{minor}" for major, minor in (sys.version_info[:2], PYTHON))
        raise CannotMakeError(f"the locks are for Python {need} and this is {have}: call python{need}")
    missing = [n for n in names if not is_whole(root / ".envs" / n, root / KNOWN[n].lock)]
    needed = sum(KNOWN[name].megabytes for name in missing) / 1000
    free = shutil.disk_usage(root).free / 1e9
    if needed > free:
        raise CannotMakeError(
            f"{root / '.envs'} needs {needed:.1f} GB for {', '.join(missing)} and the disk has {free:.1f} GB: free some"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the local environments under .envs.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(KNOWN))
    names = parser.parse_args().names or list(KNOWN)
    if unknown := sorted(set(names) - set(KNOWN)):
        parser.error(f"there is no environment {unknown[0]}; there are {', '.join(KNOWN)}")
    try:
        make_all(names)
    except CannotMakeError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
