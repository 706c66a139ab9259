"""A small environment of the SGLang image, whole in all that the doctor looks at, to be broken in one thing."""

import shutil
import struct
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from images.sglang.doctor.__main__ import CHECKS
from images.sglang.doctor.installation import Fault, Installation
from images.sglang.toolkit import lay_out

LOCKED = {"sglang": "0.5.23", "sglang-kernel": "0.4.10", "torch": "2.14.1", "xgrammar": "0.2.7"}
NVRTC = "libnvrtc.so.1300"  # of no version that this machine may have elsewhere
DRIVER_HEADER = """
#define cuMemAlloc                          cuMemAlloc_v2
CUresult CUDAAPI cuInit(unsigned int Flags);
CUresult CUDAAPI cuMemAlloc(CUdeviceptr *dptr, size_t bytesize);
"""
COMPILED = "int c10_of_this_torch(void);\nint kernel(void) { return c10_of_this_torch(); }\n"


@dataclass
class Server:
    """Where everything is, and the variables that the server's process sees."""

    site_packages: Path
    home: Path
    programs: Path
    variables: dict[str, str] = field(default_factory=dict)

    def faults(self) -> dict[str, list[Fault]]:
        """What the doctor finds, by check. The kernel is left out: only a real compiler builds one."""
        installation = Installation(self.site_packages, self.variables, LOCKED)
        found = {name: list(check(installation)) for name, check in CHECKS.items() if name != "kernel"}
        return {name: faults for name, faults in found.items() if faults}


def whole_server(folder: Path) -> Server:
    site_packages, programs = folder / "site-packages", folder / "bin"
    home = site_packages / "nvidia/cu13"
    for name, version in LOCKED.items():
        install(site_packages, name, version)
    programs.mkdir()
    (programs / "g++").symlink_to(str(shutil.which("g++")))
    program(programs / "ninja", "1.13.2")
    build_toolkit(home)
    torch = site_packages / "torch"
    write(torch / "version.py", "__version__ = '2.14.1'\ncuda: Optional[str] = '13.0'\n")
    compile_library(torch / "lib/libc10.so", "int c10_of_this_torch(void) { return 0; }\n")
    kernels = site_packages / "sgl_kernel/sm100/common_ops.abi3.so"
    compile_library(kernels, COMPILED)
    add_code(kernels, 90, 100, 120)
    variables = {"PATH": f"{programs}:{home}/bin", "CUDA_HOME": str(home), "LD_LIBRARY_PATH": f"{home}/lib"}
    return Server(site_packages, home, programs, variables)


def build_toolkit(home: Path) -> None:
    """What of a CUDA 13.0 toolkit the checks look at, as the wheels bring it and toolkit.py lays it out."""
    release(home, "13.0", "nvcc", "ptxas", "cicc")
    write(home / "include/cuda_runtime_api.h", "#define CUDART_VERSION  13000\n")
    write(home / "include/cccl/cuda/std/__cccl/version.h", "#define CCCL_VERSION 3000001\n")
    for header in ("cooperative_groups.h", "cuda_runtime.h", "crt/host_config.h", "nv/target"):
        write(home / "include" / header, "")
    for header in ("cub/cub.cuh", "cuda/std/cstdint"):
        write(home / "include/cccl" / header, "")
    write(home / "include/cuda.h", DRIVER_HEADER)
    for library in ("libcudart.so.13", NVRTC):
        compile_library(home / "lib" / library, "int version(void) { return 13; }\n")
    lay_out(home)


def release(home: Path, cuda: str, *parts: str) -> None:
    """Makes parts of a toolkit say that they are of another release."""
    for part in parts:
        if part == "cicc":
            write(home / "nvvm/bin/cicc", f"\x7fELF\0Cuda compilation tools, release {cuda}, V{cuda}.88\0")
        else:
            program(home / "bin" / part, f"Cuda compilation tools, release {cuda}, V{cuda}.88")


def install(site_packages: Path, name: str, version: str) -> None:
    """Leaves a package's metadata, in the place of any other version's."""
    uninstall(site_packages, name)
    folder = site_packages / f"{name.replace('-', '_')}-{version}.dist-info"
    write(folder / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def uninstall(site_packages: Path, name: str) -> None:
    for folder in site_packages.glob(f"{name.replace('-', '_')}-*.dist-info"):
        shutil.rmtree(folder)


def program(path: Path, output: str) -> None:
    write(path, f"#!/bin/sh\necho '{output}'\n")
    path.chmod(0o755)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def compile_library(path: Path, source: str, *options: str) -> None:
    """A real shared library."""
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path), *options], input=source, text=True, check=True
    )


def add_code(library: Path, *architectures: int) -> None:
    """Gives a library a section of fat binaries with empty machine code for each card, laid out as nvcc does."""
    entries = b"".join(
        struct.pack("<HHIQIIHHI32x", 2, 0x101, 64, 8, 0, 0, 0, 0, card) + bytes(8) for card in architectures
    )
    section = library.with_suffix(".fatbin")
    section.write_bytes(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries)
    command = ["objcopy", f"--update-section=.nv_fatbin={section}", str(library)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        subprocess.run(["objcopy", f"--add-section=.nv_fatbin={section}", str(library)], check=True)
    section.unlink()
