"""Whether the CUDA toolkit that kernels are compiled with at run time is whole and of one version."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from .installation import Fault, Installation

TOOLKIT = (
    "lock nvidia-cuda-nvcc, -crt, -cccl, -runtime, -nvrtc and nvidia-nvvm at one minor version, torch's "
    "(images/sglang/toolchain.in)"
)
HEADERS = {
    "nv/target": "nvidia-cuda-cccl",
    "cub/cub.cuh": "nvidia-cuda-cccl",
    "cuda/std/cstdint": "nvidia-cuda-cccl",
    "cooperative_groups.h": "nvidia-cuda-runtime",
    "cuda_runtime.h": "nvidia-cuda-runtime",
    "crt/host_config.h": "nvidia-cuda-crt",
}
"""What kernels include, and the package that has it."""

PTX_OF_CUDA = {"12.8": "8.7", "12.9": "8.8", "13.0": "9.0", "13.1": "9.1", "13.2": "9.2", "13.3": "9.3"}
"""The PTX that each release writes at most (PTX ISA, release notes)."""


def cuda_home(installation: Installation) -> Iterator[Fault]:
    """CUDA_HOME names the toolkit"""
    if installation.cuda_home is None:
        value = installation.variables.get("CUDA_HOME")
        what = f"CUDA_HOME is {value}, which is no folder" if value else "CUDA_HOME is not set"
        yield Fault(
            f"{what}: flashinfer, tvm-ffi and whoever else compiles kernels cannot find the toolkit",
            "set CUDA_HOME=/usr/local/cuda, as the image does",
        )


def compiler(installation: Installation) -> Iterator[Fault]:
    """nvcc and a C++ compiler are there, and on PATH"""
    home = installation.cuda_home
    if home is not None and not (home / "bin/nvcc").is_file():
        yield Fault(f"there is no nvcc in {home}/bin: no kernel can be compiled", TOOLKIT)
    elif shutil.which("nvcc", path=installation.path) is None:
        where = f"it lies in {home}/bin" if home else "and CUDA_HOME does not help"
        yield Fault(
            f"nvcc is not on PATH ({where}): kernels that are compiled while CUDA graphs are captured fail",
            "put $CUDA_HOME/bin on PATH, as the image does",
        )
    if shutil.which("g++", path=installation.path) is None:
        yield Fault("g++ is not on PATH: nvcc needs it for the host's half of each kernel", "install g++ in the image")


def ninja(installation: Installation) -> Iterator[Fault]:
    """ninja is on PATH"""
    if shutil.which("ninja", path=installation.path) is None:
        yield Fault(
            "ninja is not on PATH: flashinfer builds its kernels with it, and the server waits for them in vain",
            "lock ninja (images/sglang/toolchain.in) and keep the environment's bin on PATH",
        )


def headers(installation: Installation) -> Iterator[Fault]:
    """the headers that kernels include are there"""
    home = installation.cuda_home
    if home is None:
        return
    for header, package in HEADERS.items():
        if not any((home / folder / header).is_file() for folder in ("include", "include/cccl")):
            yield Fault(
                f"<{header}> is in none of {home}/include and its cccl: kernels that include it do not compile",
                f"lock {package} at the compiler's minor version (images/sglang/toolchain.in)",
            )


def linkable(installation: Installation) -> Iterator[Fault]:
    """libcudart and libcuda's stub lie where the linker looks"""
    home = installation.cuda_home
    if home is None:
        return
    for library in ("lib64/libcudart.so", "lib64/stubs/libcuda.so"):
        if not (home / library).exists():
            name = Path(library).name.removeprefix("lib").removesuffix(".so")
            wheels = sorted(str(found) for found in home.glob(f"lib/lib{name}.so*"))
            yield Fault(
                f"{home / library} is not there ({', '.join(wheels) or 'nor anything like it in lib'}): linking a "
                f"kernel ends with `cannot find -l{name}`",
                "lay the wheels out as a toolkit: python images/sglang/toolkit.py $CUDA_HOME",
            )


def one_version(installation: Installation) -> Iterator[Fault]:
    """compiler, assembler, headers and torch are of one CUDA"""
    home = installation.cuda_home
    if home is None:
        return
    found = {name: version for name, version in versions(home, installation.site_packages).items() if version}
    nvcc, cicc, ptxas = found.get("nvcc"), found.get("cicc"), found.get("ptxas")
    if cicc and ptxas and _minor(cicc) > _minor(ptxas):
        yield Fault(
            f"nvvm's cicc is {cicc} and writes PTX {PTX_OF_CUDA.get(cicc, 'of its own')}; ptxas is {ptxas} and "
            f"assembles PTX {PTX_OF_CUDA.get(ptxas, 'of its own')} at most",
            TOOLKIT,
        )
    if nvcc is None:
        return
    others = {name: version for name, version in found.items() if version != nvcc and name != "cicc"}
    if cicc and ptxas and cicc != nvcc and _minor(cicc) <= _minor(ptxas):
        others["cicc"] = cicc
    if others:
        named = ", ".join(f"{name} {version}" for name, version in others.items())
        yield Fault(f"nvcc is of CUDA {nvcc}, and these are not: {named}", TOOLKIT)


def versions(home: Path, site_packages: Path) -> dict[str, str | None]:
    """The CUDA release, as "13.0", of each part of a toolkit and of torch; None where it does not say."""
    return {
        "nvcc": _of_program(home / "bin/nvcc"),
        "ptxas": _of_program(home / "bin/ptxas"),
        "cicc": _of_binary(home / "nvvm/bin/cicc"),
        "headers": _of_define(home / "include/cuda_runtime_api.h", "CUDART_VERSION", major=1000, minor=10),
        # CCCL 3.0 came with CUDA 13.0, 3.1 with 13.1, and so on.
        "CCCL": _cccl(home / "include/cccl/cuda/std/__cccl/version.h"),
        "torch": _of_torch(site_packages / "torch/version.py"),
    }


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _of_program(program: Path) -> str | None:
    try:
        output = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return _release(output)


def _of_binary(program: Path) -> str | None:
    """cicc prints no version of its own; the text that it writes into PTX has it."""
    return _release(program.read_bytes().decode("latin-1")) if program.is_file() else None


def _release(text: str) -> str | None:
    match = re.search(r"release (\d+\.\d+)", text)
    return match[1] if match else None


def _of_define(header: Path, name: str, major: int, minor: int) -> str | None:
    match = re.search(rf"^#define {name}\s+(\d+)", header.read_text(), flags=re.MULTILINE) if header.is_file() else None
    return f"{int(match[1]) // major}.{int(match[1]) % major // minor}" if match else None


def _cccl(header: Path) -> str | None:
    own = _of_define(header, "CCCL_VERSION", major=1_000_000, minor=1000)
    return None if own is None else re.sub(r"^\d+", lambda major: str(int(major[0]) + 10), own)


def _of_torch(source: Path) -> str | None:
    match = (
        re.search(r"^cuda\b.*=\s*['\"](\d+\.\d+)", source.read_text(), flags=re.MULTILINE) if source.is_file() else None
    )
    return match[1] if match else None
