"""A plan is what a step really takes, and what cannot fit is refused before any weight is loaded."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3_5TextConfig
from typer.testing import CliRunner

import dflash.features
from dflash.cli import app
from dflash.config import TrainingConfig
from dflash.data import Sample
from dflash.errors import DflashError
from dflash.features import FeatureSource, TargetStates
from dflash.initialize import initialize
from dflash.limits import repeat_until_it_fits
from dflash.pack import build_pack
from dflash.plan import Plan, TargetShape, drafter_parts, make_plan, read_target_shape, refusal
from dflash.step import accumulate_gradient
from dflash.target import Target, wrap_target
from dflash.train import train

DOCUMENTS = 4


def configuration(**changes: Any) -> TrainingConfig:
    values = {
        "target": "target",
        "dataset": "dataset",
        "output": "output",
        "steps": 1,
        "draft": {"num_layers": 2, "block_size": 8, "target_layer_ids": [1, 2], "mask_token_id": 3},
        "anchors": 128,
        "token_budget": 512,
        "max_length": 128,
    }
    return TrainingConfig.model_validate(values | changes)


def small_target(dtype: torch.dtype, vocabulary: int) -> Target:
    shape = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return wrap_target(LlamaForCausalLM(shape).to(dtype), Path("target"))  # type: ignore[no-untyped-call]


def measured_peak(target: Target, config: TrainingConfig) -> int:
    """Return the most bytes that one step's tensors had at once, by torch's own count of allocations."""
    rng = np.random.default_rng(0)
    length = config.token_budget // DOCUMENTS
    samples, anchors = [], []
    for _ in range(DOCUMENTS):
        samples.append(Sample(rng.integers(0, 100, length), np.ones(length, dtype=np.int8)))
        starts = rng.choice(length - config.draft.block_size, config.anchors // DOCUMENTS, replace=False)
        anchors.append(np.sort(starts))
    pack = build_pack(samples, anchors, torch.device("cpu"))
    model = initialize(config.draft, target, seed=0)
    states = TargetStates(torch.randn(config.token_budget, model.fc.in_features), None)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(config.step_packs):
            attempt = partial(accumulate_gradient, model, target, pack, states, config)
            repeat_until_it_fits(attempt, model.parameters(), pytest.fail)
    return peak_of(profiler)


def peak_of(profiler: profile) -> int:
    current = peak = 0
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            current += event.nbytes()
            peak = max(peak, current)
    return peak


@pytest.mark.parametrize(
    ("changes", "vocabulary"),
    [
        ({}, 1000),
        ({"max_draft_rows": 256, "token_budget": 1024, "max_length": 256}, 1000),
        ({"loss_chunk_blocks": 64}, 20_000),
        ({"dtype": "bfloat16", "target_dtype": "bfloat16"}, 1000),
        ({"dtype": "bfloat16", "target_dtype": "bfloat16", "max_draft_rows": 256, "token_budget": 1024}, 1000),
        ({"packs_per_step": 2, "anchors": 16, "token_budget": 256, "max_length": 64}, 100),
        ({"packs_per_step": 2, "anchors": 16, "token_budget": 256, "max_length": 64, "max_draft_rows": 64}, 100),
    ],
    ids=["rows", "groups", "logits", "bfloat16", "bfloat16 groups", "packs", "packs in groups"],
)
def test_a_step_s_plan_is_within_a_tenth_of_the_measured_peak(changes: dict[str, Any], vocabulary: int) -> None:
    config = configuration(**changes)
    target = small_target(getattr(torch, config.target_dtype), vocabulary)
    shape = initialize(config.draft, target, seed=0).architecture
    # Weights and the optimizer's state are there before the step and are not counted.
    there_before = ("drafter weights", "optimizer")
    planned = sum(size for name, size in drafter_parts(config, shape).items() if name not in there_before)
    assert planned == pytest.approx(measured_peak(target, config), rel=0.1)


def test_a_target_has_the_features_of_a_pack_once(monkeypatch: pytest.MonkeyPatch) -> None:
    length, width = 64, 4096
    monkeypatch.setattr(dflash.features, "capture", lambda _target, ids, _taps: torch.randn(1, ids.shape[1], width))
    target = small_target(torch.float32, 100)
    samples = [Sample(np.arange(length), np.ones(length, dtype=np.int8)) for _ in range(10)]
    source = FeatureSource(target, (1, 2), cache_bytes=0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        features = source.states(list(range(10)), samples).features
    assert features.nbytes < peak_of(profiler) < 1.5 * features.nbytes


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a 27B hybrid target with the widths of the drafter's own; no weights."""
    folder = tmp_path_factory.mktemp("large")
    Qwen3_5TextConfig(  # type: ignore[no-untyped-call]
        vocab_size=248_320,
        hidden_size=5120,
        intermediate_size=17_408,
        num_hidden_layers=64,
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_value_heads=48,
    ).save_pretrained(folder)
    return Path(folder)


@pytest.fixture
def story(large: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "target": str(large),
        "dataset": str(tmp_path / "none"),
        "output": str(tmp_path / "run"),
        "steps": 6000,
        "draft": {"num_layers": 5, "block_size": 32, "mask_token_id": 248_070},
        "anchors": 1024,
        "token_budget": 49_152,
        "max_batch_size": 64,
        "max_length": 4096,
        "dtype": "bfloat16",
        "target_dtype": "bfloat16",
    }


@pytest.fixture(scope="module")
def large_shape(large: Path) -> TargetShape:
    return read_target_shape(large)


def test_a_plan_names_what_makes_it_fit(story: dict[str, Any], large_shape: TargetShape) -> None:
    card, baseline = 97 * 10**9, 600 * 10**6
    config = TrainingConfig.model_validate(story)
    assert 25e9 < large_shape.parameters < 29e9
    plan = make_plan("drafter", config, large_shape, card, baseline)
    assert not plan.fits
    assert plan.largest_draft_rows is not None
    for changes, holds in (
        ({"max_draft_rows": plan.largest_draft_rows}, True),
        ({"max_draft_rows": plan.largest_draft_rows + 32}, False),
        ({"token_budget": plan.largest_token_budget}, True),
        ({"token_budget": (plan.largest_token_budget or 0) + 1}, False),
    ):
        changed = TrainingConfig.model_validate(story | changes)
        assert make_plan("drafter", changed, large_shape, card, baseline).fits is holds


def test_more_baseline_leaves_less_for_the_rest(story: dict[str, Any], large_shape: TargetShape) -> None:
    config = TrainingConfig.model_validate(story | {"max_draft_rows": 8192})
    before, after = (make_plan("drafter", config, large_shape, 97 * 10**9, b) for b in (600 * 10**6, 800 * 10**6))
    assert after.total - before.total == 200 * 10**6
    assert after.largest_token_budget < before.largest_token_budget  # type: ignore[operator]


def test_flex_attention_is_planned_where_it_may_be_used(story: dict[str, Any], large_shape: TargetShape) -> None:
    totals = {}
    for device, attention in (("cpu", "auto"), ("cuda", "auto"), ("cuda", "flex"), ("cuda", "sdpa")):
        config = TrainingConfig.model_validate(story | {"device": device, "attention": attention})
        parts = make_plan("drafter", config, large_shape, 97 * 10**9, 0).parts
        totals[device, attention] = parts["flex attention"]
    assert totals["cpu", "auto"] == totals["cuda", "sdpa"] == 0
    # Of each of 5 layers, in bfloat16: keys and values of 4 heads of 256, outputs and a number in fp32 of 24.
    keys, outputs = 2 * (49_152 + 32_768) * 4 * 256 * 2, 32_768 * 24 * (256 * 2 + 4)
    assert totals["cuda", "auto"] == totals["cuda", "flex"] == 5 * (keys + outputs)


def test_a_target_is_planned_with_the_drafter_that_it_measures(story: dict[str, Any], large_shape: TargetShape) -> None:
    measured = {"acceptance": {"prompts": "prompts.jsonl", "every": 100}}
    without, drafter, with_one = (
        make_plan(role, TrainingConfig.model_validate(story | changes), large_shape, 97 * 10**9, 0).parts
        for role, changes in (("target", {}), ("drafter", measured), ("target", measured))
    )
    assert "drafter to measure" not in without
    assert with_one == without | {"drafter to measure": drafter["drafter weights"]}


def test_the_command_prints_a_table_or_json_and_fails_for_what_does_not_fit(
    story: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(story | {"max_draft_rows": 8192}))
    command = ["plan", "--config", str(tmp_path / "run.yaml"), "--baseline-bytes", "600000000", "--card-bytes"]
    good = CliRunner().invoke(app, [*command, "97000000000", "--roles", "target,drafter", "--json"])
    assert good.exit_code == 0
    for plan in json.loads(good.stdout):
        assert plan["fits"]
        assert sum(plan["parts"].values()) == plan["total"]
    bad = CliRunner().invoke(app, [*command, "48000000000"])
    assert bad.exit_code == 1
    assert "the largest part is" in bad.stdout


@pytest.mark.parametrize(
    ("topology", "kinds"), [({}, ["colocated"]), ({"targets": 5, "drafters": 3}, ["target", "drafter"])]
)
def test_the_processes_of_the_run_are_planned_and_no_others(
    story: dict[str, Any], tmp_path: Path, topology: dict[str, int], kinds: list[str]
) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(story | {"topology": topology}))
    command = ["plan", "--config", str(tmp_path / "run.yaml"), "--card-bytes", "200000000000", "--json"]
    assert [plan["role"] for plan in json.loads(CliRunner().invoke(app, command).stdout)] == kinds


def test_look_ahead_that_is_too_large_is_named_with_what_fits(story: dict[str, Any], large_shape: TargetShape) -> None:
    def plan_with(look_ahead: int) -> tuple[Plan, TrainingConfig]:
        topology = {"targets": 1, "drafters": 1, "look_ahead_bytes": look_ahead}
        config = TrainingConfig.model_validate(story | {"device": "cpu", "topology": topology})
        return make_plan("target", config, large_shape, 97 * 10**9, 0), config

    refused = refusal(*plan_with(90 * 10**9))
    assert "the largest part is look-ahead" in refused
    assert "cards" not in refused
    found = re.search(r"topology.look_ahead_bytes (\d+) fits", refused)
    assert found is not None
    assert plan_with(int(found[1]))[0].fits
    assert not plan_with(int(found[1]) + 1)[0].fits


def test_a_target_on_several_cards_is_planned_card_by_card(story: dict[str, Any], tmp_path: Path) -> None:
    topology = {"targets": 1, "drafters": 3, "cards_per_target": 2}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(story | {"device": "cuda", "topology": topology}))
    command = ["plan", "--config", str(tmp_path / "run.yaml"), "--card-bytes", "48000000000", "--roles", "target"]
    printed = CliRunner().invoke(app, [*command, "--json"])
    assert printed.exit_code == 0
    first, second = json.loads(printed.stdout)
    shape = read_target_shape(Path(story["target"]))
    assert first["parts"]["target weights"] + second["parts"]["target weights"] == 2 * shape.parameters
    # The fullest card is less than a layer over its share.
    assert first["parts"]["target weights"] <= shape.parameters + 2 * max(shape.of_layers)
    assert "features of the pack" in first["parts"]
    assert "features of the pack" not in second["parts"]
    assert "target 1/2  target 2/2" in CliRunner().invoke(app, command).stdout

    (tmp_path / "run.yaml").write_text(yaml.safe_dump(story | {"device": "cuda", "topology": {"targets": 1}}))
    whole = CliRunner().invoke(app, command)
    assert whole.exit_code == 1
    assert "more cards for a target (topology.cards_per_target, now 1)" in whole.stdout


def test_an_impossible_run_is_refused_before_the_target_is_loaded(story: dict[str, Any]) -> None:
    config = TrainingConfig.model_validate(story | {"memory": {"limit_bytes": 97 * 10**9}})
    # The folder has no weights, nor is there a dataset: to load anything would be another error.
    with pytest.raises(DflashError, match=r"colocated: .* GB planned, 97.00 GB there; the largest part is draft rows"):
        train(config)
