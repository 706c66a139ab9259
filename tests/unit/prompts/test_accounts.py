"""The account of a source adds up, and says what a user should know."""

from pathlib import Path
from typing import Any

import pytest

from services.errors import UserError
from services.prompts.accounts import SourceCounts, bucket, total, warnings
from services.settings import SourceSettings


def source(**keys: Any) -> SourceSettings:
    return SourceSettings.model_validate(
        {
            "name": "a",
            "dataset": "owner/set",
            "revision": "main",
            "data_files": ["*"],
            "adapter": "question",
            "column": "q",
            "domain": "code",
            "quota": 5,
            **keys,
        }
    )


@pytest.mark.parametrize(("tokens", "expected"), [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_lengths_are_put_into_powers_of_two(tokens: int, expected: int) -> None:
    assert bucket(tokens) == expected


def test_rows_that_do_not_add_up_are_an_error() -> None:
    counts = SourceCounts("a", "code", 5, read=3, kept=1, held_out=1)
    with pytest.raises(UserError, match=r"source a: .* = 2, but 3 entered"):
        counts.check()
    counts.reject(Path("rows.jsonl"), 7, "not_json")
    counts.check()
    assert counts.rejected_rows == {"not_json": ["rows.jsonl row 7"]}


def test_only_some_rows_of_a_reason_are_named() -> None:
    counts = SourceCounts("a", "code", 5)
    for row in range(100):
        counts.reject(Path("rows.jsonl"), row, "not_json")
    assert counts.rejected["not_json"] == 100
    assert len(counts.rejected_rows["not_json"]) == 5


def test_a_branch_is_told_with_the_commit_that_it_was_at() -> None:
    commit = "c" * 40
    account = SourceCounts("a", "code", 5, kept=5, commit=commit).content()
    assert warnings([account], [source()]) == [f"source a: revision main may move; it was at commit {commit}"]
    assert warnings([account], [source(revision=commit)]) == []


def test_totals_are_sums_by_count_and_by_word() -> None:
    first, second = SourceCounts("a", "code", 5, read=9, kept=5), SourceCounts("b", "math", 7, read=8, kept=7)
    for counts, words in ((first, ("not_json", "empty_turn")), (second, ("not_json",))):
        for word in words:
            counts.reject(Path("rows.jsonl"), 1, word)
        counts.lengths.update({128: 2, 64: 3})
    content = total([first.content(), second.content()])
    assert (content["read"], content["kept"], content["quota"]) == (17, 12, 12)
    assert content["rejected"] == {"not_json": 2, "empty_turn": 1}
    assert list(content["lengths"].items()) == [("64", 6), ("128", 4)]
