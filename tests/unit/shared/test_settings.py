"""A configuration file is right, or the user is told in one line what is not."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from services.errors import UserError
from services.settings import Addresses, load_settings

ROOT = Path(__file__).parents[3]


def load(tmp_path: Path, content: Any) -> str:
    """The error of a configuration, which has to be one line and to name the file."""
    path = tmp_path / "configuration.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(UserError) as caught:
        load_settings(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_valid_file_is_loaded(tmp_path: Path, settings_content: dict[str, Any]) -> None:
    path = tmp_path / "configuration.yaml"
    path.write_text(yaml.safe_dump(settings_content))
    settings = load_settings(path)
    assert settings.sources[0].name == "questions"
    assert settings.merge.base is None


@pytest.mark.parametrize("path", sorted((ROOT / "config").glob("*.yaml")), ids=lambda path: str(path.name))
def test_the_shipped_configurations_are_valid(path: Path) -> None:
    assert load_settings(path).sources


def test_every_unknown_key_is_named(tmp_path: Path, settings_content: dict[str, Any]) -> None:
    settings_content["generate"]["temprature"] = 1
    settings_content["sources"][0]["kwota"] = 1
    error = load(tmp_path, settings_content)
    assert "there is no key 'generate.temprature'" in error
    assert "there is no key 'sources.0.kwota'" in error


def test_a_missing_key_is_named(tmp_path: Path, settings_content: dict[str, Any]) -> None:
    del settings_content["assemble"]["max_length"]
    assert "assemble.max_length: Field required" in load(tmp_path, settings_content)


def test_two_sources_of_one_name_are_refused(tmp_path: Path, settings_content: dict[str, Any]) -> None:
    settings_content["sources"] *= 2
    assert "two sources have the name 'questions'" in load(tmp_path, settings_content)


def test_a_source_named_like_the_existing_corpus_is_refused(tmp_path: Path, settings_content: dict[str, Any]) -> None:
    settings_content["merge"] = {"base_source": "questions"}
    assert "merge.base_source" in load(tmp_path, settings_content)


def test_prompt_and_answer_must_fit_the_context(tmp_path: Path, settings_content: dict[str, Any]) -> None:
    settings_content["target"]["context_length"] = 300
    assert "= 320 is more than target.context_length = 300" in load(tmp_path, settings_content)


def test_an_instruction_needs_a_question(tmp_path: Path, settings_content: dict[str, Any]) -> None:
    settings_content["sources"][0] |= {"adapter": "sharegpt", "instruction": "Answer."}
    assert "instruction is for adapters question and turns" in load(tmp_path, settings_content)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"dataset": "a/b", "revision": "main", "data_files": ["*"]}, "questions: give either files or dataset"),
        ({"files": []}, "questions: give either files or dataset"),
        ({"files": [], "dataset": "a/b", "data_files": ["*"]}, "questions: a dataset needs revision and data_files"),
        ({"adapter": "sharegpt", "input_column": "input"}, "input_column is for adapter question"),
        ({"tools_in_system": True}, "tools_in_system is for adapters messages and sharegpt"),
        ({"filters": {"reject": [{"column": "source", "values": [], "reason": "licence"}]}}, "reject.0.values"),
        ({"enabled": False}, "no source is enabled"),
    ],
)
def test_a_source_that_does_not_fit_is_refused(
    tmp_path: Path, settings_content: dict[str, Any], keys: dict[str, Any], told: str
) -> None:
    settings_content["sources"][0] |= keys
    assert told in load(tmp_path, settings_content)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"token_budget": 64, "max_length": 228}, "max_length 228 does not fit into token_budget 64"),
        ({"max_draft_rows": 4}, "max_draft_rows 4 is less than one block of 32"),
        (
            {"packs_per_step": 3, "topology": {"drafters": 2}},
            "packs_per_step 3 is not a multiple of topology.drafters 2",
        ),
        ({"attention": "flex", "device": "cpu"}, "flex trains on CUDA devices only, not on cpu: use auto or sdpa"),
        ({"topology": {"cards_per_target": 2}}, "train.topology: Value error, cards_per_target needs targets"),
        ({"draft": {"sliding_window": 64}}, "train.draft: Value error, sliding_window belongs to layer_types with a"),
    ],
)
def test_a_training_that_the_trainer_would_refuse_is_refused_before_it_is_prepared(
    tmp_path: Path, settings_content: dict[str, Any], keys: dict[str, Any], told: str
) -> None:
    settings_content["train"] |= keys
    assert told in load(tmp_path, settings_content)


def test_the_mix_of_the_corpus_is_no_more_than_all(tmp_path: Path, settings_content: dict[str, Any]) -> None:
    settings_content["prepare"] = {"corpus": {"samples": 9, "percent": {"code": 77, "general": 24}}}
    assert "percent adds up to 101, more than 100" in load(tmp_path, settings_content)


def test_a_source_that_is_not_enabled_is_left_out(tmp_path: Path, settings_content: dict[str, Any]) -> None:
    settings_content["sources"].append({**settings_content["sources"][0], "name": "other", "enabled": False})
    path = tmp_path / "configuration.yaml"
    path.write_text(yaml.safe_dump(settings_content))
    assert [source.name for source in load_settings(path).sources] == ["questions"]


@pytest.mark.parametrize("content", [None, [], "text"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, content: Any) -> None:
    load(tmp_path, content)


def test_a_file_that_is_no_yaml_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "configuration.yaml"
    path.write_text("target: [")
    with pytest.raises(UserError, match="is not YAML"):
        load_settings(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.yaml.*--config"):
        load_settings(tmp_path / "none.yaml")


def test_addresses_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_SERVERS", "http://a:1/, http://b:2")
    assert Addresses().server_list() == ["http://a:1", "http://b:2"]
