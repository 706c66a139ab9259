"""Lays NVIDIA's wheels out as a CUDA toolkit, in the folder that they share (nvidia/cu13); the image's build runs it.

    toolkit.py FOLDER

The wheels have libraries by version only (libcudart.so.13), in lib; linkers are told lib64 and look for libcudart.so,
and for a stub of the driver's libcuda, which only the host has. Needs gcc; standard library only.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def lay_out(folder: Path) -> None:
    """Makes lib64, a name without version for each library, and lib/stubs/libcuda.so. May be run again."""
    _link(folder / "lib64", "lib")
    for library in sorted((folder / "lib").glob("lib*.so.*")):
        _link(library.with_name(library.name.partition(".so")[0] + ".so"), library.name)
    stub = folder / "lib/stubs/libcuda.so"
    stub.parent.mkdir(exist_ok=True)
    source = "".join(f"void {name}(void) {{}}\n" for name in driver_functions((folder / "include/cuda.h").read_text()))
    command = ["gcc", "-shared", "-w", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", str(stub)]
    subprocess.run(command, input=source, text=True, check=True)


def driver_functions(header: str) -> list[str]:
    """The functions of the driver that cuda.h declares, under each name that a caller may link to.

    A library that calls one of them notes that it needs libcuda only where the stub has the name.
    """
    declared = re.findall(r"CUDAAPI (cu[A-Z]\w*)\(", header)
    renamed = re.findall(r"^#\s*define (cu[A-Z]\w*)\s+(cu[A-Z]\w*)\s*$", header, flags=re.MULTILINE)
    return sorted({*declared, *(new for _old, new in renamed)})


def _link(link: Path, target: str) -> None:
    if not link.exists():
        link.symlink_to(target)


if __name__ == "__main__":
    lay_out(Path(sys.argv[1]))
