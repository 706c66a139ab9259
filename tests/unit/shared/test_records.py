"""Records come back from their files as they were written."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from services.records import (
    PROMPTS_A_ROW_GROUP,
    Completion,
    Prompt,
    read_completions,
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


def test_a_chunks_prompts_are_read_without_the_rest_of_the_source(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    prompts = [Prompt(f"p{number}", "questions", "[]", None, [number]) for number in range(5 * PROMPTS_A_ROW_GROUP)]
    write_prompts(path, prompts)
    with pq.ParquetFile(path) as file:
        group = file.metadata.row_group(4)
    # The last group's pages are damaged: whoever reads them fails.
    content = bytearray(path.read_bytes())
    begin = group.column(0).dictionary_page_offset or group.column(0).data_page_offset
    content[begin : begin + group.column(0).total_compressed_size] = bytes(group.column(0).total_compressed_size)
    path.write_bytes(content)
    first = 2 * PROMPTS_A_ROW_GROUP - 3
    assert read_prompts(path, first, PROMPTS_A_ROW_GROUP + 6) == prompts[first : first + PROMPTS_A_ROW_GROUP + 6]
    with pytest.raises(OSError, match=r"read|header|page|decod|deserializ"):
        read_prompts(path, 4 * PROMPTS_A_ROW_GROUP, 1)
