"""The ledger counts from files, at any moment, and says when they disagree."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from services.chunks import Chunk, find_chunk, plan_chunks, read_chunks
from services.errors import UserError
from services.files import publish, publish_json, read_json
from services.ledger import GenerateCounter, check_balance, count_generated, total
from services.records import Completion, Prompt, summarize, write_completions, write_prompts
from services.runs import Run, create_run
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


def journal_line(completion: Completion) -> str:
    fields = dict(vars(completion))
    fields["output_ids"] = fields.pop("output_ids")
    return json.dumps(fields, separators=(",", ":")) + "\n"


def publish_chunk(run: Run, chunk: Chunk, completions: list[Completion]) -> None:
    path = run.completions(chunk.chunk)
    publish(path, lambda temporary: write_completions(temporary, completions, {"model": "target"}))
    publish_json(run.summary(chunk.chunk), summarize(path))


MIXED = [answer("prompt-0"), answer("prompt-1", "rejected", "loop"), answer("prompt-2", "failed", "timeout")]


def test_counts_come_from_published_completions_and_from_journals(run: Run, settings: Settings) -> None:
    first, second, _ = plan_chunks(run, settings)
    publish_chunk(run, first, MIXED)
    journal = run.journal(second.chunk)
    journal.parent.mkdir()
    line = journal_line(answer("prompt-3"))
    journal.write_text(line + line + '{"prompt_id":"prompt-4","lost":"http://s"}\n{"prompt_id":"prompt-5","outp')

    counts = count_generated(run)["questions"]
    assert (counts.prompts, counts.chunks, counts.chunks_done) == (7, 3, 1)
    assert (counts.completed, counts.rejected, counts.failed) == (1, Counter(loop=1), Counter(timeout=1))
    assert (counts.finished, counts.in_journal, counts.waiting) == (3, 1, 3)
    assert counts.output_tokens == 3 + 3


def test_a_chunk_whose_summary_is_not_there_yet_is_counted_all_the_same(run: Run, settings: Settings) -> None:
    first = plan_chunks(run, settings)[0]
    publish(run.completions(first.chunk), lambda path: write_completions(path, MIXED))
    without = count_generated(run)
    publish_json(run.summary(first.chunk), summarize(run.completions(first.chunk)))
    assert count_generated(run) == without


def test_counting_again_sees_what_came_since(run: Run, settings: Settings) -> None:
    first, second, _ = plan_chunks(run, settings)
    counter = GenerateCounter(run)
    assert counter.count()["questions"].waiting == 7
    journal = run.journal(first.chunk)
    journal.parent.mkdir()
    seen = []
    for number in range(3):
        with journal.open("a") as file:
            file.write(journal_line(answer(f"prompt-{number}")))
        seen.append(counter.count()["questions"].in_journal)
    assert seen == [1, 2, 3]
    publish_chunk(run, first, MIXED)
    journal.unlink()
    publish_chunk(run, second, [answer(f"prompt-{number}") for number in range(3, 6)])
    counts = counter.count()["questions"]
    assert (counts.finished, counts.in_journal, counts.waiting) == (6, 0, 1)


def test_a_summary_says_what_its_chunk_holds(run: Run, settings: Settings) -> None:
    first = plan_chunks(run, settings)[0]
    publish_chunk(run, first, MIXED)
    summary = read_json(run.summary(first.chunk))
    content = run.completions(first.chunk).read_bytes()
    assert summary["sha256"] == hashlib.sha256(content).hexdigest()
    assert summary["bytes"] == len(content)
    assert summary["origin"] == {"model": "target"}
    assert (summary["completed"], summary["rejected"], summary["failed"]) == (1, {"loop": 1}, {"timeout": 1})
    assert summary["output_tokens"] == 3


def test_sources_add_up(run: Run, settings: Settings) -> None:
    plan_chunks(run, settings)
    counts = count_generated(run)["questions"]
    both = total([counts, counts])
    assert (both.prompts, both.chunks, both.waiting) == (14, 6, 14)


def test_numbers_that_do_not_add_up_are_told(tmp_path: Path) -> None:
    check_balance("chunk x", 3, {"samples": 2, "dropped": 1})
    with pytest.raises(UserError, match=r"chunk x: 2 samples \+ 2 dropped = 4, but 3 entered"):
        check_balance("chunk x", 3, {"samples": 2, "dropped": 2})
