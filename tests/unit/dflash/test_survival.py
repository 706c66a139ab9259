"""Whatever ends a run, its last checkpoint is whole, no process is left, and the same command goes on from it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash.checkpoint import list_checkpoints
from dflash.config import TrainingConfig
from dflash.launch import launch
from tests.unit.dflash.conftest import random_rows, training_config, write_dataset
from tests.unit.dflash.kills import PATIENCE, campaign, is_gone, newest_step, ranks_of, start, wait_for_step
from tests.unit.dflash.ranks import run_ranks
from tests.unit.dflash.test_train import equal, weights, without_times

pytestmark = pytest.mark.slow
SURVIVOR: dict[str, Any] = {"checkpoint_every": 5, "log_every": 1, "threads": 1}
# Room for one pack: a drafter whose target is killed stops soon.
TOPOLOGY = {"targets": 1, "drafters": 1, "look_ahead_bytes": 1}
NAMESPACE = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("samples") / "data", random_rows(17))


def config_of(target: Path, dataset: Path, output: Path, **changes: Any) -> TrainingConfig:
    return training_config(target, dataset, output, **{"topology": TOPOLOGY} | changes)


def assert_same_end(whole: TrainingConfig, other: TrainingConfig) -> None:
    left, right = (list_checkpoints(config.output)[-1] for config in (whole, other))
    assert left.name == right.name == f"step-{whole.steps:08d}"
    assert equal(weights(left), weights(right))
    assert without_times(whole.output / "metrics.jsonl") == without_times(other.output / "metrics.jsonl")


def test_a_run_whose_launcher_and_rank_are_killed_ends_bit_for_bit_as_one_that_is_not(
    llama_folder: Path, dataset: Path, tmp_path: Path
) -> None:
    whole, killed = (
        config_of(llama_folder, dataset, tmp_path / name, steps=20, **SURVIVOR) for name in ("whole", "killed")
    )
    run_ranks(whole, tmp_path)
    lines = list(campaign(killed, kills=2, seed=0))
    assert "launcher" in lines[0]
    assert "error: rank 0 (drafter) was killed by SIGKILL" in lines[1]
    assert_same_end(whole, killed)


def test_the_launcher_holds_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", "import dflash.cli, sys; sys.exit('torch' in sys.modules)"])
    assert done.returncode == 0


def test_a_hung_rank_is_named_and_a_second_signal_ends_at_once(
    llama_folder: Path, dataset: Path, tmp_path: Path
) -> None:
    config = config_of(llama_folder, dataset, tmp_path / "run", steps=100_000, stall_seconds=20, **SURVIVOR)
    process = start(config)
    wait_for_step(config, 3, process)
    ranks = ranks_of(process.pid)
    os.kill(ranks[0], signal.SIGSTOP)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 70
    assert "error: rank 0 (drafter) has not gone on for 20 s (stall_seconds)" in said
    assert all(is_gone(rank) for rank in ranks)

    process = start(config)
    wait_for_step(config, newest_step(config) + 2, process)
    ranks = ranks_of(process.pid)
    # The target is stopped, so that nobody can end in order.
    os.kill(ranks[1], signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143
    assert "ended at once" in said
    assert all(is_gone(rank) for rank in ranks)


SLOW_RANK = """
import sys, time
import dflash.curve, dflash.rank

def slow(function):
    return lambda *arguments: (time.sleep({seconds}), function(*arguments))[1]

dflash.curve.BATCH_SIZE = 1
dflash.curve.{name} = slow(dflash.curve.{name})
sys.exit(dflash.rank.main())
"""


@pytest.mark.parametrize(("targets", "name"), [(1, "count"), (0, "roll_out")])
def test_a_measurement_longer_than_a_stall_is_waited_for(
    llama_folder: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: int, name: str
) -> None:
    prompts = [{"prompt_id": f"p{i}", "source": "s", "input_ids": [5 + i, 9, 30]} for i in range(5)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (tmp_path / "rank.py").write_text(SLOW_RANK.format(name=name, seconds=1.5))
    (tmp_path / "python").write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path}/rank.py\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    acceptance = {"prompts": tmp_path / "prompts.jsonl", "every": 2, "max_new_tokens": 4}
    topology = {"targets": targets, "drafters": 2}
    changes: dict[str, Any] = {"steps": 2, "threads": 1, "acceptance": acceptance, "stall_seconds": 5.0}
    config = config_of(llama_folder, dataset, tmp_path / "run", topology=topology, **changes)
    assert launch(config, lambda _line: None).steps == 2
    assert (config.output / "acceptance.jsonl").read_text().count("\n") == 2


def test_a_full_disk_ends_the_run_with_one_line_and_whole_checkpoints(
    llama_folder: Path, dataset: Path, tmp_path: Path
) -> None:
    config = training_config(llama_folder, dataset, tmp_path / "full" / "run", steps=100, checkpoint_every=1, keep=50)
    (tmp_path / "config.json").write_text(config.model_dump_json())
    (tmp_path / "full").mkdir()
    script = (
        f"mount -t tmpfs -o size=3m tmpfs {tmp_path}/full && {sys.executable} -m dflash train --config "
        f"{tmp_path}/config.json; status=$?; cp -r {tmp_path}/full/run/checkpoints {tmp_path}/kept; exit $status"
    )
    done = subprocess.run([*NAMESPACE, "sh", "-c", script], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr.splitlines()[-1]
    kept = sorted((tmp_path / "kept").glob("step-*"))
    assert kept
    assert all(weights(checkpoint) and (checkpoint / "state.json").is_file() for checkpoint in kept)
