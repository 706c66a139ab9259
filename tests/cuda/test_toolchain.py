"""The compiler that images/sglang locks, whole and broken as in the reference run, on a machine with no GPU.

`make test-toolchain` runs it. The wheels (0.2 GB, and 0.1 GB of another release) are kept in var/toolchain.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from images.sglang.doctor import compiling, libraries, toolchain
from images.sglang.doctor.fatbin import MACHINE_CODE, Code, code_in
from images.sglang.doctor.installation import Installation
from images.sglang.toolkit import lay_out

ROOT = Path(__file__).resolve().parents[2]
PARTS = r"nvidia-cuda-(nvcc|crt|cccl|runtime|nvrtc)|nvidia-nvvm|ninja"


def fetch(lock: str, folder: Path) -> Path:
    """Installs the wheels that a lock pins to a folder of their own, once."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        (requirements := folder.with_suffix(".txt")).write_text(lock)
        command = ["python3", "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--require-hashes"]
        subprocess.run([*command, "--target", f"{folder}.part", "-r", str(requirements)], check=True)
        Path(f"{folder}.part").rename(folder)
    return folder


@pytest.fixture(scope="module")
def wheels() -> Path:
    """The toolchain as the lock has it, before it is laid out as a toolkit."""
    lock = (ROOT / "images/sglang/cu130.lock").read_text()
    chosen = [pin for pin in re.split(r"\n(?=\S)", lock) if re.match(rf"({PARTS})==", pin)]
    return fetch("\n".join(chosen), ROOT / "var/toolchain/locked")


@pytest.fixture(scope="module")
def other_minor() -> Path:
    """nvcc and nvvm of CUDA 13.2."""
    lock = Path(__file__).with_name("other_minor.lock").read_text()
    return fetch(lock, ROOT / "var/toolchain/other_minor")


@pytest.fixture
def server(wheels: Path, tmp_path: Path) -> Installation:
    """A toolkit of hard links to the wheels, laid out as in the image."""
    site_packages = tmp_path / "site-packages"
    subprocess.run(["cp", "-al", str(wheels), str(site_packages)], check=True)
    home = site_packages / "nvidia/cu13"
    lay_out(home)
    variables = {"PATH": f"{site_packages}/bin:{home}/bin:{os.environ['PATH']}", "CUDA_HOME": str(home)}
    variables["LD_LIBRARY_PATH"] = f"{home}/lib"
    return Installation(site_packages, variables)


def home(server: Installation) -> Path:
    assert server.cuda_home is not None
    return server.cuda_home


def only_cause(server: Installation) -> str:
    """Why no kernel can be built."""
    (fault,) = compiling.kernel(server)
    return fault.cause


def test_kernel_with_cooperative_groups_cccl_and_cub_is_built_for_the_card(
    server: Installation, tmp_path: Path
) -> None:
    assert list(compiling.kernel(server)) == []
    for check in (toolchain.cuda_home, toolchain.compiler, toolchain.ninja, toolchain.headers, toolchain.linkable):
        assert list(check(server)) == []
    assert set(filter(None, toolchain.versions(home(server), server.site_packages).values())) == {"13.0"}
    assert list(toolchain.one_version(server)) == []

    library = tmp_path / "kernel.so"
    assert compiling.build(home(server), library, server) is None
    assert Code(MACHINE_CODE, 120) in code_in(library)
    assert libraries.unresolved(library, server) == (None, [], [])


def test_compiler_alone_is_newer(server: Installation, other_minor: Path) -> None:
    shutil.copytree(other_minor / "nvidia/cu13", home(server), dirs_exist_ok=True, copy_function=replace)
    assert "CUDA compiler and CUDA toolkit headers are incompatible" in only_cause(server)
    (fault,) = toolchain.one_version(server)
    assert fault.cause == "nvcc is of CUDA 13.2, and these are not: headers 13.0, CCCL 13.0"


def test_assembler_is_older_than_what_writes_its_input(server: Installation, other_minor: Path) -> None:
    shutil.copytree(other_minor / "nvidia/cu13/nvvm", home(server) / "nvvm", dirs_exist_ok=True, copy_function=replace)
    assert re.search(r"Unsupported \.version 9\.2; current version is '9\.0'", only_cause(server))
    (fault,) = toolchain.one_version(server)
    assert fault.cause == "nvvm's cicc is 13.2 and writes PTX 9.2; ptxas is 13.0 and assembles PTX 9.0 at most"


def test_runtime_library_lies_in_lib_under_its_version_alone(server: Installation) -> None:
    (home(server) / "lib64").unlink()
    (home(server) / "lib/libcudart.so").unlink()
    assert "cannot find -lcudart" in only_cause(server)
    assert "cannot find -lcudart" in next(toolchain.linkable(server)).cause


def test_header_of_cccl_is_missing(server: Installation) -> None:
    for header in home(server).glob("include/**/nv/target"):
        header.unlink()
    assert "nv/target: No such file or directory" in only_cause(server)
    assert "<nv/target>" in next(toolchain.headers(server)).cause


def replace(source: str, target: str) -> str:
    """Copies a file without writing through the hard link that lies in its place."""
    Path(target).unlink(missing_ok=True)
    return shutil.copy2(source, target)
