"""Acceptance on cached answers is that of real decoding, and decides which checkpoint a run keeps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash.acceptance import Answer, count, guess_everywhere, kept_lengths, summarize, verifications
from dflash.config import DraftConfig, TrainingConfig
from dflash.decode import greedy_decode, speculative_decode
from dflash.export import find_draft, load_draft
from dflash.initialize import initialize
from dflash.metrics import ACCEPTANCE_CURVE, best_step
from dflash.target import Target, capture, load_target
from dflash.train import train
from tests.unit.dflash.conftest import tiny_model, training_config, write_dataset


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(2, 90, 6 + i).tolist() for i in range(count)]


def learnt(target: Target, prompts: list[list[int]], length: int) -> list[dict[str, Any]]:
    """Samples of the target's own answers; the first token counts as prompt, or the prompts would not be held out."""
    answers = [greedy_decode(target, prompt, length).tokens for prompt in prompts]
    return [
        {
            "input_ids": prompt + answer,
            "loss_mask": [0] * (len(prompt) + 1) + [1] * (len(answer) - 1),
            "seq_len": len(prompt) + len(answer),
        }
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


@pytest.fixture(scope="module")
def run(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainingConfig:
    """A run that learns half of its held-out answers, measured every 20 steps."""
    folder = Path(tmp_path_factory.mktemp("measured"))
    target = load_target(target_folder, torch.float32)
    held_out = prompts(4)
    lines = [
        {"prompt_id": f"p{i}", "source": "ab"[i % 2], "input_ids": ids, "thinking": i < 3}
        for i, ids in enumerate(held_out)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = training_config(
        target_folder,
        write_dataset(folder / "data", learnt(target, held_out[:2], 24)),
        folder / "run",
        steps=60,
        learning_rate=6e-3,
        keep=1,
        acceptance={"prompts": folder / "prompts.jsonl", "every": 20, "max_new_tokens": 24},
    )
    train(config)
    return config


def curve(config: TrainingConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.output / ACCEPTANCE_CURVE).read_text().splitlines()]


def test_an_answer_s_context_is_made_once_however_long_it_is(target: Target) -> None:
    draft = initialize(DraftConfig(num_layers=2, block_size=4, mask_token_id=96), target, seed=0)
    answer = Answer([3, 4, 5], list(range(2, 90)))
    features = capture(target, torch.tensor([answer.prompt_ids + answer.tokens]), draft.architecture.target_layer_ids)
    rows: list[int] = []
    draft.fc.register_forward_pre_hook(lambda _fc, inputs: rows.append(inputs[0].shape[1]))
    guess_everywhere(target, draft, answer, features[0])
    assert rows == [len(answer.prompt_ids) + len(answer.tokens)]


def test_the_lengths_are_those_of_greedy_decoding(run: TrainingConfig) -> None:
    target = load_target(run.target, torch.float32)
    draft = load_draft(run.output / "checkpoints" / "step-00000060" / "draft")
    seen: set[int] = set()
    for prompt in prompts(6):
        decoded = speculative_decode(target, draft, prompt, 24)
        answer = Answer(prompt, greedy_decode(target, prompt, 24).tokens)
        ids = torch.tensor([answer.prompt_ids + answer.tokens])
        features = capture(target, ids, draft.architecture.target_layer_ids)[0]
        counted = count(answer, guess_everywhere(target, draft, answer, features))
        assert counted.made == decoded.acceptance_lengths
        seen |= set(counted.made)
    assert len(seen) > 2, "all blocks were accepted alike: the comparison would say little"


def test_the_curve_is_what_decoding_gives_by_source(run: TrainingConfig) -> None:
    lines = curve(run)
    assert [line["step"] for line in lines] == [0, 20, 40, 60]
    target = load_target(run.target, torch.float32)
    draft = load_draft(run.output / "checkpoints" / "step-00000060" / "draft")
    decoded = [speculative_decode(target, draft, prompt, 24).acceptance_lengths for prompt in prompts(4)]
    for source, found in (("a", decoded[::2]), ("b", decoded[1::2])):
        made = [length for lengths in found for length in lengths]
        assert lines[-1]["by_source"][source]["acceptance_length"] == pytest.approx(sum(made) / len(made))
        assert lines[-1]["by_source"][source]["verifications"] == len(made)
    thinking = lines[-1]["by_thinking"]
    assert {mode: part["prompts"] for mode, part in thinking.items()} == {"off": 1, "on": 3}
    assert sum(part["verifications"] for part in thinking.values()) == lines[-1]["verifications"]
    assert lines[-1]["tokens"] == sum(1 + sum(lengths) for lengths in decoded)
    assert lines[-1]["acceptance_length"] > lines[0]["acceptance_length"]


def test_the_best_checkpoint_is_kept_and_used(run: TrainingConfig) -> None:
    lines = curve(run)
    best = best_step(run.output / ACCEPTANCE_CURVE)
    assert best == max(lines, key=lambda line: line["acceptance_length"])["step"]
    kept = sorted(path.name for path in (run.output / "checkpoints").iterdir())
    assert kept == sorted({"step-00000000", f"step-{best:08d}", "step-00000060"})
    assert find_draft(run.output) == run.output / "checkpoints" / f"step-{best:08d}" / "draft"


def test_without_its_checkpoint_the_newest_takes_the_place_of_the_best(run: TrainingConfig, tmp_path: Path) -> None:
    shutil.copytree(run.output / "checkpoints", tmp_path / "checkpoints")
    (tmp_path / ACCEPTANCE_CURVE).write_text(json.dumps({"step": 59, "acceptance_length": 3.0}) + "\n")
    assert find_draft(tmp_path) == tmp_path / "checkpoints" / "step-00000060" / "draft"


def test_an_interrupted_run_has_the_same_curve(run: TrainingConfig, tmp_path: Path) -> None:
    config = run.model_copy(update={"output": tmp_path / "run"})
    steps: list[int] = []
    train(config, lambda line: steps.append(line["step"]), should_stop=lambda: bool(steps) and steps[-1] >= 30)
    train(config)
    assert curve(config) == curve(run)


def test_a_hybrid_target_is_measured_although_it_cannot_be_decoded_in_blocks(tmp_path: Path) -> None:
    tiny_model("qwen3_5", True).save_pretrained(tmp_path / "target")
    prompt = {"prompt_id": "p", "source": "a", "input_ids": [5, 9, 12]}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(prompt) + "\n")
    target = load_target(tmp_path / "target", torch.float32)
    config = training_config(
        tmp_path / "target",
        write_dataset(tmp_path / "data", learnt(target, [[5, 9, 12]], 16)),
        tmp_path / "run",
        steps=60,
        learning_rate=6e-3,
        acceptance={"prompts": tmp_path / "prompts.jsonl", "every": 60, "max_new_tokens": 16},
    )
    train(config)
    first, last = curve(config)
    assert first["tokens"] == last["tokens"] == 16
    assert last["acceptance_length"] > first["acceptance_length"]


def test_the_first_of_the_best_steps_counts(tmp_path: Path) -> None:
    path = tmp_path / ACCEPTANCE_CURVE
    lengths = [(0, 1.0), (20, 1.5), (40, 1.5), (60, 1.2)]
    path.write_text("".join(json.dumps({"step": s, "acceptance_length": a}) + "\n" for s, a in lengths))
    assert best_step(path) == 20
    assert best_step(path, at=60) == 60
    assert best_step(path, at=61) is None
    assert best_step(tmp_path / "none.jsonl") is None


def test_lengths_end_with_the_answer() -> None:
    right = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)
    lengths = kept_lengths(right)
    # From token 0 two guesses and the bonus token; from token 2 one guess and a bonus token, the answer's last.
    assert lengths == [3, 1, 2, 1]
    assert verifications(lengths) == [3, 1]
    assert sum(verifications(lengths)) == 4


def test_an_answer_of_one_token_needs_no_verification() -> None:
    assert verifications(kept_lengths(torch.zeros(0, 3, dtype=torch.bool))) == []
    assert summarize([], 4)["acceptance_length"] is None
