"""A dataset can be looked into: each sample with its mask, and all of it in numbers that are compared."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from rich.console import Console

from services.dataset_folder import write_shards, write_state
from services.errors import UserError
from services.records import SAMPLE_SCHEMA
from services.sample_rows import read_totals
from services.stack.inspection import marked, show_dataset, show_sample, token_texts

ROWS = [
    {"input_ids": [0, 1, 2, 5], "loss_mask": [0, 0, 1, 1], "seq_len": 4},
    {"input_ids": [0, 3, 4, 5], "loss_mask": [0, 1, 1, 1], "seq_len": 4},
]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A tokenizer of six tokens: a head, words, two halves of a character and an end."""
    folder = tmp_path / "target"
    folder.mkdir()
    vocabulary = {"Hello": 1, "Ġyou": 2, "Ã": 3, "©Ċ": 4}
    added = [{"id": 0, "content": "<|head|>"}, {"id": 5, "content": "<|end|>"}]
    content = {"model": {"vocab": vocabulary}, "added_tokens": added}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    folder = tmp_path / "dataset"
    folder.mkdir()
    tables = (pa.Table.from_pylist([row], schema=SAMPLE_SCHEMA) for row in ROWS)
    write_state(folder, write_shards(folder, SAMPLE_SCHEMA, tables, shard_bytes=1), "f" * 16)
    return folder


def merged(dataset: Path, target: Path) -> dict[str, Any]:
    """What a merge would have noted."""
    totals = read_totals(sorted(dataset.glob("*.arrow"))).as_json()
    counts = {name: totals[name] for name in ("samples", "tokens", "supervised_tokens")}
    part = {**counts, "samples_percent": 100.0, "tokens_percent": 100.0, "domain": "general"}
    nothing = {"samples": 0, "tokens": 0, "supervised_tokens": 0, "lengths": {}}
    return {
        "base": None,
        "verified": True,
        "tokenizer": hashlib.sha256((target / "tokenizer.json").read_bytes()).hexdigest(),
        "vocabulary_size": 6,
        "target": str(target),
        "before": nothing,
        "added": totals,
        "after": totals,
        "growth_percent": {},
        "runs": {"mine": {**totals, "assembled": 3, "dropped": {"near_empty": 1}}},
        "sources": {"questions": part},
        "domains": {"general": part},
    }


def shown(dataset: Path, row: int | None = None, target: Path | None = None) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"), color_system=None)  # noqa: SIM115, PTH123
    if row is None:
        show_dataset(dataset, console)
    else:
        show_sample(dataset, row, target, console)
    return console.export_text()


def test_a_sample_is_shown_with_its_mask(dataset: Path, target: Path) -> None:
    text = shown(dataset, 0, target)
    assert "row 0: data-00000.arrow row 0; 4 tokens, 2 supervised" in text
    assert "<|head|>Hello[[ you<|end|>]]" in text
    assert "<|head|>[[é⏎\n<|end|>]]" in shown(dataset, 1, target)


def test_with_colour_every_token_has_its_shade() -> None:
    text = marked(["a", "b", "c"], [0, 1, 1], colour=True)
    assert text.plain == "abc"
    assert [str(span.style) for span in text.spans] == ["default", "black on bright_green", "black on green"]


def test_a_character_of_several_tokens_is_shown_at_its_last() -> None:
    assert list(token_texts(["🙂".encode()[:2], "🙂".encode()[2:], b"\xff"])) == ["", "🙂", "�"]


def test_a_dataset_is_told_in_numbers(dataset: Path, target: Path) -> None:
    text = shown(dataset)
    assert "2 samples, 8 tokens, 5 of them supervised (62.5 %)" in text
    (dataset / "merge.json").write_text(json.dumps(merged(dataset, target)))
    text = shown(dataset)
    assert "1 near_empty" in text
    assert "questions" in text
    assert "no base; read whole, and the numbers are those" in text


def test_numbers_that_are_not_those_of_the_merge_are_an_error(dataset: Path, target: Path) -> None:
    content = merged(dataset, target)
    content["after"] = {**content["after"], "tokens": 9}
    (dataset / "merge.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"merge\.json says 2 samples and 9 tokens, and 2 and 8 are there"):
        shown(dataset)


def test_what_cannot_be_shown_is_told(dataset: Path, target: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no row 2; its 2 rows are numbered from 0"):
        shown(dataset, 2, target)
    with pytest.raises(UserError, match="no merge noted its model; name the model's folder with --target"):
        shown(dataset, 0)
    (dataset / "merge.json").write_text(json.dumps({**merged(dataset, target), "tokenizer": "another"}))
    with pytest.raises(UserError, match="its tokenizer is not the one of dataset"):
        shown(dataset, 0, target)
    with pytest.raises(UserError, match="give a folder of save_to_disk"):
        shown(tmp_path, 0, target)
