"""Lays NVIDIA's wheels out as a CUDA toolkit, in the folder that they share (nvidia/cu13); the image's build runs it.

    toolkit.py FOLDER

The wheels have libraries by version only (libcudart.so.13), in lib; linkers are told lib64 and look for libcudart.so,
and for a stub of the driver's libcuda, which only the host has. Standard library and gcc.
"""

from __future__ import annotations

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
    # A shared object may leave symbols to be found when it is loaded, so a stub that names the library is enough.
    command = ["gcc", "-shared", "-nostdlib", "-Wl,-soname,libcuda.so.1", "-x", "c", "/dev/null", "-o", str(stub)]
    subprocess.run(command, check=True)


def _link(link: Path, target: str) -> None:
    if not link.exists():
        link.symlink_to(target)


if __name__ == "__main__":
    lay_out(Path(sys.argv[1]))
