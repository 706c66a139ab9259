"""A run's settings reach dflash under the same names, and its mistakes come back as one line."""

import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from dflash.config import (
    AcceptanceConfig,
    DraftConfig,
    MixtureConfig,
    ObjectiveConfig,
    TopologyConfig,
    TrainingConfig,
)
from services.errors import UserError
from services.records import Prompt, write_prompts
from services.runs import Run, create_run, record_rendering
from services.settings import load_settings
from services.trainer.configuration import evaluation_arguments, held_out_lines, training_config
from services.trainer.supervise import run_dflash
from services.training_settings import (
    AcceptanceSettings,
    DraftSettings,
    MixtureSettings,
    ObjectiveSettings,
    TopologySettings,
    TrainSettings,
)

# Every rule of dflash's configuration about keys that must fit together, with settings that break it alone.
MISTAKES: dict[str, list[dict[str, Any]]] = {
    "_init_layers_match": [
        {"draft": {"init_layer_ids": [1, 2, 3, 4, 5]}},
        {"draft": {"init": "target", "init_layer_ids": [1, 2]}},
    ],
    "_windows_match": [
        {"draft": {"layer_types": ["full_attention"] * 4}},
        {"draft": {"layer_types": ["sliding_attention"] * 5}},
        {"draft": {"sliding_window": 64}},
    ],
    "_has_a_term": [{"objective": {"ce": 0.0}}],
    "_existing_is_given_once": [{"mixture": {"replay_share": 0.2, "weights": {"existing": 1.0}}}],
    "_only_targets_have_several_cards": [{"topology": {"cards_per_target": 2}}],
    "_longest_sample_fits": [{"max_length": 65, "token_budget": 64}],
    "_a_block_fits": [{"max_draft_rows": 7, "draft": {"block_size": 8}}],
    "_flex_has_its_device": [{"attention": "flex", "device": "cpu"}],
    "_every_process_has_its_card": [
        {"device": "cuda:0", "topology": {"drafters": 2}},
        {"device": "cuda:1", "topology": {"targets": 2}},
    ],
    "_every_drafter_has_as_many_packs": [{"packs_per_step": 3, "topology": {"drafters": 2}}],
}

DEMO = Path(__file__).parents[3] / "config" / "demo.yaml"
PATHS = {"target", "dataset", "output"}


def test_training_has_the_keys_of_dflash_and_no_others() -> None:
    ours = set(TrainSettings.model_fields) - {"job_timeout", "dataset"}
    assert ours == set(TrainingConfig.model_fields) - PATHS
    assert set(DraftSettings.model_fields) == set(DraftConfig.model_fields)
    assert TopologySettings().model_dump() == TopologyConfig().model_dump()
    assert MixtureSettings().model_dump() == MixtureConfig().model_dump()
    assert ObjectiveSettings().model_dump() == ObjectiveConfig().model_dump()
    assert set(AcceptanceSettings.model_fields) == set(AcceptanceConfig.model_fields) - {"prompts", "rollouts"}


def rules_of(kind: type[BaseModel]) -> set[str]:
    """Return the names of the rules of a configuration and of its parts."""
    annotations = [field.annotation for field in kind.model_fields.values()]
    parts = [part for annotation in annotations for part in (get_args(annotation) or (annotation,))]
    found = [rules_of(part) for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
    return set(kind.__pydantic_decorators__.model_validators).union(*found)


def test_every_rule_of_dflash_is_in_the_table_of_mistakes() -> None:
    assert rules_of(TrainingConfig) == set(MISTAKES)


@pytest.mark.parametrize("mistake", [mistake for mistakes in MISTAKES.values() for mistake in mistakes], ids=str)
def test_what_dflash_would_refuse_later_is_refused_as_the_file_is_read(mistake: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"draft": {}, "steps": 1} | mistake
    with pytest.raises(ValidationError) as of_dflash:
        TrainingConfig.model_validate(settings | {"target": "t", "dataset": "d", "output": "o"})
    with pytest.raises(ValidationError) as ours:
        TrainSettings.model_validate(settings)
    where, what = (tuple(error.errors()[0][key] for error in (of_dflash.value, ours.value)) for key in ("loc", "msg"))
    assert where[0] == where[1]
    assert what[0] == what[1]


def test_training_config_carries_every_setting(tmp_path: Path) -> None:
    settings = load_settings(DEMO)
    changed = {"acceptance": AcceptanceSettings(every=50), "objective": ObjectiveSettings(ce=0.5, lk_lambda=2.0)}
    train = settings.train.model_copy(update=changed)
    held_out = tmp_path / "held_out.jsonl"
    run = create_run(tmp_path, "run", settings)
    config = training_config(run, settings.model_copy(update={"train": train}), held_out)
    assert config.dataset == tmp_path / "run" / "dataset"
    assert config.acceptance is not None
    assert config.acceptance.prompts == held_out
    carried = config.model_dump(exclude={"acceptance": {"prompts", "rollouts"}})
    for name, value in train.model_dump(exclude={"job_timeout", "dataset"}).items():
        assert carried[name] == value


def test_a_dataset_of_another_merge_is_trained_on_if_it_has_the_runs_tokenizer(tmp_path: Path) -> None:
    settings = load_settings(DEMO)
    other = tmp_path / "other"
    other.mkdir()
    train = settings.train.model_copy(update={"dataset": other})
    settings = settings.model_copy(update={"train": train})
    run = create_run(tmp_path, "run", settings)
    record_rendering(run, {"tokenizer": "ours"})
    (other / "merge.json").write_text('{"tokenizer": "ours"}')
    assert training_config(run, settings, tmp_path / "held_out.jsonl").dataset == other
    options = evaluation_arguments(run, settings, "after", run.training, tmp_path / "held_out.jsonl")
    assert options[options.index("--dataset") + 1] == str(other)
    (other / "merge.json").write_text('{"tokenizer": "theirs"}')
    with pytest.raises(UserError, match="merged for another tokenizer than run run's"):
        training_config(run, settings, tmp_path / "held_out.jsonl")


def test_every_evaluation_shares_the_targets_own_answers(tmp_path: Path) -> None:
    run, settings = Run(tmp_path), load_settings(DEMO)
    prompts = tmp_path / "evaluation" / "held_out.jsonl"
    before = evaluation_arguments(run, settings, "before", run.checkpoint(0), prompts)
    after = evaluation_arguments(run, settings, "after", run.training, prompts)
    assert before[before.index("--rollouts") + 1] == after[after.index("--rollouts") + 1]
    assert before[before.index("--draft") + 1] == str(run.checkpoint(0))
    assert before[before.index("--dataset") + 1] == str(run.dataset)


def test_held_out_prompts_come_from_every_source_that_keeps_some(tmp_path: Path) -> None:
    settings = load_settings(DEMO)
    run = create_run(tmp_path, "run", settings)
    for source in settings.sources:
        path = run.held_out(source.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_prompts(path, [Prompt(f"id-{source.name}", source.name, "[]", None, [1, 2])])
    lines = list(held_out_lines(run, settings))
    assert len(lines) == len(settings.sources)
    assert '"input_ids": [1, 2], "thinking": null' in lines[0]


def test_a_run_without_held_out_prompts_is_refused(tmp_path: Path) -> None:
    settings = load_settings(DEMO)
    sources = [source.model_copy(update={"held_out": 0}) for source in settings.sources]
    with pytest.raises(UserError, match="no held-out prompts; set held_out"):
        list(held_out_lines(Run(tmp_path), settings.model_copy(update={"sources": sources})))


def test_a_mistake_that_dflash_names_is_passed_on_as_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^/no/such\.json: no such configuration file$"):
        run_dflash(tmp_path / "log", "train", "--config", "/no/such.json")


def test_an_end_that_is_no_users_mistake_names_the_log(tmp_path: Path) -> None:
    with pytest.raises(ChildProcessError, match=r"status 2: .*; see .*log"):
        run_dflash(tmp_path / "log", "train", "--no-such-option")


@pytest.mark.parametrize("code", ["raise RuntimeError('broken')", "import os; os._exit(1)"])
def test_a_traceback_is_no_users_mistake(tmp_path: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}"\n')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    log = tmp_path / "log"
    log.write_text("error: what an earlier one said\n")
    with pytest.raises(
        ChildProcessError, match=r"ended with status 1: (RuntimeError: broken|it said nothing); see .*log"
    ):
        run_dflash(log, "train")
