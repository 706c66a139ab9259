"""A machine with cards: `nvidia-smi` answers what a test says."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

Cards = Callable[[list[str], list[str]], None]


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cards:
    """Sets the rows that nvidia-smi prints: of its cards, and of the processes on them."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def answer(rows: list[str], processes: list[str]) -> None:
        (folder / "gpu").write_text("".join(f"{row}\n" for row in rows))
        (folder / "apps").write_text("".join(f"{row}\n" for row in processes))
        script = folder / "nvidia-smi"
        script.write_text(f'#!/bin/sh\ncase "$1" in --query-gpu=*) cat {folder}/gpu;; *) cat {folder}/apps;; esac\n')
        script.chmod(0o755)

    return answer


@pytest.fixture
def docker(tmp_path: Path, cards: Cards) -> None:
    """An engine that has no containers."""
    script = tmp_path / "bin" / "docker"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
