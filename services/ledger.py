"""What became of every prompt, counted from a run's files: correct at any moment, whatever Redis knows."""

import json
import os
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.chunks import Chunk, read_chunks
from services.errors import UserError
from services.files import read_json
from services.runs import Run

# In a journal's line, what stands before the generated ids, which are its last field.
JOURNAL_IDS = b',"output_ids":['


@dataclass
class GenerateCounts:
    """Prompts by what became of them; `in_journal` are finished answers of chunks that are not.

    `attempts` are the requests that were sent for all of these.
    """

    prompts: int = 0
    completed: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    output_tokens: int = 0
    attempts: int = 0
    chunks: int = 0
    chunks_done: int = 0
    in_journal: int = 0

    @property
    def finished(self) -> int:
        return self.completed + self.rejected.total() + self.failed.total()

    @property
    def waiting(self) -> int:
        return self.prompts - self.finished - self.in_journal

    def add_summary(self, summary: dict[str, Any]) -> None:
        """Add a published chunk, as its summary tells it."""
        self.chunks_done += 1
        self.completed += summary["completed"]
        self.output_tokens += summary["output_tokens"]
        # A summary that an earlier version published tells none.
        self.attempts += summary.get("attempts", 0)
        for counter, counts in ((self.rejected, summary["rejected"]), (self.failed, summary["failed"])):
            if counts:
                counter.update(counts)

    def add(self, other: "GenerateCounts") -> None:
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class GenerateCounter:
    """Counts a run's answers again and again: published summaries are read once, journals as far as they grew."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._chunks: list[Chunk] = []
        self._summaries: dict[str, dict[str, Any]] = {}
        self._journals: dict[str, JournalCounter] = {}

    def count(self, only: Collection[str] | None = None) -> dict[str, GenerateCounts]:
        """Counts by source, from the published completions and the journals of unfinished chunks.

        `only`: names of the chunks that are counted; None: all.
        """
        # The plan is published once, so it never changes after it is there.
        self._chunks = self._chunks or read_chunks(self._run)
        # Listed in this order: a chunk that is published meanwhile is in one of the two at least.
        journals = file_names(self._run.root / "journal")
        published = file_names(self._run.root / "completions")
        counts: dict[str, GenerateCounts] = {}
        for chunk in self._chunks:
            if only is not None and chunk.chunk not in only:
                continue
            of_source = counts.setdefault(chunk.source, GenerateCounts())
            of_source.chunks += 1
            of_source.prompts += chunk.count
            name = chunk.chunk
            summary = self._summaries.get(name)
            if summary is None and (f"{name}.json" in published or f"{name}.parquet" in published):
                summary = self._summary(name)
            if summary is None and f"{name}.jsonl" in journals:
                journal = self._journals.setdefault(name, JournalCounter(self._run.journal(name)))
                # A journal that is gone may have been published since the summary was looked for.
                summary = None if journal.update() else self._summary(name)
                if summary is None:
                    of_source.in_journal += len(journal.prompt_ids)
                    of_source.output_tokens += journal.output_tokens
                    of_source.attempts += journal.attempts
            if summary is not None:
                of_source.add_summary(summary)
        return counts

    def _summary(self, chunk: str) -> dict[str, Any] | None:
        if chunk not in self._summaries:
            if self._run.summary(chunk).is_file():
                self._summaries[chunk] = read_json(self._run.summary(chunk))
            elif self._run.completions(chunk).is_file():
                # Published a moment ago, or by a worker that was killed before it wrote the summary. Only here is Arrow
                # needed, whose import would take longer than all counting.
                from services.records import summarize

                return summarize(self._run.completions(chunk))
            else:
                return None
            self._journals.pop(chunk, None)
        return self._summaries[chunk]


class JournalCounter:
    """Finished prompts in a journal that grows, and the tokens of their completed answers."""

    def __init__(self, path: Path) -> None:
        self.prompt_ids: set[str] = set()
        self.output_tokens = 0
        self.attempts = 0
        self._path = path
        self._read_bytes = 0

    def update(self) -> bool:
        """Read what was appended since; a line that a kill cut off is not counted. Returns whether it is there."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                appended = file.read()
        except FileNotFoundError:
            return False
        whole, newline, _ = appended.rpartition(b"\n")
        self._read_bytes += len(whole) + len(newline)
        for line in whole.split(b"\n"):
            self._count(line)
        return True

    def _count(self, line: bytes) -> None:
        # The ids come last and make up most of a line: they are counted, not parsed.
        head, _, ids = line.partition(JOURNAL_IDS)
        if not ids.endswith(b"]}"):
            return
        try:
            answer = json.loads(head + b"}")
        except ValueError:
            return
        if answer["prompt_id"] in self.prompt_ids:
            return
        self.prompt_ids.add(answer["prompt_id"])
        self.attempts += answer["attempts"]
        if answer["status"] == "completed":
            self.output_tokens += ids.count(b",") + 1 if len(ids) > len(b"]}") else 0


def count_generated(run: Run) -> dict[str, GenerateCounts]:
    """Counts by source, from the published completions and the journals of unfinished chunks."""
    return GenerateCounter(run).count()


def total(counts: Iterable[GenerateCounts]) -> GenerateCounts:
    """All sources together."""
    added = GenerateCounts()
    for of_source in counts:
        added.add(of_source)
    return added


def count_assembled(run: Run, known: dict[str, dict[str, Any]] | None = None) -> dict[str, dict[str, Any]]:
    """By chunk, what assembling published: samples, tokens, supervised tokens and drops by reason.

    Who counts again and again hands over what it was given last: only what is new since is read.
    """
    counts = {} if known is None else known
    new = {name for name in file_names(run.root / "samples") if name.endswith(".json")} - {
        f"{chunk}.json" for chunk in counts
    }
    for chunk in read_chunks(run) if new else []:
        if f"{chunk.chunk}.json" in new:
            counts[chunk.chunk] = read_json(run.assembled(chunk.chunk))
    return counts


def check_balance(what: str, expected: int, parts: dict[str, int]) -> None:
    """Raises UserError when the parts do not add up to what the stage before handed on."""
    if expected != sum(parts.values()):
        listed = " + ".join(f"{count} {name}" for name, count in parts.items())
        raise UserError(f"{what}: {listed} = {sum(parts.values())}, but {expected} entered; the run's files disagree")


def file_names(folder: Path) -> set[str]:
    """Names in a folder; none where there is no folder. One call, where asking for each file would take thousands."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries}
    except FileNotFoundError:
        return set()
