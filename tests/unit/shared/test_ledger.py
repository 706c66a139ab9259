"""The ledger counts from files, at any moment, and says when they disagree."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from services.errors import UserError
from services.ledger import check_balance, count_generated, find_chunk, plan_chunks, read_chunks, read_journal
from services.records import Completion, Prompt, write_completions, write_prompts
from services.runs import Run, create_run, publish, publish_json
from services.settings import Settings


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"prompt-{number}", "questions", "[]", None, [1, 2]) for number in range(count)]


@pytest.fixture
def settings(make_settings: Callable[..., Settings]) -> Settings:
    return make_settings()


@pytest.fixture
def run(tmp_path: Path, settings: Settings) -> Run:
    """A run with 7 prompts, in chunks of 3."""
    run = create_run(tmp_path, "first", settings)
    publish(run.prompts("questions"), lambda path: write_prompts(path, prompts(7)))
    publish_json(run.prepared, {})
    return run


def answer(prompt_id: str, status: str = "completed", reason: str | None = None) -> Completion:
    output_ids = [7, 8, 9] if status == "completed" else []
    return Completion(prompt_id, status, reason, "stop", output_ids, 1, 0.1, None)  # type: ignore[arg-type]


def test_chunks_cover_every_prompt_once_and_are_planned_once(run: Run, settings: Settings) -> None:
    chunks = plan_chunks(run, settings)
    assert [chunk.chunk for chunk in chunks] == ["questions-00000", "questions-00001", "questions-00002"]
    covered = [row for chunk in chunks for row in range(chunk.first, chunk.first + chunk.count)]
    assert covered == list(range(7))
    other_size = settings.model_copy(update={"generate": settings.generate.model_copy(update={"chunk_size": 1})})
    assert plan_chunks(run, other_size) == chunks == read_chunks(run)


def test_chunks_are_not_planned_before_the_prompts_are_prepared(run: Run, settings: Settings) -> None:
    run.prepared.unlink()
    with pytest.raises(UserError, match="not prepared"):
        plan_chunks(run, settings)
    assert read_chunks(run) == []


def test_an_unknown_chunk_is_named(run: Run, settings: Settings) -> None:
    plan_chunks(run, settings)
    assert find_chunk(run, "questions-00002").count == 1
    with pytest.raises(UserError, match="questions-00009"):
        find_chunk(run, "questions-00009")


def test_counts_come_from_published_completions_and_from_journals(run: Run, settings: Settings) -> None:
    plan_chunks(run, settings)
    completions = [
        answer("prompt-0"),
        answer("prompt-1", "rejected", "loop"),
        answer("prompt-2", "failed", "timeout"),
    ]
    publish(run.completions("questions-00000"), lambda path: write_completions(path, completions))
    journal = run.journal("questions-00001")
    journal.parent.mkdir()
    line = json.dumps(vars(answer("prompt-3")))
    journal.write_text(f"{line}\n{line}\n" + '{"prompt_id": "prompt-4", "outp')

    counts = count_generated(run)["questions"]
    assert (counts.prompts, counts.chunks, counts.chunks_done) == (7, 3, 1)
    assert (counts.completed, counts.rejected, counts.failed) == (1, Counter(loop=1), Counter(timeout=1))
    assert (counts.finished, counts.in_journal, counts.waiting) == (3, 1, 3)
    assert counts.output_tokens == 3 + 3


def test_a_journal_survives_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    whole = json.dumps({"prompt_id": "a", "text": "größer"}, ensure_ascii=False).encode()
    for cut in range(len(whole)):
        journal.write_bytes(b'{"prompt_id": "first"}\n' + whole[:cut])
        assert list(read_journal(journal)) == ["first"]
    # What is written after the torn line, on a line of its own, counts.
    journal.write_bytes(whole[:9] + b"\n" + whole + b"\n")
    assert list(read_journal(journal)) == ["a"]


def test_numbers_that_do_not_add_up_are_told(tmp_path: Path) -> None:
    check_balance("chunk x", 3, {"samples": 2, "dropped": 1})
    with pytest.raises(UserError, match=r"chunk x: 2 samples \+ 2 dropped = 4, but 3 entered"):
        check_balance("chunk x", 3, {"samples": 2, "dropped": 2})
