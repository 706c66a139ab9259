import subprocess
from pathlib import Path

import pytest

from images.sglang.doctor import compiling, libraries
from images.sglang.doctor.__main__ import report
from images.sglang.doctor.fatbin import Code, code_in
from images.sglang.doctor.installation import Fault, Installation
from tests.unit.images.broken_servers import (
    COMPILED,
    NVRTC,
    Server,
    add_code,
    compile_library,
    install,
    program,
    release,
    uninstall,
    whole_server,
)


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return whole_server(tmp_path)


def only_fault(server: Server, check: str) -> Fault:
    """The one thing that the doctor finds."""
    found = server.faults()
    assert list(found) == [check], found
    (fault,) = found[check]
    return fault


def test_nothing_is_found_in_a_whole_environment(server: Server) -> None:
    assert server.faults() == {}


# What kept the reference run from serving, one after the other; each is broken here just so.


def test_package_that_could_not_be_installed_for_want_of_pip(server: Server) -> None:
    uninstall(server.site_packages, "xgrammar")
    fault = only_fault(server, "packages")
    assert (
        fault.cause == "not installed: xgrammar 0.2.7; there is no pip in this environment to add them with, by design"
    )
    assert "`make lock`, and build the image again" in fault.remedy


def test_pip_of_another_interpreter(server: Server) -> None:
    program(server.programs / "pip", "pip 26.0")
    fault = only_fault(server, "pip")
    assert fault.cause.startswith(f"{server.programs}/pip is on PATH but belongs to another interpreter")
    assert "take it off PATH" in fault.remedy


def test_torch_that_a_resolver_moved(server: Server) -> None:
    install(server.site_packages, "torch", "2.11.0+cu130")
    fault = only_fault(server, "packages")
    assert fault.cause == "torch is 2.11.0+cu130, and the lock says 2.14.1: something installed later has moved it"
    assert fault.remedy == "build the image again from its lock, and install nothing into a running one"


def test_kernels_without_code_for_the_card(server: Server) -> None:
    add_code(server.site_packages / "sgl_kernel/sm100/common_ops.abi3.so", 90, 100)
    fault = only_fault(server, "card")
    assert fault.cause == "sgl_kernel 0.4.10 has no code for SM120 (sm100/common_ops.abi3.so: SM90, SM100)"
    assert "take a release of sglang whose sglang-kernel has it" in fault.remedy


def test_kernels_built_for_another_torch(server: Server) -> None:
    compile_library(server.site_packages / "torch/lib/libc10.so", "int c10_of_another_torch(void) { return 0; }\n")
    fault = only_fault(server, "libraries")
    assert fault.cause == (
        "sgl_kernel/sm100/common_ops.abi3.so: undefined symbol c10_of_this_torch: "
        "it was built for another torch than 2.14.1"
    )
    assert "as one release of sglang pins them" in fault.remedy


def test_no_compiler(server: Server) -> None:
    (server.home / "bin/nvcc").unlink()
    fault = only_fault(server, "compiler")
    assert fault.cause == f"there is no nvcc in {server.home}/bin: no kernel can be compiled"
    assert "lock nvidia-cuda-nvcc" in fault.remedy


def test_deep_gemm_that_asks_for_cuda_home(server: Server) -> None:
    install(server.site_packages, "sgl-deep-gemm", "0.2.3")
    (server.site_packages / "deep_gemm").mkdir()
    del server.variables["CUDA_HOME"]
    found = server.faults()
    assert list(found) == ["deep-gemm", "cuda-home"]
    assert "importing it fails without CUDA_HOME (CUDA_HOME is not set)" in found["deep-gemm"][0].cause
    assert "leave it out (images/sglang/<variant>-excludes.txt)" in found["deep-gemm"][0].remedy
    assert found["cuda-home"][0].cause.startswith("CUDA_HOME is not set")
    assert found["cuda-home"][0].remedy == "set CUDA_HOME=/usr/local/cuda, as the image does"


def test_nvrtc_off_the_library_path(server: Server) -> None:
    del server.variables["LD_LIBRARY_PATH"]
    fault = only_fault(server, "nvrtc")
    assert fault.cause.startswith(f"{NVRTC} is not on the library path (it lies in {server.home}/lib)")
    assert "/etc/ld.so.conf.d and run ldconfig" in fault.remedy


def test_compiler_that_is_not_found_while_graphs_are_captured(server: Server) -> None:
    server.variables["PATH"] = str(server.programs)
    fault = only_fault(server, "compiler")
    assert fault.cause == (
        f"nvcc is not on PATH (it lies in {server.home}/bin): "
        "kernels that are compiled while CUDA graphs are captured fail"
    )
    assert fault.remedy == "put $CUDA_HOME/bin on PATH, as the image does"


def test_no_ninja(server: Server) -> None:
    (server.programs / "ninja").unlink()
    fault = only_fault(server, "ninja")
    assert fault.cause.startswith("ninja is not on PATH: flashinfer builds its kernels with it")
    assert "lock ninja" in fault.remedy


def test_compiler_newer_than_the_headers(server: Server) -> None:
    release(server.home, "13.2", "nvcc", "ptxas", "cicc")
    fault = only_fault(server, "one-version")
    assert fault.cause == "nvcc is of CUDA 13.2, and these are not: headers 13.0, CCCL 13.0, torch 13.0"
    assert "at one minor version, torch's" in fault.remedy


def test_assembler_older_than_the_ptx_that_is_written(server: Server) -> None:
    release(server.home, "13.2", "cicc")
    fault = only_fault(server, "one-version")
    assert fault.cause == "nvvm's cicc is 13.2 and writes PTX 9.2; ptxas is 13.0 and assembles PTX 9.0 at most"
    assert "nvidia-nvvm at one minor version" in fault.remedy


def test_runtime_library_that_lies_in_lib_alone(server: Server) -> None:
    (server.home / "lib64").unlink()
    found = server.faults()
    assert list(found) == ["linker"]
    cudart, cuda = found["linker"]
    assert cudart.cause.startswith(f"{server.home}/lib64/libcudart.so is not there ({server.home}/lib/libcudart.so")
    assert cudart.cause.endswith("ends with `cannot find -lcudart`")
    assert cuda.cause.endswith("ends with `cannot find -lcuda`")
    assert "toolkit.py" in cudart.remedy


def test_header_of_cccl_that_is_not_there(server: Server) -> None:
    (server.home / "include/nv/target").unlink()
    fault = only_fault(server, "headers")
    assert fault.cause.startswith(f"<nv/target> is in none of {server.home}/include and its cccl")
    assert "lock nvidia-cuda-cccl" in fault.remedy


# And what lies behind those checks.


def test_library_that_calls_the_driver_notes_that_it_needs_it(server: Server) -> None:
    source, library = "int cuMemAlloc_v2(void);\nint f(void) { return cuMemAlloc_v2(); }\n", server.home / "caller.so"
    stubs = server.home / "lib64/stubs"
    compile_library(library, source, f"-L{stubs}", "-lcuda")
    assert (
        "libcuda.so.1" in subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    )


def test_libraries_of_the_driver_may_be_missing(server: Server) -> None:
    source = COMPILED + "int cuInit(unsigned);\nint ready(void) { return cuInit(0); }\n"
    library = server.site_packages / "sgl_kernel/flash.so"
    compile_library(library, source, f"-L{server.home}/lib64/stubs", "-lcuda")
    assert server.faults() == {}
    compile_library(
        library, source + "int gone(void);\nint f(void) { return gone(); }\n", f"-L{server.home}/lib64/stubs", "-lcuda"
    )
    assert "undefined symbol gone" in only_fault(server, "libraries").cause


def test_library_of_another_cuda_is_named(tmp_path: Path) -> None:
    trace = "\tlibcudart.so.12 => not found\n\tlibcuda.so.1 => not found\n\tlibc.so.6 => /lib/libc.so.6 (0x0)\n"
    assert libraries.parse_trace(trace, tmp_path / "ops.so") == (None, ["libcudart.so.12"], [])


def test_library_that_the_loader_does_not_take_is_named(server: Server) -> None:
    (server.site_packages / "sgl_kernel/flash.so").write_text("cut short")
    fault = only_fault(server, "libraries")
    assert fault.cause.startswith("sgl_kernel/flash.so does not load: ")


def test_first_error_of_the_compiler_is_told(server: Server) -> None:
    nvcc = server.home / "bin/nvcc"
    nvcc.write_text('#!/bin/sh\necho "ptxas info"\necho "fatal error: nv/target: No such file or directory"\nexit 1\n')
    (fault,) = compiling.kernel(Installation(server.site_packages, server.variables))
    assert fault.cause == "nvcc cannot build a kernel for SM120: fatal error: nv/target: No such file or directory"


def test_cards_are_read_from_every_fat_binary(tmp_path: Path) -> None:
    library = tmp_path / "ops.so"
    compile_library(library, "int nothing;\n")
    assert code_in(library) == set()
    add_code(library, 80, 120)
    assert code_in(library) == {Code(2, 80), Code(2, 120)}


def test_report_has_a_line_for_each_check_and_the_remedy_below_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    count = report([("ninja", "ninja is on PATH", []), ("nvrtc", "", [Fault("it is lost", "find it")])])
    assert count == 1
    assert capsys.readouterr().out.splitlines() == [
        "ok    ninja        ninja is on PATH",
        "FAIL  nvrtc        it is lost",
        "                   remedy: find it",
    ]
