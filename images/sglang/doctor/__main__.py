"""The doctor's command line; see the package."""

# ruff: noqa: T201  (a command: what it prints is for the one who called it)
from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

from . import compiling, flags, libraries, packages, toolchain
from .installation import Fault, Installation, this_installation

CHECKS: dict[str, Callable[[Installation], Iterator[Fault]]] = {
    "packages": packages.as_locked,
    "pip": packages.no_other_pip,
    "deep-gemm": packages.no_deep_gemm,
    "cuda-home": toolchain.cuda_home,
    "compiler": toolchain.compiler,
    "ninja": toolchain.ninja,
    "one-version": toolchain.one_version,
    "headers": toolchain.headers,
    "linker": toolchain.linkable,
    "nvrtc": libraries.nvrtc,
    "libraries": libraries.resolved,
    "card": libraries.kernels_for_card,
    "kernel": compiling.kernel,
}
"""By name; a check's docstring says what is so where it finds nothing."""

HERE = Path(__file__).resolve().parent
LOCK = HERE.parent / "lock"
SERVER_HELP = HERE.parent / "server-help.txt"
"""What the server's --help printed when the image was built."""


def report(named: Iterable[tuple[str, str, list[Fault]]]) -> int:
    """Prints a line for each check; returns how many faults there are."""
    count = 0
    for name, proves, found in named:
        if not found:
            print(f"ok    {name:<12} {proves}", flush=True)
        for fault in found:
            print(f"FAIL  {name:<12} {fault.cause}\n{'':<18} remedy: {fault.remedy}", flush=True)
        count += len(found)
    return count


def examine(installation: Installation) -> Iterator[tuple[str, str, list[Fault]]]:
    """Name, what it proves, and faults of each check."""
    for name, check in CHECKS.items():
        yield name, (check.__doc__ or "").strip(), list(check(installation))


def serve(arguments: list[str]) -> NoReturn:
    """Becomes the server, where nothing is wrong."""
    known = flags.known_options(SERVER_HELP.read_text() if SERVER_HELP.is_file() else flags.asked_of_server())
    spelled, changes = flags.spelled_for(arguments, known)
    for change in changes:
        print(f"note  {'options':<12} {change}", flush=True)
    options = ("options", "the server knows every option, and each works on SM120", list(flags.faults(spelled, known)))
    if report([*examine(this_installation(LOCK)), options]):
        sys.exit("doctor: the server is not started")
    os.execv(sys.executable, [sys.executable, "-m", "sglang.launch_server", *spelled])


def main(arguments: list[str]) -> int:
    match arguments:
        case ["check"]:
            return 1 if report(examine(this_installation(LOCK))) else 0
        case ["help-of-server"]:
            print(flags.asked_of_server())
            return 0
        case ["serve", *server]:
            serve(server)
    print("usage: python -m doctor check | serve [SERVER ARGUMENTS] | help-of-server", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
