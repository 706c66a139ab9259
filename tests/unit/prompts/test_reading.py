"""Files of every kind give the same rows; a bad row is named, and a bad file too."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.errors import UserError
from services.prompts.reading import read_rows

ROWS = [{"question": "größer?", "n": 1}, {"question": "🙂", "n": 2}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def write(path: Path) -> Path:
    match path.name:
        case "rows.jsonl" | "lines.json":
            path.write_bytes(LINES)
        case "rows.jsonl.gz":
            path.write_bytes(gzip.compress(LINES))
        case "list.json":
            path.write_text(json.dumps(ROWS, indent=2))
        case "rows.parquet":
            pq.write_table(pa.Table.from_pylist(ROWS), path)
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "lines.json", "rows.jsonl.gz", "list.json", "rows.parquet"])
def test_every_kind_of_file_gives_its_rows(tmp_path: Path, name: str) -> None:
    rows = list(read_rows(write(tmp_path / name), ["question", "n"]))
    assert [row.value for row in rows] == ROWS
    assert [row.number for row in rows] == [1, 2]


def test_of_parquet_only_the_named_columns_are_read(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path / "rows.parquet"), ["n"])
    assert [row.value for row in rows] == [{"n": 1}, {"n": 2}]


def test_a_bad_line_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"n": 1}\n\n{"n": \n\xff\xfe\n[1]\n{"n": 2}')
    rows = list(read_rows(path, ["n"]))
    assert [(row.number, row.fault) for row in rows] == [
        (1, None),
        (3, "not_json"),
        (4, "not_utf8"),
        (5, "not_an_object"),
        (6, None),
    ]


def test_a_missing_column_of_parquet_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.parquet")
    with pytest.raises(UserError, match=r"no column 'query'; there are: question, n"):
        list(read_rows(path, ["query"]))


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.parquet", "list.json"])
def test_a_file_cut_off_is_named(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=name) as caught:
        list(read_rows(path, ["question"]))
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_an_unknown_kind_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rows\.jsonl: there is no such file"):
        list(read_rows(tmp_path / "rows.jsonl", []))
    (tmp_path / "rows.csv").write_text("a,b")
    with pytest.raises(UserError, match=r"rows\.csv: use \.jsonl"):
        list(read_rows(tmp_path / "rows.csv", []))
