"""Files of every kind give the same rows; a bad row is named, and a bad file too."""

import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.errors import UserError
from services.prompts import reading
from services.prompts.reading import DamagedFileError, parse_block, read_blocks, read_rows

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


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl")
    path.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(UserError, match=r"rows\.jsonl cannot be read: Permission denied") as caught:
            list(read_rows(path, ["n"]))
    finally:
        os.seteuid(user)
    assert not isinstance(caught.value, DamagedFileError)


@pytest.mark.parametrize("texts", [[b"1", b"\xff", b"3"], [b"\xfe"]])
def test_a_row_of_parquet_that_is_not_utf8_is_rejected_alone(tmp_path: Path, texts: list[bytes]) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"n": pa.array(texts, pa.binary()).view(pa.string())}), path)
    rows = list(read_rows(path, ["n"]))
    assert [row.number for row in rows] == list(range(1, len(texts) + 1))
    assert [row.value["n"].encode() if row.value else row.fault for row in rows] == [
        text if text.isascii() else "not_utf8" for text in texts
    ]


def test_a_list_gives_what_stands_before_the_point_where_it_breaks_off(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"n": number} for number in range(5)])[:-9])
    rows = read_rows(path, ["n"])
    assert [next(rows).value for _ in range(4)] == [{"n": number} for number in range(4)]
    with pytest.raises(DamagedFileError, match=r"rows\.json is damaged at row 5: the list breaks off") as caught:
        next(rows)
    assert caught.value.row == 5


@pytest.mark.parametrize("text", ["[]", " [\n]", "\ufeff[ ]"])
def test_an_empty_list_has_no_rows(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    assert list(read_rows(path, [])) == []


def test_elements_of_a_list_are_cut_wherever_a_read_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "READ_BYTES", 7)
    path = tmp_path / "rows.json"
    rows = [{"text": 'a "quoted" ] , [ \\ \u00e9 \U0001f642', "n": 12345}, 17, [1], {"n": {}}]
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")
    found = list(read_rows(path, []))
    assert [row.value for row in found] == [rows[0], None, None, rows[3]]
    assert [row.fault for row in found] == [None, "not_an_object", "not_an_object", None]


def test_an_element_that_is_not_utf8_is_rejected_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b'[{"n": 1}, {"n": "\xff"}, {"n": 3}]')
    assert [(row.number, row.fault) for row in read_rows(path, ["n"])] == [(1, None), (2, "not_utf8"), (3, None)]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.parquet"])
def test_a_row_that_is_too_long_is_rejected_alone(tmp_path: Path, name: str) -> None:
    values = [{"n": "a"}, {"n": "b" * 100_000}, {"n": "c"}]
    path = tmp_path / name
    text = "".join(json.dumps(value) + "\n" for value in values).encode()
    match path.suffix:
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(values), path)
        case ".gz":
            path.write_bytes(gzip.compress(text))
        case _:
            path.write_bytes(text)
    found = [(row.number, row.fault) for row in read_rows(path, ["n"], max_row_bytes=10_000)]
    assert found == [(1, None), (2, "row_too_long"), (3, None)]


def test_an_element_that_is_too_long_ends_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "READ_BYTES", 100)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"n": 1}, {"n": "b" * 100_000}]))
    with pytest.raises(DamagedFileError, match="row 2: no JSON, or an element of more than 1,000 bytes"):
        list(read_rows(path, ["n"], max_row_bytes=1000))


def test_rows_whose_structs_differ_are_read_as_they_are(tmp_path: Path) -> None:
    rows = [{"label": {"a": [1]}, "n": 1}, {"label": None, "n": "one"}, {"label": {"b": {"c": 1}}}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row.value for row in read_rows(path, ["label"])] == rows


def test_blocks_tell_how_much_of_the_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BLOCK_ROWS", 10)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"n": number}) + "\n" for number in range(35)))
    blocks = list(read_blocks(path, ["n"]))
    positions = [block.position for block in blocks]
    assert positions == sorted(positions)
    assert positions[-1] == 1
    assert sum(len(list(parse_block(block))) for block in blocks) == 35
