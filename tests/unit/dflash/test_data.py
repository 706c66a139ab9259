"""Samples are read as written and packed within the budget; bad folders are refused by row or column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from dflash.anchors import valid_anchors
from dflash.data import check_vocabulary, open_dataset, trainable_rows
from dflash.errors import DflashError
from tests.unit.dflash.conftest import random_rows, write_dataset


def test_samples_read_back_as_written(tmp_path: Path) -> None:
    rows = random_rows(7)
    dataset = open_dataset(write_dataset(tmp_path / "data", rows))
    assert [dataset.sample(i).input_ids.tolist() for i in range(7)] == [row["input_ids"] for row in rows]
    assert [dataset.sample(i).loss_mask.tolist() for i in range(7)] == [row["loss_mask"] for row in rows]
    assert dataset.lengths.tolist() == [row["seq_len"] for row in rows]
    assert len(dataset.sample(0, max_length=5).input_ids) == 5


def test_several_files_and_more_columns_are_read(tmp_path: Path) -> None:
    rows = [row | {"source": "x"} for row in random_rows(9)]
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "data"), num_shards=3)
    dataset = open_dataset(tmp_path / "data")
    assert [dataset.sample(i).input_ids.tolist() for i in range(9)] == [row["input_ids"] for row in rows]


def test_a_sample_cut_before_its_answer_is_left_out(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "seq_len": 4},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "seq_len": 3},
    ]
    dataset = open_dataset(write_dataset(tmp_path / "data", rows))
    assert trainable_rows(dataset, max_length=10).tolist() == [0, 1]
    assert trainable_rows(dataset, max_length=3).tolist() == [1]


def test_trainable_rows_are_those_with_a_valid_anchor(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    rows = [row | {"loss_mask": rng.integers(0, 2, row["seq_len"]).tolist()} for row in random_rows(60)]
    rows = [row for row in rows if any(row["loss_mask"])]
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "data"), num_shards=4)
    dataset = open_dataset(tmp_path / "data")
    for length in (2, 5, 9, 100):
        expected = [i for i in range(len(rows)) if len(valid_anchors(dataset.sample(i, length).loss_mask))]
        assert trainable_rows(dataset, length).tolist() == expected


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    shard = next(write_dataset(tmp_path / "data", random_rows(9)).glob("*.arrow"))
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(DflashError, match=r"cut off \(it has no end of stream\): restore the file"):
        open_dataset(tmp_path / "data")


def good_row(**changes: Any) -> dict[str, Any]:
    return {"input_ids": [3, 4, 5], "loss_mask": [0, 1, 1], "seq_len": 3} | changes


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (good_row(loss_mask=[0, 0, 0]), r"row 2 has no supervised token"),
        (good_row(loss_mask=[0, 1]), r"row 2 has 3 input_ids and 2 loss_mask entries, but seq_len 3"),
        (good_row(seq_len=4), r"row 2 has 3 input_ids and 3 loss_mask entries, but seq_len 4"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    folder = write_dataset(tmp_path / "data", [good_row(), good_row(), row, good_row()])
    with pytest.raises(DflashError, match=message):
        open_dataset(folder)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"input_ids": [1], "seq_len": 1}], r"column loss_mask is missing \(found input_ids, seq_len\)"),
        (
            [good_row(input_ids=[0.5, 1.0, 2.0])],
            r"column input_ids must hold lists of integers, but holds list",
        ),
        ([good_row(seq_len="3")], r"column seq_len must hold integers, but holds string"),
    ],
)
def test_a_wrong_column_is_named(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "data"))
    with pytest.raises(DflashError, match=message):
        open_dataset(tmp_path / "data")


def test_a_folder_without_a_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DflashError, match=r"no dataset here"):
        open_dataset(tmp_path)


def test_ids_beyond_the_targets_vocabulary_are_refused(tmp_path: Path) -> None:
    dataset = open_dataset(write_dataset(tmp_path / "data", [good_row(input_ids=[3, 200, 5])]))
    check_vocabulary(dataset, 201)
    with pytest.raises(DflashError, match="token id 200 is outside the target's vocabulary of 97"):
        check_vocabulary(dataset, 97)
