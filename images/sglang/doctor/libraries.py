"""Whether compiled extensions load and have code for the card."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from .fatbin import MACHINE_CODE, code_in
from .installation import CARD, Fault, Installation

DRIVER = re.compile(r"libcuda\.so|libnvidia-ml\.so|libnvcuvid\.so")
"""Libraries of the driver: the host's, which the container toolkit brings in."""
DRIVER_SYMBOL = re.compile(r"(cu|nvml|cuvid)[A-Z]\w*$")
LOADER = "/lib64/ld-linux-x86-64.so.2"
FOLDERS = ("sgl_kernel", "torch/lib")
TORCH = ("c10", "torch", "torch_python", "c10_cuda", "torch_cuda")
"""What `import torch` has loaded by the time that an extension is."""


class Unresolved(NamedTuple):
    """What the loader lacks for one library."""

    refused: str | None
    """Why it does not take the library at all."""
    missing: list[str]
    """Libraries that are not found."""
    undefined: list[str]
    """Symbols that nothing it loads has."""


def nvrtc(installation: Installation) -> Iterator[Fault]:
    """the loader finds libnvrtc"""
    home = installation.cuda_home
    names = sorted(found.name for found in home.glob("lib/libnvrtc.so.*")) if home else []
    if home is not None and not names:
        yield Fault(f"there is no libnvrtc in {home}/lib", "lock nvidia-cuda-nvrtc (images/sglang/toolchain.in)")
    for name in names:
        program = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
        loaded = subprocess.run(
            [sys.executable, "-c", program, name], env=dict(installation.variables), capture_output=True, check=False
        )
        if loaded.returncode != 0:
            yield Fault(
                f"{name} is not on the library path (it lies in {home}/lib): kernels compiled by nvrtc fail to load",
                f"write {home}/lib to a file in /etc/ld.so.conf.d and run ldconfig, as the image does",
            )


def resolved(installation: Installation) -> Iterator[Fault]:
    """every library of sgl_kernel and torch finds what it links to"""
    for folder in FOLDERS:
        for library in sorted((installation.site_packages / folder).rglob("*.so*")):
            refused, missing, undefined = unresolved(library, installation)
            name = library.relative_to(installation.site_packages)
            if refused:
                yield Fault(f"{name} does not load: {refused}", "build the image again from its lock")
            if missing:
                yield Fault(
                    f"{name} needs {', '.join(missing)}, which the loader does not find",
                    "take sglang-kernel and torch of one CUDA, as the lock has them",
                )
            if undefined:
                torch = installation.version("torch")
                yield Fault(
                    f"{name}: undefined symbol {undefined[0]}"
                    + (f" and {len(undefined) - 1} more" if len(undefined) > 1 else "")
                    + f": it was built for another torch than {torch}",
                    "take sglang-kernel and torch as one release of sglang pins them, as the lock has them",
                )


def unresolved(library: Path, installation: Installation) -> Unresolved:
    """What the loader cannot give to one library, the driver's left out.

    The loader is asked to load it as Python would, after torch's own, and to bind every symbol; nothing is run.
    """
    folder = installation.site_packages / "torch/lib"
    torch = [path for name in TORCH if (path := folder / f"lib{name}.so").is_file() and path != library]
    preload = ":".join(map(str, [*torch, library]))
    tracing = {"LD_TRACE_LOADED_OBJECTS": "1", "LD_WARN": "yes", "LD_BIND_NOW": "yes"}
    result = subprocess.run(
        [LOADER, "--preload", preload, str(Path(sys.executable).resolve())],
        env=dict(installation.variables) | tracing, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return parse_trace(result.stdout + result.stderr, library)


def parse_trace(output: str, library: Path) -> Unresolved:
    """What a trace of the loader says about one library; the driver's libraries and symbols are left out."""
    refused = re.search(rf"object '{re.escape(str(library))}' .*cannot be preloaded \((.*)\)", output)
    missing = re.findall(r"^\s*(\S+) => not found", output, flags=re.MULTILINE)
    undefined = re.findall(
        rf"symbol:? (\S+?),? .*\({re.escape(str(library))}\)$", output.replace("\t", " "), flags=re.MULTILINE
    )
    return Unresolved(
        refused[1] if refused else None,
        [name for name in _once(missing) if not DRIVER.match(name)],
        [symbol for symbol in _once(undefined) if not DRIVER_SYMBOL.match(symbol)],
    )


def _once(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def kernels_for_card(installation: Installation) -> Iterator[Fault]:
    """sgl_kernel has code for SM120"""
    folder = installation.site_packages / "sgl_kernel"
    cards = {
        str(library.relative_to(folder)): sorted(
            code.architecture for code in code_in(library) if code.kind == MACHINE_CODE
        )
        for library in sorted(folder.rglob("common_ops*.so"))
    }
    if not cards:
        yield Fault(f"{folder} holds no common_ops: there are no kernels at all", "lock sglang-kernel with its sglang")
    elif not any(CARD in built_for for built_for in cards.values()):
        named = "; ".join(f"{name}: {', '.join(f'SM{card}' for card in cards[name]) or 'none'}" for name in cards)
        yield Fault(
            f"sgl_kernel {installation.version('sglang-kernel')} has no code for SM{CARD} ({named})",
            "take a release of sglang whose sglang-kernel has it: 0.5.11 or later",
        )
