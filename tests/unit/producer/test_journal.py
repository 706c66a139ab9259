"""A journal keeps what was finished, whatever killed its writer."""

from pathlib import Path

import pytest

from services.errors import UserError
from services.producer.journal import appending, journaled
from services.records import Completion


def _completion(prompt_id: str, *output_ids: int) -> Completion:
    return Completion(prompt_id, "completed", None, "stop", list(output_ids), 1, 0.5, "http://s")


def _append(path: Path, *completions: Completion) -> None:
    with appending(path) as append:
        for completion in completions:
            append(completion)


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "journal" / "c.jsonl"
    first, second = (
        _completion("a", 1, 2),
        Completion("b", "failed", "http 400", None, [], 1, 0.1, "http://s", "long"),
    )
    _append(path, first)
    _append(path, second)
    assert journaled(path) == {"a": first, "b": second}


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


def test_the_first_line_of_a_prompt_counts(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    with appending(path) as one, appending(path) as other:
        one(_completion("a", 1))
        other(_completion("a", 2))
        one(_completion("b", 3))
    assert [completion.output_ids for completion in journaled(path).values()] == [[1], [3]]


def test_a_full_disk_is_told_in_one_line() -> None:
    with (
        pytest.raises(UserError, match=r"/dev/full: No space left on device; free space"),
        appending(Path("/dev/full")) as append,
    ):
        append(_completion("a", 1))
