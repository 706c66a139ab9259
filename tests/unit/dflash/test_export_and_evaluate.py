"""Drafters written are drafters read, wrong ones are refused, and reports count what was decoded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dflash.architecture import build_target_layer_ids
from dflash.cli import app
from dflash.config import DraftConfig, EvaluationConfig
from dflash.errors import DflashError
from dflash.evaluate import evaluate
from dflash.export import export_draft, load_draft, write_draft
from dflash.initialize import initialize
from dflash.report import build_report, is_degenerate
from dflash.target import Target, load_target
from tests.unit.dflash.conftest import tiny_model, write_dataset

DRAFT = DraftConfig(num_layers=2, block_size=4, mask_token_id=96)


@pytest.fixture
def draft_folder(target: Target, tmp_path: Path) -> Path:
    write_draft(initialize(DRAFT, target, seed=0), tmp_path / "draft", torch.float32)
    return tmp_path / "draft"


def test_default_taps_are_those_of_the_published_drafters() -> None:
    assert build_target_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert build_target_layer_ids(64, 5) == (1, 16, 31, 46, 61)
    assert build_target_layer_ids(30, 1) == (15,)


def test_an_export_reads_back_and_names_its_tensors_as_servers_do(
    target: Target, draft_folder: Path, tmp_path: Path
) -> None:
    output = export_draft(draft_folder, tmp_path / "exported", target.fit, torch.bfloat16)
    tensors = load_file(output / "model.safetensors")
    assert len(tensors) == 2 * 11 + 3
    assert {name.split(".")[0] for name in tensors} == {"fc", "hidden_norm", "norm", "layers"}
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    original = load_draft(draft_folder).state_dict()
    for name, tensor in load_draft(output).state_dict().items():
        assert torch.equal(tensor, original[name].bfloat16().float())
    config = json.loads((output / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"] == {"mask_token_id": 96, "target_layer_ids": [1, 3]}
    assert (config["block_size"], config["num_target_layers"], config["dtype"]) == (4, 6, "bfloat16")
    with pytest.raises(DflashError, match="already exists"):
        export_draft(draft_folder, output, target.fit)


def test_the_window_of_sliding_layers_is_written_as_servers_read_it(target: Target, tmp_path: Path) -> None:
    windowed = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9}
    draft = initialize(DraftConfig.model_validate(DRAFT.model_dump() | windowed), target, seed=0)
    write_draft(draft, tmp_path, torch.float32)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert (config["sliding_window"], config["use_sliding_window"]) == (9, True)
    assert load_draft(tmp_path).architecture == draft.architecture


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ("full_attention",)}, "layer_types must name 2 types"),
        ({"sliding_window": 9}, "give both or neither"),
        ({"layer_types": ("sliding_attention", "full_attention")}, "give both or neither"),
    ],
)
def test_windows_that_do_not_belong_to_the_layers_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftConfig.model_validate(DRAFT.model_dump() | changes)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("layers.1.mlp.up_proj.weight", None, r"layers\.1\.mlp\.up_proj\.weight is missing"),
        ("lm_head.weight", torch.zeros(97, 32), r"lm_head\.weight does not belong"),
        ("fc.weight", torch.zeros(32, 32), r"fc\.weight has shape \(32, 32\) instead of \(32, 64\)"),
    ],
)
def test_wrong_tensors_are_refused(
    target: Target, draft_folder: Path, tmp_path: Path, name: str, value: torch.Tensor | None, message: str
) -> None:
    tensors = load_file(draft_folder / "model.safetensors")
    tensors.pop(name, None)
    if value is not None:
        tensors[name] = value
    save_file(tensors, draft_folder / "model.safetensors")
    with pytest.raises(DflashError, match=message):
        export_draft(draft_folder, tmp_path / "exported", target.fit)
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("target_layer_ids", [1, 5], r"the last one cannot be tapped"),
        ("mask_token_id", 97, r"mask token 97 has no embedding row"),
    ],
)
def test_a_drafter_that_does_not_fit_the_target_is_refused(
    target: Target, draft_folder: Path, tmp_path: Path, key: str, value: Any, message: str
) -> None:
    config = json.loads((draft_folder / "config.json").read_text())
    config["dflash_config"][key] = value
    (draft_folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(DflashError, match=message):
        export_draft(draft_folder, tmp_path / "exported", target.fit)


def test_a_warm_start_copies_the_targets_layers(target: Target) -> None:
    draft = initialize(DraftConfig(num_layers=1, block_size=4, mask_token_id=96, init="target"), target, seed=0)
    assert draft.architecture.target_layer_ids == (3,)
    source = dict(target.layers[4].named_parameters())
    for name, parameter in draft.layers[0].named_parameters():
        if name in source:
            assert torch.equal(parameter, source[name])
    final_norm = target.model.get_parameter("model.norm.weight")
    assert torch.equal(draft.norm.weight, final_norm)


def evaluation(target_folder: Path, draft_folder: Path, folder: Path, **changes: Any) -> EvaluationConfig:
    prompts = [{"prompt_id": f"p{i}", "source": "ab"[i % 2], "input_ids": [5 + i, 9, 20 + i]} for i in range(4)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    values = {
        "target": target_folder,
        "draft": draft_folder,
        "prompts": folder / "prompts.jsonl",
        "report": folder / "report.json",
        "rollouts": folder / "rollouts.jsonl",
        "max_new_tokens": 12,
    }
    return EvaluationConfig.model_validate(values | changes)


def test_the_report_counts_every_token_by_source(target_folder: Path, draft_folder: Path, tmp_path: Path) -> None:
    report = evaluate(evaluation(target_folder, draft_folder, tmp_path))
    assert report == json.loads((tmp_path / "report.json").read_text())
    overall, sources = report["overall"], report["by_source"]
    assert report["lossless"]["lossless"]
    assert report["lossless"]["compared_tokens"] == overall["tokens"]
    assert overall["prompts"] == 4
    assert sorted(sources) == ["a", "b"]
    for key in ("prompts", "tokens", "verifications", "degenerate"):
        assert overall[key] == sum(source[key] for source in sources.values())
    assert overall["acceptance_length"] == pytest.approx(
        (overall["tokens"] - overall["prompts"]) / overall["verifications"]
    )


def test_a_killed_evaluation_goes_on_where_it_stopped(target_folder: Path, draft_folder: Path, tmp_path: Path) -> None:
    config = evaluation(target_folder, draft_folder, tmp_path, batch_size=2)

    class Killed(BaseException):
        pass

    def kill_after_two(line: dict[str, Any]) -> None:
        if line["done"] == 2:
            raise Killed

    with pytest.raises(Killed):
        evaluate(config, kill_after_two)
    assert not config.report.exists()
    journal = tmp_path / "report.journal.jsonl"
    with journal.open("a") as file:
        file.write('{"key": "p2')
    before = journal.read_text().splitlines()[:3]
    report = evaluate(config)
    assert journal.read_text().splitlines()[:3] == before
    assert report["overall"]["prompts"] == 4


def test_rollouts_of_other_settings_are_refused(target_folder: Path, draft_folder: Path, tmp_path: Path) -> None:
    evaluate(evaluation(target_folder, draft_folder, tmp_path))
    with pytest.raises(DflashError, match=r"made with other settings \(max_new_tokens\)"):
        evaluate(evaluation(target_folder, draft_folder, tmp_path, max_new_tokens=13))


def test_sampling_is_reproducible_whatever_runs_together(
    target_folder: Path, draft_folder: Path, tmp_path: Path
) -> None:
    reports = []
    for batch_size in (1, 4):
        folder = tmp_path / str(batch_size)
        folder.mkdir()
        report = evaluate(
            evaluation(target_folder, draft_folder, folder, temperature=1.0, top_k=20, batch_size=batch_size)
        )
        assert report["lossless"]["lossless"] is None
        assert report["overall"]["acceptance_length"] == pytest.approx(
            (report["overall"]["tokens"] - 4) / report["overall"]["verifications"]
        )
        reports.append([json.loads(line) for line in (folder / "report.journal.jsonl").read_text().splitlines()[1:]])
    alone, together = ([record["tokens"] for record in report] for report in reports)
    assert alone == together
    with pytest.raises(DflashError, match=r"made with other settings \(sampling\)"):
        evaluate(evaluation(target_folder, draft_folder, tmp_path / "1", temperature=0.5))


def test_trees_stand_beside_the_chain(target_folder: Path, draft_folder: Path, tmp_path: Path) -> None:
    report = evaluate(evaluation(target_folder, draft_folder, tmp_path, tree_budget=40))
    assert report["tree_lossless"]["lossless"]
    overall, tree = report["overall"], report["overall"]["tree"]
    assert tree["tokens"] == overall["tokens"] == report["tree_lossless"]["compared_tokens"]
    assert tree["acceptance_length"] > overall["acceptance_length"]
    assert tree["verifications"] == sum(part["tree"]["verifications"] for part in report["by_source"].values())
    with pytest.raises(ValueError, match="decoded greedily, with temperature 0"):
        evaluation(target_folder, draft_folder, tmp_path, tree_budget=4, temperature=1.0)


def test_prompts_of_the_training_data_are_refused(target_folder: Path, draft_folder: Path, tmp_path: Path) -> None:
    seen = {"input_ids": [7, 9, 22, 4, 4], "loss_mask": [0, 0, 0, 1, 1], "seq_len": 5}
    begins_alike = {"input_ids": [5, 9, 20, 4, 4], "loss_mask": [0, 0, 0, 0, 1], "seq_len": 5}
    dataset = write_dataset(tmp_path / "data", [begins_alike, seen])
    with pytest.raises(DflashError, match=r"1 of 4 prompts are in the training data .*, for example p2 in row 1"):
        evaluate(evaluation(target_folder, draft_folder, tmp_path, dataset=dataset))
    write_dataset(tmp_path / "others", [begins_alike])
    assert evaluate(evaluation(target_folder, draft_folder, tmp_path, dataset=tmp_path / "others"))["overall"]


def test_a_hybrid_target_is_counted_on_its_own_answers(tmp_path: Path) -> None:
    tiny_model("qwen3_5", True).save_pretrained(tmp_path / "target")
    target = load_target(tmp_path / "target", torch.float32)
    write_draft(initialize(DRAFT, target, seed=0), tmp_path / "draft", torch.float32)
    report = evaluate(evaluation(tmp_path / "target", tmp_path / "draft", tmp_path))
    overall = report["overall"]
    assert "cannot be verified in blocks" in report["not_decoded"]
    assert overall["acceptance_length"] == pytest.approx((overall["tokens"] - 4) / overall["verifications"])
    assert overall["tokens_per_second"] is None
    assert report["lossless"]["lossless"] is None
    for changes in ({"temperature": 1.0}, {"tree_budget": 4}):
        with pytest.raises(DflashError, match="evaluate with temperature 0 and without tree_budget"):
            evaluate(evaluation(tmp_path / "target", tmp_path / "draft", tmp_path, **changes))


def record(tokens: list[int], lengths: list[int], **changes: Any) -> dict[str, Any]:
    values = {"prompt_id": "p", "source": "s", "thinking": None, "seconds": 1.0, "tree": None}
    counted = {"guesses": 18, "near": 9, "starts": 6, "oracle": 12}
    return {**values, "tokens": tokens, "acceptance_lengths": lengths, "counted": counted, **changes}


def test_a_difference_is_a_mismatch_unless_the_target_was_undecided() -> None:
    own = {"tokens": [1, 2, 3], "gaps": [4.0, 0.0001, 2.0], "seconds": 1.0}
    tie = build_report([(record([1, 9, 9], [2]), own)], block_size=4, tie_gap=1e-3)["lossless"]
    assert (tie["lossless"], tie["compared_tokens"], len(tie["numeric_ties"])) == (True, 1, 1)
    wrong = build_report([(record([1, 2, 9], [2]), own)], block_size=4, tie_gap=1e-3)["lossless"]
    assert (wrong["lossless"], wrong["mismatches"][0]["position"]) == (False, 2)
    short = build_report([(record([1, 2], [1]), own)], block_size=4, tie_gap=1e-3)["lossless"]
    assert short["lossless"] is False


def test_acceptance_counts_kept_tokens_and_positions() -> None:
    own = {"tokens": [1] * 7, "gaps": [1.0] * 7, "seconds": 2.0}
    overall = build_report([(record([1] * 7, [1, 3, 2]), own)], block_size=4, tie_gap=0.0)["overall"]
    assert overall["acceptance_length"] == 2.0
    assert overall["acceptance_by_position"] == [
        pytest.approx(2 / 3, abs=1e-4),
        pytest.approx(1 / 3, abs=1e-4),
        0.0,
    ]
    assert (overall["tokens_per_second"], overall["target_alone_tokens_per_second"]) == (7.0, 3.5)
    assert overall["tokens_per_target_call"] == 7 / 4
    assert (overall["recall"], overall["oracle_length"]) == (0.5, 2.0)


def test_the_report_keeps_thinking_modes_apart() -> None:
    own = {"tokens": [1] * 4, "gaps": [1.0] * 4, "seconds": 1.0}
    pairs = [(record([1] * 4, [3], thinking=mode), own) for mode in (True, True, False, None)]
    parts = build_report(pairs, block_size=4, tie_gap=0.0)["by_thinking"]
    assert {mode: part["prompts"] for mode, part in parts.items()} == {"on": 2, "off": 1, "not set": 1}


def test_sampled_answers_are_not_compared() -> None:
    pairs = [(record([1, 2], [1]), {"tokens": [3, 4], "seconds": 1.0})]
    lossless = build_report(pairs, block_size=4, tie_gap=0.0)["lossless"]
    assert (lossless["lossless"], lossless["compared_tokens"], lossless["mismatches"]) == (None, 0, [])


def test_a_loop_at_the_end_is_degenerate() -> None:
    assert is_degenerate([*range(50), *[1, 2, 3] * 8])
    assert not is_degenerate(list(range(80)))
    assert not is_degenerate([1, 1, 1])


def test_the_command_line_exports_and_evaluates(target_folder: Path, draft_folder: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    target = ["--target", str(target_folder)]
    exported = runner.invoke(app, ["export", str(draft_folder), str(tmp_path / "out"), *target])
    assert exported.exit_code == 0, exported.output
    config = evaluation(target_folder, tmp_path / "out", tmp_path)
    options = [
        text
        for name in ("draft", "prompts", "report", "rollouts")
        for text in (f"--{name}", str(getattr(config, name)))
    ]
    result = runner.invoke(app, ["evaluate", *target, *options, "--max-new-tokens", "6", "--tree-budget", "3"])
    assert result.exit_code == 0, result.output
    assert "greedy: " in result.output
    assert "greedy with trees: " in result.output
    sampled = ["--temperature", "0.8", "--top-p", "0.9", "--rollouts", str(tmp_path / "sampled.jsonl")]
    result = runner.invoke(app, ["evaluate", *target, *options, "--max-new-tokens", "6", *sampled])
    assert result.exit_code == 0, result.output
    assert "sampled: distributed as the target alone samples" in result.output


def test_a_users_mistake_is_one_line_and_exit_code_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from dflash.cli import main

    monkeypatch.setattr("sys.argv", ["dflash", "train", "--config", str(tmp_path / "none.yaml")])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'none.yaml'}: no such configuration file\n"


def test_a_mask_token_of_the_wrong_target_is_refused(llama_folder: Path) -> None:
    with pytest.raises(DflashError, match="mask token 500"):
        initialize(DraftConfig(mask_token_id=500, num_layers=1), load_target(llama_folder, torch.float32), seed=0)
