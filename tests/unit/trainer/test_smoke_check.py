"""The smoke check of a trainer's image, as `swap` runs it: by its text alone, on runs that the trainer has written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash.train import train
from services.runs import Run
from services.stack.operate.inside import script
from tests.unit.dflash.conftest import random_rows, tiny_model, training_config, write_dataset


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with checkpoints."""
    run = Run(tmp_path / "runs" / "small")
    tiny_model("llama", True).save_pretrained(tmp_path / "target")
    dataset = write_dataset(tmp_path / "data", random_rows(9))
    train(training_config(tmp_path / "target", dataset, run.training, steps=2))
    return run


def check(run: Run) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"DFLASH_RUNS": str(run.root.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script("smoke_trainer")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_newest_checkpoint_loads(run: Run) -> None:
    done = check(run)
    assert done.returncode == 0, done.stderr
    assert "small/train/checkpoints/step-00000002 loads" in done.stdout


@pytest.mark.parametrize("file", ["drafter-0.safetensors", "draft/model.safetensors"])
def test_a_checkpoint_that_does_not_load_fails_the_check(run: Run, file: str) -> None:
    path = run.checkpoint(2) / file
    path.write_bytes(path.read_bytes()[:100])
    assert check(run).returncode != 0
