"""What is in use, what a rollback goes back to and what was interrupted follow from releases.jsonl."""

from pathlib import Path

import pytest

from services.errors import UserError
from services.stack.operate.history import history_table
from services.stack.operate.releases import (
    Action,
    Entry,
    Event,
    Release,
    append,
    earlier,
    interrupted,
    measured,
    operating,
    read_entries,
)


def change(event: Event, action: Action, before: str, to: str, role: str = "trainer") -> Entry:
    return Entry("2026-01-01T00:00:00+00:00", event, action, role, Release(f"sha256:{to}", to), Release(before, before))


def back_to(entries: list[Entry]) -> str | None:
    back = earlier(entries, "trainer")
    return back.image if back else None


def test_entries_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "releases.jsonl"
    release = Release("sha256:abc", "trainer:cpu", "cpu", {"torch": "2.13.0+cpu", "cuda": "none"})
    written = [
        Entry("t", "measured", "measure", "trainer", release, budget={"card 0": {"import": 7}}),
        Entry("t", "begun", "swap", "trainer", release, release, {"trainer": 1}, "x", why="faster"),
    ]
    for entry in written:
        append(path, entry)
    assert read_entries(path) == written
    assert measured(read_entries(path), "sha256:abc") == {"card 0": {"import": 7}}
    assert measured(read_entries(path), "sha256:other") is None


def test_rollbacks_go_back_one_swap_each() -> None:
    entries = [change("done", "swap", "a", "b"), change("done", "swap", "b", "c")]
    assert back_to(entries) == "b"
    entries.append(change("done", "rollback", "c", "b"))
    assert back_to(entries) == "a"
    entries.append(change("undone", "swap", "b", "d"))
    assert back_to(entries) == "a"
    entries.append(change("done", "rollback", "b", "a"))
    assert back_to(entries) is None
    assert earlier(entries, "producer") is None


def test_a_change_without_an_end_was_interrupted() -> None:
    begun = change("begun", "swap", "a", "b")
    assert interrupted([]) is None
    assert interrupted([begun]) is begun
    measuring = Entry("t", "measured", "measure", "trainer", begun.to, budget={})
    assert interrupted([begun, measuring]) is begun
    assert interrupted([begun, change("undone", "swap", "a", "b")]) is None


def test_a_line_cut_short_by_a_crash_is_none_and_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "releases.jsonl"
    append(path, change("done", "swap", "a", "b"))
    with path.open("a") as file:
        file.write('{"when": "2026-')
    assert len(read_entries(path)) == 1
    append(path, change("done", "swap", "b", "c"))
    assert [entry.to.image for entry in read_entries(path)] == ["sha256:b", "sha256:c"]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "releases.jsonl"
    append(path, change("done", "swap", "a", "b"))
    path.write_text("{}\n" + path.read_text())
    with pytest.raises(UserError, match="line 1: it is damaged"):
        read_entries(path)


def test_one_command_at_a_time_changes_a_stack(tmp_path: Path) -> None:
    path = tmp_path / "releases.jsonl"
    with operating(path), pytest.raises(UserError, match="another command is changing this stack"), operating(path):
        pass
    with operating(path):
        pass


def test_history_has_a_row_for_each_change_and_one_for_an_interrupted_one() -> None:
    entries = [
        change("begun", "swap", "z", "a"),
        change("done", "swap", "z", "a"),
        change("done", "swap", "y", "x", role="producer"),
        change("done", "swap", "a", "b"),
        change("begun", "swap", "b", "c"),
        change("undone", "swap", "b", "c"),
        change("begun", "rollback", "b", "a"),
    ]
    table = history_table(entries)
    ended = next(column for column in table.columns if column.header == "ended")
    assert list(ended.cells) == ["replaced", "in use", "in use", "undone", "interrupted"]
