"""A machine with cards: `nvidia-smi` answers what a test says."""

import json
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
def docker(tmp_path: Path, cards: Cards) -> Path:
    """An engine that has every image, for CUDA 13.0, and no container; returns the file with a line for each call."""
    image = {"Id": "sha256:1", "Config": {"Labels": {"dflash-stack.variant": "cu130"}}}
    calls = tmp_path / "docker-calls"
    calls.touch()
    script = tmp_path / "bin" / "docker"
    script.write_text(
        f"#!/bin/sh\necho \"$*\" >> {calls}\ncase \"$1 $2\" in 'image inspect') echo '[{json.dumps(image)}]';; esac\n"
    )
    script.chmod(0o755)
    return calls
