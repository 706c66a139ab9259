"""After out of memory a run steps down what leaves its result as it is, and goes on; the signal is protected."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file

import dflash.step as step_module
from dflash.config import TrainingConfig
from dflash.errors import DflashError
from dflash.files import read_json
from dflash.limits import SETTINGS, Limits, documents_at_once, limits_after, next_step_down, repeat_until_it_fits
from dflash.train import train
from tests.unit.dflash.conftest import random_rows, training_config, write_dataset

VOCABULARY = 97
HOST = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to ..."


@pytest.fixture
def config(llama_folder: Path, tmp_path: Path) -> TrainingConfig:
    dataset = write_dataset(tmp_path / "data", random_rows(9))
    return training_config(llama_folder, dataset, tmp_path / "run", steps=6, checkpoint_every=3, log_every=2)


class Failing:
    """The loss of a group of blocks, which fails at some of its calls."""

    def __init__(self, failures: dict[int, Exception]) -> None:
        self.calls, self.failures, self.original = 0, failures, step_module.chunked_block_loss

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls in self.failures:
            raise self.failures[self.calls]
        return self.original(*arguments, **options)


def final_weights(config: TrainingConfig, step: int) -> dict[str, torch.Tensor]:
    return load_file(config.output / "checkpoints" / f"step-{step:08d}" / "draft" / "model.safetensors")


def test_a_run_that_ran_out_of_memory_ends_as_one_that_never_did(
    config: TrainingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = config.model_copy(update={"output": tmp_path / "whole"})
    train(whole)
    failures: dict[int, Exception] = {
        2: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 200.00 MiB."),
        3: RuntimeError(HOST),
        # In the middle of a step's groups: what the groups before added to the gradient is taken back.
        7: torch.OutOfMemoryError("CUDA out of memory."),
    }
    monkeypatch.setattr(step_module, "chunked_block_loss", Failing(failures))
    notes: list[str] = []
    train(config, on_progress=lambda line: notes.append(line["note"]) if "note" in line else None)
    expected, found = final_weights(whole, 6), final_weights(config, 6)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=1e-4, msg=name)

    assert [note.split(":")[0] for note in notes[:2]] == ["step 2", "step 2"]
    assert "CUDA out of memory. Tried to allocate 200.00 MiB." in notes[0]
    assert "max_draft_rows=48" in notes[0]
    lines = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    downs = {"max_draft_rows": 1, "loss_chunk_blocks": 1, "tokens_at_once": 1}
    assert lines[-1]["step_downs"] == downs
    series = (config.output / "metrics" / "rank-0.prom").read_text()
    (family,) = (f for f in text_string_to_metric_families(series) if f.name == "dflash_training_step_downs")
    totals = [sample for sample in family.samples if sample.name.endswith("_total")]
    assert {sample.labels["setting"]: sample.value for sample in totals} == downs


def test_a_resumed_run_keeps_its_step_downs(config: TrainingConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing({1: torch.OutOfMemoryError("out")})
    monkeypatch.setattr(step_module, "chunked_block_loss", failing)
    train(config, should_stop=lambda: failing.calls > 5)
    state = next(iter(sorted((config.output / "checkpoints").glob("step-*"))[-1:])) / "state.json"
    assert read_json(state)["progress"]["step_downs"] == {"max_draft_rows": 1}
    groups: list[int] = []
    original = step_module.block_groups

    def watch(blocks: int, block_size: int, max_draft_rows: int) -> list[slice]:
        groups.append(max_draft_rows)
        return original(blocks, block_size, max_draft_rows)

    monkeypatch.setattr(step_module, "block_groups", watch)
    train(config)
    assert set(groups) == {48}


def test_with_nothing_left_to_step_down_the_run_ends_in_one_line_and_a_whole_checkpoint(
    config: TrainingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    always = Failing({call: torch.OutOfMemoryError("CUDA out of memory.") for call in range(1, 100)})
    monkeypatch.setattr(step_module, "chunked_block_loss", always)
    with pytest.raises(
        DflashError, match=r"step 1: out of memory \(CUDA out of memory\.\) with every harmless setting"
    ):
        train(config)
    assert (config.output / "checkpoints" / "step-00000000" / "draft").is_dir()


def test_another_error_is_not_taken_for_out_of_memory(config: TrainingConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing({1: RuntimeError("mat1 and mat2 shapes cannot be multiplied")})
    monkeypatch.setattr(step_module, "chunked_block_loss", failing)
    with pytest.raises(RuntimeError, match="mat1"):
        train(config)
    assert failing.calls == 1


@given(anchors=st.integers(1, 2000), block_size=st.integers(2, 64), longest=st.integers(1, 4096))
def test_stepping_down_ends_and_never_touches_anchors_or_block_size(
    anchors: int, block_size: int, longest: int
) -> None:
    values: dict[str, Any] = {"steps": 1, "target": "t", "dataset": "d", "output": "o", "token_budget": 4096}
    draft = {"block_size": block_size}
    config = TrainingConfig.model_validate(values | {"anchors": anchors, "draft": draft})

    def limits_at(step_downs: Any) -> Limits:
        return limits_after(config, VOCABULARY, torch.device("cpu"), step_downs)

    step_downs: dict[str, int] | None = {}
    seen = []
    while step_downs is not None:
        assert step_downs.keys() <= set(SETTINGS)
        seen.append(limits_at(step_downs))
        step_downs = next_step_down(limits_at, step_downs, longest)
    assert len(seen) < 60
    # At the lowest, one block still goes through whole, and all of the pack's blocks one after another.
    assert (seen[-1].max_draft_rows, seen[-1].loss_chunk_blocks) == (block_size, 1)
    for before, after in pairwise(seen):
        changed = [name for name in SETTINGS if getattr(before, name) != getattr(after, name)]
        assert len(changed) == 1
    assert (config.anchors, config.draft.block_size) == (anchors, block_size)


def test_documents_are_never_cut() -> None:
    assert documents_at_once([3, 4, 5], 100) == [slice(0, 3)]
    assert documents_at_once([3, 4, 5], 8) == [slice(0, 2), slice(2, 3)]
    assert documents_at_once([3, 40, 5], 4) == [slice(0, 1), slice(1, 2), slice(2, 3)]


def test_a_failed_attempt_leaves_nothing_in_gradients_that_others_had_begun() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1.0, 2.0])
    attempts: list[str] = []

    def attempt() -> str:
        (parameter * torch.tensor([10.0, 20.0])).sum().backward()  # type: ignore[no-untyped-call]
        if not attempts:
            raise MemoryError
        return "done"

    assert repeat_until_it_fits(attempt, [parameter], attempts.append) == "done"
    assert attempts == ["MemoryError"]
    assert parameter.grad.tolist() == [11.0, 22.0]
