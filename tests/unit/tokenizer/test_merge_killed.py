"""A merge killed at any moment leaves the base as it was, and a dataset that is whole or not there."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from services.files import read_json
from services.runs import Run
from services.settings import Settings
from services.tokenizer.assemble import assemble_chunk
from services.tokenizer.merge import merge_runs, verify_dataset

EVENTS_BETWEEN_KILLS = 211


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def merge_killed_at(event: int, arguments: tuple[Any, ...]) -> bool:
    """Merge in a child that kills itself at its `event`-th call or return; returns whether it got to the end."""
    child = os.fork()
    if child == 0:
        left = event

        def count(*_: object) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(count)
        try:
            merge_runs(*arguments, verify=True)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFEXITED(status)


def test_a_merge_killed_at_any_moment_is_taken_up_and_the_base_is_untouched(
    make_generated: Any, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    rows = [{"input_ids": [40, 41, n], "loss_mask": [0, 1, 1], "seq_len": 3} for n in range(6)]
    datasets.Dataset.from_list(rows).save_to_disk(base, num_shards=2)
    answers: list[dict[str, Any]] = [{"output_ids": [7, n]} for n in range(3)]
    run, settings = _assembled(make_generated, answers)
    base_before, run_before = content(base), content(run.root)
    dataset = tmp_path / "merged"

    kills = 0
    while not merge_killed_at(1 + kills * EVENTS_BETWEEN_KILLS, ([run], base, dataset, settings)):
        kills += 1
        assert content(base) == base_before
        assert content(run.root) == run_before
        if dataset.exists():
            assert verify_dataset(dataset).samples == 9
            break
    assert kills > 20, kills

    account = merge_runs([run], base, dataset, settings, verify=True)
    assert account == read_json(dataset / "merge.json")
    assert len(datasets.load_from_disk(str(dataset))) == 9
    assert content(base) == base_before
    left = [path for folder in (tmp_path, run.root.parent / ".indexes") for path in folder.glob(".*.tmp")]
    assert left == []


@pytest.mark.parametrize("kept", ["index", "nothing"])
def test_a_second_merge_of_the_same_changes_nothing(make_generated: Any, tmp_path: Path, kept: str) -> None:
    run, settings = _assembled(make_generated, [{"output_ids": [7, 8]}])
    first = merge_runs([run], None, tmp_path / "merged", settings, verify=True)
    before = content(tmp_path / "merged")
    if kept == "nothing":
        for path in run.root.glob("samples/*"):
            path.unlink()
    assert merge_runs([run], None, tmp_path / "merged", settings, verify=True) == first
    assert content(tmp_path / "merged") == before


def _assembled(make_generated: Any, answers: list[dict[str, Any]]) -> tuple[Run, Settings]:
    run, settings = make_generated(*answers)
    for chunk in read_json(run.chunks)["chunks"]:
        assemble_chunk(run, settings, chunk["chunk"])
    return run, settings
