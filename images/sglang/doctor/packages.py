"""Whether the packages are those of the lock."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from .installation import Fault, Installation

REBUILD = "build the image again from its lock, and install nothing into a running one"


def as_locked(installation: Installation) -> Iterator[Fault]:
    """every package of the lock is here, in its version"""
    missing: list[str] = []
    for package, wanted in installation.locked.items():
        found = installation.version(package)
        if found is None:
            missing.append(f"{package} {wanted}")
        elif found != wanted:
            yield Fault(
                f"{package} is {found}, and the lock says {wanted}: something installed later has moved it", REBUILD
            )
    if missing:
        no_pip = "" if _has_pip(installation) else "; there is no pip in this environment to add them with, by design"
        yield Fault(
            f"not installed: {', '.join(missing)}{no_pip}",
            "name what is needed in images/sglang/<variant>.in, run `make lock`, and build the image again",
        )


def no_other_pip(installation: Installation) -> Iterator[Fault]:
    """no pip on PATH that would install for another interpreter"""
    pip = shutil.which("pip", path=installation.path)
    if pip is not None and not _has_pip(installation):
        yield Fault(
            f"{pip} is on PATH but belongs to another interpreter: this environment has no pip, and what that one "
            "installs is not seen here",
            "take it off PATH; packages come from the lock (images/sglang/<variant>.in, `make lock`)",
        )


def no_deep_gemm(installation: Installation) -> Iterator[Fault]:
    """DeepGEMM is absent: it has no kernels for SM120"""
    packages = [name for name in ("sgl-deep-gemm", "deep-gemm") if installation.version(name) is not None]
    module = installation.site_packages / "deep_gemm"
    if packages or module.exists():
        home = "CUDA_HOME is not set" if installation.cuda_home is None else "CUDA_HOME is set"
        yield Fault(
            f"DeepGEMM is installed ({packages[0] if packages else module}): importing it fails without CUDA_HOME "
            f"({home}), and it has no kernels for SM120",
            "leave it out (images/sglang/<variant>-excludes.txt), run `make lock`, and build the image again",
        )


def _has_pip(installation: Installation) -> bool:
    return installation.version("pip") is not None
