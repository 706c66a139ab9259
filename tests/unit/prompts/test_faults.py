"""Damaged rows and files: counted or refused as configured, named by file and row, and nothing prepared is lost."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from services.errors import UserError
from services.files import read_json
from services.prompts.parallel import Processes
from services.prompts.prepare import prepare_run
from services.records import read_prompts
from services.runs import Run, read_settings
from tests.unit.prompts.conftest import write_lines

PrepareRows = Callable[..., tuple[Run, dict[str, Any]]]


def questions(count: int, first: int = 0) -> list[dict[str, str]]:
    return [{"question": f"What is {number} + 1?"} for number in range(first, first + count)]


@pytest.fixture
def torn(tmp_path: Path) -> Path:
    """A list that breaks off in its fifth row."""
    path = tmp_path / "torn.json"
    path.write_text(json.dumps(questions(5))[:-9])
    return path


def test_a_file_that_breaks_off_is_counted_and_told(prepare_rows: PrepareRows, torn: Path, tmp_path: Path) -> None:
    whole = write_lines(tmp_path / "whole.jsonl", questions(3, first=50))
    files = [str(torn), str(whole)]
    _, content = prepare_rows(sources={"a": {"files": files, "quota": 7}})
    account = content["sources"]["a"]
    assert (account["read"], account["kept"]) == (8, 7)
    assert account["rejected"] == {"file_breaks_off": 1}
    assert account["rejected_rows"] == {"file_breaks_off": [f"{torn} row 5"]}
    (warning,) = content["warnings"]
    assert warning.startswith(f"source a: prompt file {torn} is damaged at row 5")


def test_a_file_that_breaks_off_may_fail_the_source_and_keeps_those_before(
    prepare_rows: PrepareRows, torn: Path, tmp_path: Path
) -> None:
    sources = {
        "a": {"rows": questions(9), "quota": 3},
        "b": {"files": [str(torn)], "quota": 3, "on_error": "fail"},
    }
    with pytest.raises(UserError, match=r"torn\.json is damaged at row 5"):
        prepare_rows(sources=sources)
    run = Run(tmp_path / "runs" / "run")
    assert len(read_prompts(run.prompts("a"))) == 3
    assert not run.prepared.exists()
    whole = {path: path.read_bytes() for path in run.root.rglob("*.parquet")}
    torn.write_text(json.dumps(questions(5, first=20)))
    _, content = prepare_rows(sources=sources)
    assert content["total"]["kept"] == 6
    assert all(path.read_bytes() == held for path, held in whole.items())


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("{torn", "not_json"),
        ({"other": 1}, "missing_column"),
        ({"question": 7}, "not_text"),
        ({"question": "x" * 3000}, "row_too_long"),
    ],
)
def test_a_damaged_row_is_rejected_or_fails_the_source(prepare_rows: PrepareRows, row: Any, told: str) -> None:
    source = {"rows": [*questions(4), row], "quota": 4}
    limit = {"max_row_bytes": 2000}
    _, content = prepare_rows("rejected", sources={"a": source}, prepare=limit)
    assert content["sources"]["a"]["rejected"] == {told: 1}
    with pytest.raises(UserError, match=rf"source a: .*a\.jsonl row 5: {told}; .* on_error"):
        prepare_rows("failed", sources={"a": {**source, "on_error": "fail"}}, prepare=limit)


def test_what_is_no_prompt_does_not_fail_a_source(prepare_rows: PrepareRows) -> None:
    source = {"rows": [*questions(4), {"question": ""}], "quota": 4, "on_error": "fail"}
    assert prepare_rows(sources={"a": source})[1]["sources"]["a"]["rejected"] == {"empty_turn": 1}


def test_a_column_that_a_parquet_file_lacks_is_an_error(prepare_rows: PrepareRows, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"query": ["1?"], "n": [1]}), path)
    with pytest.raises(UserError, match=r"rows\.parquet: no column 'question'; there are: query, n"):
        prepare_rows(sources={"a": {"files": [str(path)], "quota": 1}})


def test_the_rendering_is_recorded_and_another_one_refused(
    prepare_rows: PrepareRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    run, content = prepare_rows(sources={"a": {"rows": questions(4), "quota": 4}})
    recorded = read_json(run.record)["rendering"]
    assert recorded == {name: content[name] for name in ("thinking", "template", "tokenizer")}
    run.prepared.unlink()
    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = "{{ messages[0]['content'] }}"
        with pytest.raises(UserError, match=r"run run was begun with another target \(rendering\.template was"):
            prepare_run(run, read_settings(run), tokenizer, 1)
    finally:
        tokenizer.chat_template = template
    assert prepare_run(run, read_settings(run), tokenizer, 1) == content


def test_an_interrupted_run_compares_with_what_it_has_published(prepare_rows: PrepareRows) -> None:
    """Near duplicates of an earlier source are found after a restart as they are without one."""
    story = "The miller of the village by the old stone bridge had seven daughters and not one of them wanted to marry."
    sources = {
        "a": {"rows": [{"question": story}, *questions(4)], "quota": 5},
        "b": {"rows": [{"question": f"{story} Why?"}, *questions(4, first=50)], "quota": 5},
    }
    run, content = prepare_rows(sources=sources)
    assert content["sources"]["b"]["duplicates"] == {"near": 1}
    for lost in (run.prepared, run.prompts("b"), run.held_out("b"), run.source_prepared("b")):
        lost.unlink()
    assert prepare_rows(sources=sources)[1] == content


def double(context: int, task: int) -> int:
    return context * task


def kill_itself(context: int, task: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return task


@pytest.mark.parametrize("count", [1, 3])
def test_results_come_in_the_order_of_the_tasks(count: int) -> None:
    taken = []

    def tasks() -> Iterator[int]:
        for task in range(100):
            taken.append(task)
            yield task

    with Processes(2, count) as processes:
        results = processes.map(double, tasks())
        assert next(results) == 0
        assert len(taken) < 12, "tasks are taken as they are needed"
        assert list(results) == [2 * task for task in range(1, 100)]


def test_a_killed_process_is_told() -> None:
    with Processes(2, 2) as processes, pytest.raises(UserError, match="a process that prepares prompts was killed"):
        list(processes.map(kill_itself, range(4)))
