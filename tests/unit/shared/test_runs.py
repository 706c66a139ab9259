"""A run keeps the settings it was begun with."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.errors import UserError
from services.files import publish_json, read_json
from services.runs import check_tokenizer, create_run, open_run, read_settings, record_rendering
from services.settings import Settings

MakeSettings = Callable[..., Settings]


def test_a_run_is_taken_up_again_with_its_settings(tmp_path: Path, make_settings: MakeSettings) -> None:
    settings = make_settings()
    run = create_run(tmp_path, "first", settings)
    assert create_run(tmp_path, "first", settings) == run
    assert read_settings(open_run(tmp_path, "first")) == settings


def test_a_run_refuses_other_data_settings_and_names_each(tmp_path: Path, make_settings: MakeSettings) -> None:
    create_run(tmp_path, "first", make_settings())
    changed = make_settings(generate={"max_new_tokens": 32, "chunk_size": 3}, seed=7)
    with pytest.raises(UserError) as caught:
        create_run(tmp_path, "first", changed)
    assert "generate.max_new_tokens was 64, is 32" in str(caught.value)
    assert "seed was 0, is 7" in str(caught.value)
    assert "chunk_size" not in str(caught.value)


def test_how_a_run_trains_may_change(tmp_path: Path, make_settings: MakeSettings) -> None:
    create_run(tmp_path, "first", make_settings())
    changed = make_settings(train={"steps": 99, "draft": {"mask_token_id": 0}})
    assert read_settings(create_run(tmp_path, "first", changed)).train.steps == 99


@pytest.mark.parametrize("name", ["", "Upper", "../up", "-dash", "a" * 65, "a b"])
def test_a_name_that_is_no_plain_folder_name_is_refused(tmp_path: Path, make_settings: MakeSettings, name: str) -> None:
    with pytest.raises(UserError, match="run name"):
        create_run(tmp_path, name, make_settings())
    assert list(tmp_path.iterdir()) == []


def test_opening_an_unknown_run_names_the_known_ones(tmp_path: Path, make_settings: MakeSettings) -> None:
    create_run(tmp_path, "monday", make_settings())
    with pytest.raises(UserError, match=r"no run 'tuesday'.*monday"):
        open_run(tmp_path, "tuesday")


def test_a_damaged_run_record_is_told_by_its_key(tmp_path: Path, make_settings: MakeSettings) -> None:
    run = create_run(tmp_path, "first", make_settings())
    content: dict[str, Any] = read_json(run.record)
    del content["settings"]["render"]
    run.record.unlink()
    publish_json(run.record, content)
    with pytest.raises(UserError, match=r"run\.json: render: Field required"):
        read_settings(run)


def test_how_prompts_are_rendered_is_recorded_once_and_kept(tmp_path: Path, make_settings: MakeSettings) -> None:
    run = create_run(tmp_path, "r", make_settings())
    rendering = {"thinking": None, "template": "t", "tokenizer": "k"}
    record_rendering(run, rendering)
    record_rendering(run, rendering)
    with pytest.raises(UserError, match=r"run r was begun with another target \(rendering\.template was 't', is 'u'\)"):
        record_rendering(run, {**rendering, "template": "u"})
    create_run(tmp_path, "r", make_settings(train={"steps": 2, "draft": {"mask_token_id": 0}}))
    assert read_json(run.record)["rendering"] == rendering
    assert read_settings(run).train.steps == 2


def test_a_target_with_another_tokenizer_is_refused(tmp_path: Path, make_settings: MakeSettings) -> None:
    run, target = create_run(tmp_path, "r", make_settings()), tmp_path / "target"
    target.mkdir()
    check_tokenizer(run, target)  # nothing is rendered yet
    (target / "tokenizer.json").write_text("{}")
    record_rendering(run, {"tokenizer": hashlib.sha256(b"{}").hexdigest()})
    check_tokenizer(run, target)
    (target / "tokenizer.json").write_text("{ }")
    with pytest.raises(UserError, match="its tokenizer is not the one that run r was prepared with"):
        check_tokenizer(run, target)
