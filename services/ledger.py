"""What became of every prompt, counted from a run's files: correct at any moment, whatever Redis knows."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from services.errors import UserError
from services.records import Chunk
from services.runs import Run, publish_json, read_json
from services.settings import Settings


@dataclass
class GenerateCounts:
    """Prompts by what became of them; `in_journal` are finished answers of chunks that are not."""

    prompts: int = 0
    completed: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0
    chunks: int = 0
    chunks_done: int = 0
    in_journal: int = 0

    @property
    def finished(self) -> int:
        return self.completed + self.rejected.total() + self.failed.total()

    @property
    def waiting(self) -> int:
        return self.prompts - self.finished - self.in_journal


def plan_chunks(run: Run, settings: Settings) -> list[Chunk]:
    """Cut the prepared prompts into chunks, source by source, and publish them: equal prompts give equal chunks.

    Raises:
        UserError: the prompts are not prepared.
    """
    if not run.prepared.is_file():
        raise UserError(
            f"run {run.name} has no {run.prepared}; its prompts are not prepared, see `dflash-stack prepare`"
        )
    size = settings.generate.chunk_size
    planned = [
        Chunk(f"{source.name}-{first // size:05d}", source.name, first, min(size, prompts - first))
        for source in settings.sources
        for prompts in [pq.read_metadata(run.prompts(source.name)).num_rows]
        for first in range(0, prompts, size)
    ]
    publish_json(run.chunks, {"chunks": [asdict(chunk) for chunk in planned]})
    return read_chunks(run)


def read_chunks(run: Run) -> list[Chunk]:
    """The run's chunks, in order; empty before `submit`."""
    if not run.chunks.is_file():
        return []
    return [Chunk(**chunk) for chunk in read_json(run.chunks)["chunks"]]


def find_chunk(run: Run, name: str) -> Chunk:
    """Raises UserError when the run has no such chunk."""
    for chunk in read_chunks(run):
        if chunk.chunk == name:
            return chunk
    raise UserError(f"run {run.name} has no chunk {name!r} in {run.chunks}; enqueue with `dflash-stack submit`")


def count_generated(run: Run) -> dict[str, GenerateCounts]:
    """Counts by source, from the published completions and the journals of unfinished chunks."""
    counts: dict[str, GenerateCounts] = {}
    for chunk in read_chunks(run):
        of_source = counts.setdefault(chunk.source, GenerateCounts())
        of_source.chunks += 1
        of_source.prompts += chunk.count
        path = run.completions(chunk.chunk)
        if path.is_file():
            of_source.chunks_done += 1
            _add_completions(path, of_source)
        else:
            journal = run.journal(chunk.chunk)
            answers = list(read_journal(journal).values())
            of_source.in_journal += len(answers)
            of_source.output_tokens += sum(
                len(answer["output_ids"]) for answer in answers if answer["status"] == "completed"
            )
    return counts


def read_journal(path: Path) -> dict[str, dict[str, Any]]:
    """Finished answers of an unfinished chunk by prompt id; a line cut off by a kill is not counted."""
    answers: dict[str, dict[str, Any]] = {}
    if not path.is_file():
        return answers
    for line in path.read_bytes().split(b"\n"):
        try:
            answer = json.loads(line)
            answers.setdefault(answer["prompt_id"], answer)
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError):
            continue
    return answers


def count_assembled(run: Run) -> dict[str, dict[str, Any]]:
    """By chunk, what assembling published: samples, tokens, supervised tokens and drops by reason."""
    return {
        chunk.chunk: read_json(run.assembled(chunk.chunk))
        for chunk in read_chunks(run)
        if run.assembled(chunk.chunk).is_file()
    }


def check_balance(what: str, expected: int, parts: dict[str, int]) -> None:
    """Raises UserError when the parts do not add up to what the stage before handed on."""
    if expected != sum(parts.values()):
        listed = " + ".join(f"{count} {name}" for name, count in parts.items())
        raise UserError(f"{what}: {listed} = {sum(parts.values())}, but {expected} entered; the run's files disagree")


def _add_completions(path: Path, counts: GenerateCounts) -> None:
    table = pq.read_table(path, columns=["status", "reason", "output_ids"])
    lengths = table["output_ids"].combine_chunks().value_lengths().to_pylist()
    for status, reason, length in zip(table["status"].to_pylist(), table["reason"].to_pylist(), lengths, strict=True):
        if status == "completed":
            counts.completed += 1
            counts.output_tokens += length
        elif status == "rejected":
            counts.rejected[reason] += 1
        else:
            counts.failed[reason] += 1
