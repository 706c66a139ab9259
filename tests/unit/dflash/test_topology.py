"""Targets and drafters in processes of their own learn what one process learns from the same packs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.checkpoint import list_checkpoints
from dflash.config import TrainingConfig
from dflash.errors import DflashError
from dflash.export import load_draft
from dflash.optimizer import ShardedAdamW
from dflash.parts import PARTS
from dflash.train import train
from dflash.world import World
from tests.unit.dflash.conftest import random_rows, training_config, write_dataset
from tests.unit.dflash.ranks import run_ranks
from tests.unit.dflash.test_train import equal, weights, without_times

STEPS = 8


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("samples") / "data", random_rows(17))


def config_of(target: Path, dataset: Path, output: Path, targets: int, drafters: int, **changes: Any) -> TrainingConfig:
    topology = {"targets": targets, "drafters": drafters} | changes.pop("topology", {})
    changes = {"steps": STEPS, "packs_per_step": 2, "feature_cache_bytes": 0} | changes
    return training_config(target, dataset, output, topology=topology, **changes)


@pytest.fixture(scope="module")
def colocated(llama_folder: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "colocated"
    train(config_of(llama_folder, dataset, output, 0, 1))
    return output


@pytest.fixture(scope="module")
def two_and_two(llama_folder: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "two-and-two"
    # Room for one pack: the targets have to wait for the drafters.
    run_ranks(config_of(llama_folder, dataset, output, 2, 2, topology={"look_ahead_bytes": 1}), output / "meet")
    return output


def newest(output: Path) -> dict[str, torch.Tensor]:
    return weights(list_checkpoints(output)[-1])


def assert_close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=1e-3, atol=2e-5)


def test_two_and_two_equal_one_on_the_same_packs(colocated: Path, two_and_two: Path) -> None:
    assert_close(newest(two_and_two), newest(colocated))
    ours, theirs = (without_times(output / "metrics.jsonl") for output in (two_and_two, colocated))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4)
        for exact in ("step", "epoch", "tokens", "coverage"):
            assert mine[exact] == other[exact]


def test_a_sharded_optimizer_changes_no_bit(
    llama_folder: Path, dataset: Path, two_and_two: Path, tmp_path: Path
) -> None:
    sharded = {"shard_optimizer": True}
    run_ranks(config_of(llama_folder, dataset, tmp_path / "run", 2, 2, topology=sharded), tmp_path / "meet")
    assert equal(newest(tmp_path / "run"), newest(two_and_two))
    states = [path.stat().st_size for path in sorted(list_checkpoints(tmp_path / "run")[-1].glob("drafter-*"))]
    assert max(states) < 0.7 * sum(states)


@pytest.mark.parametrize("sharded", [True, False])
def test_an_optimizer_s_part_that_is_missing_is_told_and_not_begun_anew(
    llama_folder: Path, dataset: Path, colocated: Path, tmp_path: Path, sharded: bool
) -> None:
    config = config_of(llama_folder, dataset, tmp_path, 0, 2, topology={"shard_optimizer": sharded})
    checkpoint = list_checkpoints(colocated)[-1]
    model = load_draft(checkpoint / "draft")
    first, second = (ShardedAdamW(model, config, World(rank, drafters=2)) for rank in range(2))
    first.load(checkpoint, STEPS)
    first.save(tmp_path)
    if not sharded:
        # All of the state is in the lead's file.
        (tmp_path / "drafter-0.safetensors").unlink()
        second.save(tmp_path)
    with pytest.raises(DflashError, match=r"the optimizer's state of .* is missing"):
        second.load(tmp_path, STEPS)


def test_one_and_one_equal_one_bit_for_bit_with_a_teacher_and_a_curve(
    llama_folder: Path, dataset: Path, tmp_path: Path
) -> None:
    prompts = [{"prompt_id": f"p{i}", "source": "s", "input_ids": [5 + i, 9, 30]} for i in range(2)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    changes: dict[str, Any] = {
        "objective": {"ce": 0.5, "kl": 0.5},
        "acceptance": {"prompts": tmp_path / "prompts.jsonl", "every": 4, "max_new_tokens": 8},
        "packs_per_step": 1,
    }
    run_ranks(config_of(llama_folder, dataset, tmp_path / "one", 0, 1, **changes), tmp_path / "meet")
    # The target's layers are split, as over two cards.
    split = config_of(llama_folder, dataset, tmp_path / "two", 1, 1, topology={"cards_per_target": 2}, **changes)
    run_ranks(split, tmp_path / "meet")
    assert equal(newest(tmp_path / "two"), newest(tmp_path / "one"))
    curves = [(tmp_path / name / "acceptance.jsonl").read_text() for name in ("one", "two")]
    assert curves[0] == curves[1]
    assert curves[0].count("\n") == 3


def test_one_rank_asked_to_stop_stops_all_and_another_topology_goes_on(
    llama_folder: Path, dataset: Path, colocated: Path, tmp_path: Path
) -> None:
    run_ranks(config_of(llama_folder, dataset, tmp_path / "run", 1, 2), tmp_path / "meet", stop_after=3)
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-00000000", "step-00000003"]
    notes: list[str] = []
    config = config_of(llama_folder, dataset, tmp_path / "run", 0, 1)
    train(config, on_progress=lambda line: notes.append(line.get("note", "")))
    assert "resuming at step 3: config.topology.drafters was 2 and is 1" in notes
    assert_close(newest(tmp_path / "run"), newest(colocated))


def test_a_topology_that_would_change_the_steps_is_refused(llama_folder: Path, dataset: Path, colocated: Path) -> None:
    with pytest.raises(DflashError, match=r"config\.packs_per_step was 2 and is 1"):
        train(config_of(llama_folder, dataset, colocated, 0, 1, packs_per_step=None))
    with pytest.raises(ValueError, match=r"packs_per_step 2 is not a multiple of topology\.drafters 3"):
        config_of(llama_folder, dataset, colocated, 1, 3)


def test_every_rank_writes_its_metrics(two_and_two: Path) -> None:
    files = {path.name: path.read_text() for path in (two_and_two / "metrics").iterdir()}
    assert sorted(files) == [f"rank-{rank}.prom" for rank in range(4)]
    for rank, text in enumerate(files[f"rank-{rank}.prom"] for rank in range(4)):
        role = "drafter" if rank < 2 else "target"
        assert f'dflash_training_part_seconds_total{{part="data_wait",rank="{rank}",role="{role}"}}' in text
    spent = re.findall(r'part_seconds_total\{part="(\w+)",.*\} (\S+)', "".join(files.values()))
    assert {part for part, seconds in spent if float(seconds) > 0} == set(PARTS)
    assert f'dflash_training_steps_total{{rank="0",role="drafter"}} {STEPS}.0' in files["rank-0.prom"]
    assert 'dflash_training_memory_bytes{kind="resident",rank="3",role="target"}' in files["rank-3.prom"]
