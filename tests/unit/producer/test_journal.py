"""A journal keeps what was finished, whatever killed its writer, and has one writer at a time."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.ledger import JournalCounter
from services.producer.journal import Journal, hold, journaled
from services.records import Completion

HOLD = """
import sys
from pathlib import Path
from services.producer.journal import hold

with hold(Path(sys.argv[1])) as journal:
    print("held" if journal else "busy", flush=True)
    sys.stdin.read()
"""


def _completion(prompt_id: str, *output_ids: int) -> Completion:
    return Completion(prompt_id, "completed", None, "stop", list(output_ids), 1, 0.5, "http://s")


def _append(path: Path, *completions: Completion) -> None:
    with hold(path) as journal:
        assert journal
        for completion in completions:
            journal.append(completion)


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "journal" / "c.jsonl"
    first, second = (
        _completion("a", 1, 2),
        Completion("b", "failed", "http 400", None, [], 1, 0.1, "http://s", "long"),
    )
    _append(path, first)
    _append(path, second)
    assert journaled(path) == {"a": first, "b": second}
    with hold(path) as journal:
        assert journal
        assert journal.finished == {"a", "b"}


def test_a_missing_journal_holds_nothing(tmp_path: Path) -> None:
    assert journaled(tmp_path / "c.jsonl") == {}


@pytest.mark.parametrize("kept", [1, 10, -2, -1])
def test_a_torn_line_is_lost_and_harms_no_other(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "c.jsonl"
    _append(path, _completion("a", 1))
    whole = path.read_bytes()
    _append(path, _completion("b", 2))
    torn = path.read_bytes()[len(whole) :][:kept]
    path.write_bytes(whole + torn)

    _append(path, _completion("b", 3), _completion("c", 4))

    answers = {prompt_id: completion.output_ids for prompt_id, completion in journaled(path).items()}
    # A line that lacks only its newline is whole.
    assert answers == {"a": [1], "b": [2] if kept == -1 else [3], "c": [4]}


def test_lost_connections_are_remembered_and_are_no_answers(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    with hold(path) as journal:
        assert journal
        journal.note_lost("a", "http://s")
        journal.note_lost("a", "http://t")
    with hold(path) as journal:
        assert journal
        assert journal.lost["a"] == 2
        assert journal.finished == set()
    assert journaled(path) == {}


def test_one_process_holds_a_journal_and_a_kill_frees_it(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", HOLD, str(path)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert holder.stdout
    assert holder.stdout.readline() == "held\n"
    with hold(path) as journal:
        assert journal is None
    holder.kill()
    holder.wait()
    with hold(path) as journal:
        assert journal is not None
    holder.stdout.close()


def test_a_journal_that_was_removed_with_its_chunk_published_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    path.unlink()
    with hold(path) as journal:
        assert journal is not None
        assert os.fstat(journal.descriptor).st_ino == path.stat().st_ino
    os.close(descriptor)


def test_a_full_disk_takes_no_part_of_a_line() -> None:
    descriptor = os.open("/dev/full", os.O_RDWR)
    journal = Journal(Path("/dev/full"), descriptor)
    with pytest.raises(OSError, match="No space left") as caught:
        journal.append(_completion("a", 1))
    os.close(descriptor)
    assert caught.value.errno == errno.ENOSPC
    assert journal.finished == set()


def test_a_growing_journal_is_counted_as_far_as_it_grew(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    counter = JournalCounter(path)
    assert not counter.update()
    _append(path, _completion("a", 1, 2, 3), Completion("b", "rejected", "empty answer", "stop", [2], 1, 0.1, "s"))
    assert counter.update()
    assert (counter.prompt_ids, counter.output_tokens) == ({"a", "b"}, 3)
    with path.open("ab") as file:
        file.write(b'{"prompt_id":"d","status":"comple')
    _append(path, _completion("c", 4), Completion("e", "completed", None, "stop", [], 1, 0.1, "s"))
    assert counter.update()
    assert (counter.prompt_ids, counter.output_tokens) == ({"a", "b", "c", "e"}, 4)
