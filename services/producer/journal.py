"""The journal of an unfinished chunk: one JSON line a finished prompt, so that none is asked for again.

A line is a completion, its generated ids last, or the note that a prompt's connection was lost. Whoever holds
the journal holds the chunk: the lock goes with its process, however that ends, and with it ends the journal's
only writer.
"""

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.records import Completion


@dataclass
class Journal:
    """An open journal that this process holds. Raises OSError when the disk does not take a line."""

    path: Path
    descriptor: int
    finished: set[str] = field(default_factory=set)
    lost: Counter[str] = field(default_factory=Counter)

    def append(self, completion: Completion) -> None:
        """Write one finished prompt: whole, or not at all. The page cache survives a killed process: no sync."""
        fields = dict(vars(completion))
        # JSON keeps the order: services/ledger.py counts the ids, which come last, without parsing them.
        fields["output_ids"] = fields.pop("output_ids")
        self._write(fields)
        self.finished.add(completion.prompt_id)

    def note_lost(self, prompt_id: str, server: str) -> None:
        """A prompt may be what kills servers: the next worker has to know how often it was there."""
        self.lost[prompt_id] += 1
        # On a full disk this process still knows it.
        with suppress(OSError):
            self._write({"prompt_id": prompt_id, "lost": server})

    def _write(self, content: dict[str, Any]) -> None:
        line = json.dumps(content, separators=(",", ":")).encode() + b"\n"
        size = os.fstat(self.descriptor).st_size
        try:
            written = os.write(self.descriptor, line)
            if written != len(line):
                written += os.write(self.descriptor, line[written:])
        except OSError:
            with suppress(OSError):
                os.ftruncate(self.descriptor, size)
            raise


@contextmanager
def hold(path: Path) -> Iterator[Journal | None]:
    """Open a chunk's journal for this process alone; None while another one holds it.

    Raises:
        OSError: it cannot be written, for want of rights or space.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        if not _lock(descriptor, path):
            yield None
            return
        journal = Journal(path, descriptor)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            os.write(descriptor, b"\n")
        for line in _lines(path):
            if "lost" in line:
                journal.lost[line["prompt_id"]] += 1
            else:
                journal.finished.add(line["prompt_id"])
        yield journal
    finally:
        os.close(descriptor)


def journaled(path: Path) -> dict[str, Completion]:
    """Finished prompts by id; the first line of a prompt counts, and a line cut off by a kill does not."""
    answers: dict[str, Completion] = {}
    if path.is_file():
        for line in _lines(path):
            if "lost" not in line:
                answers.setdefault(line["prompt_id"], Completion(**line))
    return answers


def _lock(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    # Its holder may have published the chunk and removed the journal since it was opened.
    try:
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for line in file:
            try:
                content = json.loads(line)
                content["prompt_id"]
            except (ValueError, KeyError, TypeError):
                continue
            yield content
