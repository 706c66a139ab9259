"""Whether the toolkit really compiles, assembles and links a kernel for the card."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .fatbin import MACHINE_CODE, Code, code_in
from .installation import CARD, Fault, Installation

KERNEL = Path(__file__).with_name("kernel.cu")


def kernel(installation: Installation) -> Iterator[Fault]:
    """a kernel with cooperative groups, CCCL and cub compiles and links for SM120"""
    home = installation.cuda_home
    if home is None or not (home / "bin/nvcc").is_file():
        return  # toolchain.compiler and toolchain.cuda_home say so
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "kernel.so")
        message = build(home, library, installation)
        if message is not None:
            yield Fault(
                f"nvcc cannot build a kernel for SM{CARD}: {message}",
                "see to the faults above first; else lock the toolkit anew (images/sglang/toolchain.in)",
            )
        elif Code(MACHINE_CODE, CARD) not in code_in(library):
            yield Fault(f"nvcc built a kernel with no code for SM{CARD}", "lock a toolkit of CUDA 12.8 or later")


def build(home: Path, library: Path, installation: Installation) -> str | None:
    """Builds the kernel as flashinfer's build files do; the first error that was printed, None where all went well."""
    command = [
        str(home / "bin/nvcc"), "-std=c++17", f"-gencode=arch=compute_{CARD}a,code=sm_{CARD}a",
        "-Xcompiler=-fPIC", "-shared", "-cudart=none", f"-L{home}/lib64", f"-L{home}/lib64/stubs", "-lcudart", "-lcuda",
        "-o", str(library), str(KERNEL),
    ]  # fmt: skip
    variables = dict(installation.variables) | {"TMPDIR": str(library.parent)}
    result = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return None
    lines = (result.stdout + result.stderr).splitlines()
    return next(
        (line for line in lines if "error" in line or "cannot find" in line or "fatal" in line), " ".join(lines[:1])
    )
