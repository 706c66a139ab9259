"""What the files of a target say, read without its weights or a tokenizer library."""

import json
from pathlib import Path

import pytest

from services.errors import UserError
from services.target import added_token_ids, model_fingerprint, vocabulary_size


def test_the_vocabulary_is_found_nested_or_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    assert vocabulary_size(tmp_path) == 100
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 248320}}')
    assert vocabulary_size(tmp_path) == 248320


@pytest.mark.parametrize(
    ("content", "message"),
    [("{}", "config.json: no vocab_size"), ("{", "config.json cannot be read: .*; correct target.path")],
)
def test_a_folder_that_is_no_language_model_is_told(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=message):
        vocabulary_size(tmp_path)


def test_a_missing_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere: config.json cannot be read: .*No such file"):
        vocabulary_size(tmp_path / "nowhere")


def test_added_tokens_are_found_in_either_file(tmp_path: Path) -> None:
    assert added_token_ids(tmp_path, ["<think>"]) == {}
    added = [{"id": 7, "content": "<think>"}, {"id": 8, "content": "<other>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert added_token_ids(tmp_path, ["<think>", "</think>"]) == {"<think>": 7}
    decoder = {"9": {"content": "</think>"}, "7": {"content": "<think>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    assert added_token_ids(tmp_path, ["<think>", "</think>"]) == {"<think>": 7, "</think>": 9}


def test_a_fingerprint_changes_with_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    first = model_fingerprint(tmp_path)
    assert model_fingerprint(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    assert model_fingerprint(tmp_path) != first
    (tmp_path / "model.safetensors").write_bytes(b"12346")
    same_size = model_fingerprint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    assert model_fingerprint(tmp_path) != same_size
