"""Training learns, and a run that was killed or stopped ends with the weights of one that never was."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import dflash.train
from dflash.batch import PackContent, read_pack
from dflash.checkpoint import list_checkpoints
from dflash.config import TrainingConfig
from dflash.config_file import load_config
from dflash.data import open_dataset
from dflash.decode import greedy_decode, speculative_decode
from dflash.errors import DflashError
from dflash.export import load_draft
from dflash.features import FeatureSource
from dflash.initialize import initialize
from dflash.model import DraftModel
from dflash.objective import BlockLoss, Labels, LabelTotals
from dflash.pack import build_pack
from dflash.packing import Cursor, DataOrder, PackLimits
from dflash.step import accumulate_gradient, count_totals
from dflash.target import load_target
from dflash.train import learning_rate, train
from tests.unit.dflash.conftest import random_rows, training_config, write_dataset


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "draft" / "model.safetensors")


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def without_times(metrics: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second", "parts")} for line in lines]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("samples") / "data", random_rows(9))


@pytest.fixture(scope="module")
def uninterrupted(llama_folder: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "whole"
    train(training_config(llama_folder, dataset, output))
    return output


def test_a_stopped_run_goes_on_bit_for_bit(
    llama_folder: Path, dataset: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    config = training_config(llama_folder, dataset, tmp_path / "run")
    steps: list[int] = []
    first = train(config, on_progress=lambda line: steps.append(line["step"]), should_stop=lambda: len(steps) == 6)
    assert (first.steps, first.interrupted) == (7, True)
    second = train(config)
    assert (second.steps, second.interrupted) == (12, False)
    assert equal(weights(second.checkpoint), weights(uninterrupted / "checkpoints" / "step-00000012"))


def test_a_run_killed_between_checkpoints_goes_on_bit_for_bit(
    llama_folder: Path, dataset: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    config = training_config(llama_folder, dataset, tmp_path / "run")

    class Killed(BaseException):
        pass

    def kill_at_nine(line: dict[str, Any]) -> None:
        if line["step"] == 9:
            raise Killed

    with pytest.raises(Killed):
        train(config, on_progress=kill_at_nine)
    # What a killed writer leaves: a checkpoint without its final name, and half a line.
    (tmp_path / "run" / "checkpoints" / ".step-00000010.half").mkdir()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "lo')
    result = train(config)
    assert equal(weights(result.checkpoint), weights(uninterrupted / "checkpoints" / "step-00000012"))
    assert without_times(tmp_path / "run" / "metrics.jsonl") == without_times(uninterrupted / "metrics.jsonl")
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_sigterm_saves_a_checkpoint_and_ends(llama_folder: Path, dataset: Path, tmp_path: Path) -> None:
    config = training_config(llama_folder, dataset, tmp_path / "run", steps=100_000, log_every=1)
    (tmp_path / "config.json").write_text(config.model_dump_json())
    command = [sys.executable, "-m", "dflash", "train", "--config", str(tmp_path / "config.json")]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    last = json.loads(metrics.read_text().splitlines()[-1])["step"]
    assert (tmp_path / "run" / "checkpoints" / f"step-{last:08d}" / "state.json").exists()


def test_old_checkpoints_go_but_the_first_stays(uninterrupted: Path) -> None:
    names = sorted(path.name for path in (uninterrupted / "checkpoints").iterdir())
    assert names == ["step-00000000", "step-00000010", "step-00000012"]


def test_metrics_tell_loss_accuracy_and_speed(uninterrupted: Path) -> None:
    lines = [json.loads(line) for line in (uninterrupted / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 5, 8, 10, 12]
    assert all(len(line["accuracy_by_position"]) == 3 and line["tokens_per_second"] > 0 for line in lines)
    assert 1.0 <= lines[-1]["acceptance_estimate"] <= 4.0


def test_tensorboard_reads_the_same_numbers(uninterrupted: Path) -> None:
    events = EventAccumulator(str(uninterrupted / "tensorboard"))
    events.Reload()
    lines = [json.loads(line) for line in (uninterrupted / "metrics.jsonl").read_text().splitlines()]
    found = [(event.step, event.value) for event in events.Scalars("training/loss")]
    assert found == [(line["step"], pytest.approx(line["loss"])) for line in lines]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 1e-4}, r"config\.learning_rate was 0\.003 and is 0\.0001"),
        ({"draft": {"num_layers": 2, "block_size": 5, "mask_token_id": 96}}, r"block_size was 4 and is 5"),
    ],
)
def test_another_configuration_is_refused_with_the_difference(
    llama_folder: Path, dataset: Path, uninterrupted: Path, change: dict[str, Any], message: str
) -> None:
    before = sorted(uninterrupted.rglob("*"))
    with pytest.raises(DflashError, match=message):
        train(training_config(llama_folder, dataset, uninterrupted, **change))
    assert sorted(uninterrupted.rglob("*")) == before


def test_another_target_or_template_is_refused(
    llama_folder: Path, dataset: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    shutil.copytree(llama_folder, tmp_path / "target")
    (tmp_path / "target" / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(DflashError, match=r"target\.template was None and is [0-9a-f]{64}"):
        train(training_config(tmp_path / "target", dataset, uninterrupted))


def test_what_may_change_goes_on_and_is_told(
    llama_folder: Path, dataset: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    shutil.copytree(uninterrupted, tmp_path / "run")
    notes: list[str] = []
    config = training_config(llama_folder, dataset, tmp_path / "run", steps=14, token_budget=80, max_batch_size=3)
    result = train(config, on_progress=lambda line: notes.append(line.get("note", "")))
    assert (result.steps, result.interrupted) == (14, False)
    assert [note for note in notes if note] == [
        "resuming at step 12: config.max_batch_size was 4 and is 3",
        "resuming at step 12: config.steps was 12 and is 14",
        "resuming at step 12: config.token_budget was 64 and is 80",
    ]


def test_another_dataset_begins_a_new_epoch(
    llama_folder: Path, dataset: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    shutil.copytree(uninterrupted, tmp_path / "run")
    other = write_dataset(tmp_path / "other", random_rows(8, seed=5))
    notes: list[str] = []
    train(
        training_config(llama_folder, other, tmp_path / "run", steps=13),
        on_progress=lambda line: notes.append(line.get("note", "")),
    )
    assert "resuming at step 12: dataset.samples was 9 and is 8" in notes
    state = json.loads((tmp_path / "run/checkpoints/step-00000012/state.json").read_text())
    after = json.loads((tmp_path / "run/checkpoints/step-00000013/state.json").read_text())
    epoch = state["progress"]["cursor"]["epoch"]
    assert after["progress"]["cursor"] == {"epoch": epoch + 1, "pack": 1, "earlier": []}


def test_a_checkpoint_holds_no_pickle(uninterrupted: Path) -> None:
    files = {path.name for path in (uninterrupted / "checkpoints" / "step-00000012").rglob("*") if path.is_file()}
    assert files == {"state.json", "config.json", "model.safetensors", "drafter-0.safetensors"}


def test_packs_of_one_step_learn_as_one_pack_of_all(llama_folder: Path, dataset: Path, tmp_path: Path) -> None:
    """Two packs of a step give the gradient of their labels together, not the mean of two means."""
    config = training_config(llama_folder, dataset, tmp_path / "run", packs_per_step=2)
    target = load_target(llama_folder, torch.float32)
    model = initialize(config.draft, target, 0)
    order = DataOrder(lambda _epoch: np.arange(9), open_dataset(dataset).lengths, PackLimits(64, 4), 0)
    taken = [pack for pack, _ in itertools.islice(order.packs_from(Cursor()), 2)]
    contents = [read_pack(open_dataset(dataset), pack, config) for pack in taken]
    source = FeatureSource(target, model.architecture.target_layer_ids, 0)

    def gradient(parts: list[PackContent], totals: LabelTotals | None) -> torch.Tensor:
        model.zero_grad()
        for part in parts:
            pack = build_pack(part.samples, part.anchors, target.device)
            states = source.states(part.rows, part.samples)
            accumulate_gradient(model, target, pack, states, config, totals)
        assert model.fc.weight.grad is not None
        return model.fc.weight.grad.clone()

    together = PackContent(*(left + right for left, right in zip(*contents, strict=True)))
    packs = [build_pack(part.samples, part.anchors, target.device) for part in contents]
    torch.testing.assert_close(
        gradient(contents, count_totals(packs, config)), gradient([together], None), rtol=1e-4, atol=1e-6
    )


def test_the_feature_cache_changes_nothing(
    llama_folder: Path, dataset: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    result = train(training_config(llama_folder, dataset, tmp_path / "run", feature_cache_bytes=0))
    for name, tensor in weights(result.checkpoint).items():
        torch.testing.assert_close(
            tensor, weights(uninterrupted / "checkpoints" / "step-00000012")[name], atol=1e-4, rtol=1e-3
        )


def test_a_loss_that_is_not_finite_ends_the_run(llama_folder: Path, dataset: Path, tmp_path: Path) -> None:
    config = training_config(llama_folder, dataset, tmp_path / "run", learning_rate=1e30, gradient_clip=1e30)
    with pytest.raises(DflashError, match=r"the loss is (nan|inf); the last checkpoint"):
        train(config)
    assert (tmp_path / "run" / "checkpoints" / "step-00000000" / "state.json").exists()


def test_a_gradient_that_is_not_finite_ends_the_run_before_it_reaches_a_checkpoint(
    llama_folder: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = training_config(llama_folder, dataset, tmp_path / "run", checkpoint_every=1)
    real, calls = dflash.train.accumulate_gradient, itertools.count(1)

    def overflowing(model: DraftModel, *arguments: Any) -> tuple[BlockLoss, Labels]:
        result = real(model, *arguments)
        if next(calls) == 3:
            assert model.fc.weight.grad is not None
            model.fc.weight.grad[0, 0] = torch.inf
        return result

    monkeypatch.setattr(dflash.train, "accumulate_gradient", overflowing)
    with pytest.raises(DflashError, match="step 3: the norm of the gradient is inf; the last checkpoint"):
        train(config)
    newest = list_checkpoints(config.output)[-1]
    assert newest.name == "step-00000002"
    assert all(tensor.isfinite().all() for tensor in weights(newest).values())


def test_a_sample_learned_by_heart_is_accepted_block_after_block(target_folder: Path, tmp_path: Path) -> None:
    target = load_target(target_folder, torch.float32)
    prompt = [11, 42, 7, 63]
    answer = greedy_decode(target, prompt, 21).tokens
    row = {
        "input_ids": prompt + answer,
        "loss_mask": [0] * len(prompt) + [1] * len(answer),
        "seq_len": len(prompt + answer),
    }
    config = training_config(
        target_folder,
        write_dataset(tmp_path / "data", [row]),
        tmp_path / "run",
        steps=100,
        checkpoint_every=1000,
        gamma=100.0,
        anchors=20,
        learning_rate=6e-3,
    )
    result = train(config)
    output = speculative_decode(target, load_draft(result.checkpoint / "draft"), prompt, len(answer))
    assert output.tokens == answer
    assert sum(output.acceptance_lengths) / len(output.acceptance_lengths) > 3.5


def test_the_learning_rate_rises_and_falls(llama_folder: Path, dataset: Path, tmp_path: Path) -> None:
    config = training_config(llama_folder, dataset, tmp_path, steps=100, learning_rate=1.0, warmup_ratio=0.1)
    rates = [learning_rate(step, config) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == rates[10] == pytest.approx(1.0)
    assert rates[99] < 0.001


def test_unknown_keys_and_wrong_values_are_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("target: t\ndataset: d\noutput: o\nsteps: 0\nlearning_rat: 1.0\ndraft: {block: 4}\n")
    with pytest.raises(DflashError) as caught:
        load_config(path, TrainingConfig)
    message = str(caught.value)
    assert "learning_rat: no such key" in message
    assert "draft.block: no such key" in message
    assert "steps: " in message
    assert "\n" not in message
