"""What the checks look at."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

CARD = 120
"""Compute capability of the cards that the image is for, as compilers write it: SM120."""


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: its cause, and what to do about it."""

    cause: str
    remedy: str


@dataclass(frozen=True)
class Installation:
    """A Python environment with its CUDA toolkit, and the variables that a process in it sees."""

    site_packages: Path
    variables: Mapping[str, str]
    locked: Mapping[str, str] = field(default_factory=dict)
    """Version by package, as the image's lock has it."""

    @property
    def cuda_home(self) -> Path | None:
        """The folder that CUDA_HOME names; None where it is unset or no folder."""
        folder = Path(self.variables.get("CUDA_HOME", ""))
        return folder if self.variables.get("CUDA_HOME") and folder.is_dir() else None

    @property
    def path(self) -> str:
        return self.variables.get("PATH", "")

    def version(self, package: str) -> str | None:
        """The installed version of a package, None where it is absent."""
        found = metadata.distributions(name=package, path=[str(self.site_packages)])
        return next((distribution.version for distribution in found), None)


def this_installation(lock: Path) -> Installation:
    """The environment of the running interpreter. `lock` is what the image was built from."""
    return Installation(Path(sysconfig.get_path("purelib")), dict(os.environ), read_lock(lock.read_text()))


def read_lock(text: str) -> dict[str, str]:
    """Version by package of a pinned requirements file."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, flags=re.MULTILINE))
