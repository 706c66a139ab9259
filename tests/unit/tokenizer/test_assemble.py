"""A sample is prompt ids and generated ids as they were; every completion is accounted for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from services.chunks import plan_chunks
from services.errors import UserError
from services.files import read_json
from services.ledger import count_assembled
from services.records import PROVENANCE_SCHEMA, SAMPLE_SCHEMA, read_completions, write_completions
from services.runs import Run
from services.settings import Settings
from services.target import model_fingerprint
from services.tokenizer.assemble import assemble_chunk
from services.tokenizer.jobs import assemble

Generated = Callable[..., tuple[Run, Settings]]

CHUNK = "questions-00000"


def samples(run: Run, chunk: str = CHUNK) -> list[dict[str, Any]]:
    with pa.ipc.open_stream(str(run.samples(chunk))) as reader:
        table = reader.read_all()
    assert table.schema == SAMPLE_SCHEMA
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def rewrite_completions(run: Run, change: Any) -> None:
    path = run.completions(CHUNK)
    rows = change(read_completions(path))
    path.unlink()
    write_completions(path, rows)


def test_a_sample_is_the_prompts_ids_and_the_generated_ids(make_generated: Generated) -> None:
    run, settings = make_generated({"output_ids": [7, 8, 9]}, {"output_ids": [5]})
    assemble_chunk(run, settings, CHUNK)
    assert samples(run) == [
        {"input_ids": [1, 2, 0, 7, 8, 9], "loss_mask": [0, 0, 0, 1, 1, 1], "seq_len": 6},
        {"input_ids": [1, 2, 1, 5], "loss_mask": [0, 0, 0, 1], "seq_len": 4},
    ]
    provenance = pa.ipc.open_stream(run.provenance(CHUNK).read_bytes()).read_all()
    assert provenance.schema == PROVENANCE_SCHEMA
    common = {
        "source": "questions",
        "domain": "general",
        "thinking": None,
        "finish_reason": "stop",
        "model": model_fingerprint(settings.target.path),
        "template": "a template",
    }
    assert provenance.to_pylist() == [
        {"prompt_id": "p0", "tokens": 6, "supervised_tokens": 3, **common},
        {"prompt_id": "p1", "tokens": 4, "supervised_tokens": 1, **common},
    ]


def test_every_completion_is_accounted_for(make_generated: Generated) -> None:
    answers: list[dict[str, Any]] = [
        {},
        {"finish_reason": "length"},
        {"status": "rejected", "reason": "loop"},
        {"status": "failed", "reason": "timeout", "output_ids": []},
        {"output_ids": []},
        {"output_ids": [7] * 20},
    ]
    run, settings = make_generated(*answers, assemble={"max_length": 10})
    for chunk in plan_chunks(run, settings):
        assemble_chunk(run, settings, chunk.chunk)
    first, second = count_assembled(run).values()
    assert first == {
        "chunk": CHUNK,
        "source": "questions",
        "completions": 3,
        "completed": 2,
        "rejected": 1,
        "failed": 0,
        "samples": 2,
        "dropped": {},
        "truncated": 1,
        "shortened": 0,
        "tokens": 10,
        "supervised_tokens": 4,
    }
    assert second["failed"] == 1
    assert second["completed"] == 2
    assert second["dropped"] == {"no_supervised_token": 1, "over_length": 1}
    assert samples(run, "questions-00001") == []


def test_an_over_long_sample_loses_the_beginning_of_its_prompt_where_that_is_the_policy(
    make_generated: Generated,
) -> None:
    answers = [{"output_ids": [7, 8]}, {"output_ids": [7, 8, 9]}, {"output_ids": [5, 6, 7, 8]}]
    run, settings = make_generated(*answers, assemble={"max_length": 4, "over_length": "keep_tail"})
    assemble_chunk(run, settings, CHUNK)
    assert samples(run) == [
        {"input_ids": [2, 0, 7, 8], "loss_mask": [0, 0, 1, 1], "seq_len": 4},
        {"input_ids": [1, 7, 8, 9], "loss_mask": [0, 1, 1, 1], "seq_len": 4},
    ]
    counts = count_assembled(run)[CHUNK]
    assert (counts["shortened"], counts["dropped"]) == (2, {"over_length": 1})


def test_a_large_chunk_is_written_in_several_batches(
    make_generated: Generated, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, settings = make_generated({"output_ids": [7]}, {"output_ids": [8]}, {"output_ids": [9]})
    monkeypatch.setattr("services.tokenizer.assemble.TOKENS_A_BATCH", 8)
    assemble_chunk(run, settings, CHUNK)
    with pa.ipc.open_stream(str(run.samples(CHUNK))) as reader:
        assert [batch.num_rows for batch in reader] == [2, 1]
    assert [row["input_ids"] for row in samples(run)] == [[1, 2, 0, 7], [1, 2, 1, 8], [1, 2, 2, 9]]


def test_answers_in_another_order_give_the_same_samples(make_generated: Generated) -> None:
    run, settings = make_generated({"output_ids": [7]}, {"output_ids": [8]}, {"output_ids": [9]})
    rewrite_completions(run, lambda rows: rows[::-1])
    assemble_chunk(run, settings, CHUNK)
    assert [row["input_ids"] for row in samples(run)] == [[1, 2, 0, 7], [1, 2, 1, 8], [1, 2, 2, 9]]


def test_an_id_outside_the_vocabulary_is_refused(make_generated: Generated) -> None:
    run, settings = make_generated({"output_ids": [49_152]})
    with pytest.raises(UserError, match=r"prompt p0: id 49152 is outside the vocabulary of 49152"):
        assemble_chunk(run, settings, CHUNK)
    assert not run.assembled(CHUNK).exists()


def test_a_tokenizer_other_than_the_runs_is_refused(make_generated: Generated) -> None:
    run, settings = make_generated({})
    run.prepared.write_text(json.dumps({"tokenizer": "another"}))
    with pytest.raises(UserError, match="is not the one that run run was prepared with"):
        assemble_chunk(run, settings, CHUNK)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda rows: rows[1:], "1 prompts of the chunk have no answer"),
        (lambda rows: [*rows, rows[0]], "prompt p0 is answered twice"),
        (
            lambda rows: [*rows, type(rows[0])("other", *list(vars(rows[0]).values())[1:])],
            "other is not of this chunk",
        ),
    ],
)
def test_answers_that_are_not_the_chunks_are_refused(make_generated: Generated, change: Any, told: str) -> None:
    run, settings = make_generated({}, {}, {})
    rewrite_completions(run, change)
    with pytest.raises(UserError, match=told):
        assemble_chunk(run, settings, CHUNK)


def test_a_chunk_that_is_not_generated_is_named(make_generated: Generated) -> None:
    run, settings = make_generated({})
    run.completions(CHUNK).unlink()
    with pytest.raises(UserError, match=rf"chunk {CHUNK} of run run .* not generated yet"):
        assemble_chunk(run, settings, CHUNK)


def test_the_job_runs_twice_and_after_a_kill_and_changes_nothing(
    make_generated: Generated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = make_generated({}, {})
    monkeypatch.setenv("DFLASH_RUNS", str(tmp_path / "runs"))
    assemble("run", CHUNK)
    content, rows = read_json(run.assembled(CHUNK)), samples(run)
    assemble("run", CHUNK)
    # Killed before its last file was published.
    run.assembled(CHUNK).unlink()
    run.provenance(CHUNK).unlink()
    assemble("run", CHUNK)
    assert (read_json(run.assembled(CHUNK)), samples(run)) == (content, rows)
