"""Records come back from their files as they were written."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from services.records import (
    ROW_GROUP_SIZE,
    Completion,
    Prompt,
    read_completions,
    read_origin,
    read_prompts,
    write_completions,
    write_prompts,
)

PROMPTS = [
    Prompt("a", "questions", '[{"role": "user", "content": "größer 🙂"}]', None, [1, 2, 3]),
    Prompt("b", "questions", "[]", '[{"type": "function"}]', [2**31 - 1]),
    Prompt("c", "questions", "[]", None, []),
]


def test_prompts_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    write_prompts(path, PROMPTS)
    assert read_prompts(path) == PROMPTS
    assert read_prompts(path, first=1, count=1) == PROMPTS[1:2]
    assert read_prompts(path, first=2) == PROMPTS[2:]


def test_no_prompts_are_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    write_prompts(path, [])
    assert read_prompts(path) == []


def test_completions_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "completions.parquet"
    completions = [
        Completion("a", "completed", None, "stop", [5, 6], 1, 0.5, "http://127.0.0.1:1"),
        Completion("b", "failed", "timeout", None, [], 4, 2.0, None),
    ]
    write_completions(path, completions)
    assert read_completions(path) == completions


def test_a_slice_of_many_prompts_is_read_without_the_others(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    prompts = [Prompt(f"p{number}", "s", "[]", None, [number]) for number in range(2500)]
    write_prompts(path, prompts)
    for first, count in ((0, 10), (1020, 10), (1024, 1024), (2490, 10), (2490, 20), (0, 2500), (7, None)):
        expected = prompts[first:] if count is None else prompts[first : first + count]
        assert read_prompts(path, first, count) == expected


def test_completions_carry_how_they_came_about(tmp_path: Path) -> None:
    path = tmp_path / "completions.parquet"
    origin = {"model": "target", "sampling": {"temperature": 0.6}}
    write_completions(path, [], origin)
    assert read_origin(path) == origin
    assert read_completions(path) == []


def test_a_chunks_prompts_are_read_without_the_rest_of_the_source(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    prompts = [Prompt(f"p{number}", "questions", "[]", None, [number]) for number in range(5 * ROW_GROUP_SIZE)]
    write_prompts(path, prompts)
    with pq.ParquetFile(path) as file:
        group = file.metadata.row_group(4)
    # The last group's pages are damaged: whoever reads them fails.
    content = bytearray(path.read_bytes())
    begin = group.column(0).dictionary_page_offset or group.column(0).data_page_offset
    content[begin : begin + group.column(0).total_compressed_size] = bytes(group.column(0).total_compressed_size)
    path.write_bytes(content)
    first = 2 * ROW_GROUP_SIZE - 3
    assert read_prompts(path, first, ROW_GROUP_SIZE + 6) == prompts[first : first + ROW_GROUP_SIZE + 6]
    with pytest.raises(OSError, match=r"read|header|page|decod|deserializ"):
        read_prompts(path, 4 * ROW_GROUP_SIZE, 1)
