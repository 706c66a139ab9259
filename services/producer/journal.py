"""The journal of an unfinished chunk: one JSON line a finished prompt, so that none is asked for again."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from services.errors import UserError
from services.ledger import read_journal
from services.records import Completion


def journaled(path: Path) -> dict[str, Completion]:
    """Finished prompts by id; the first line of a prompt counts, and a line cut off by a kill does not."""
    return {prompt_id: Completion(**line) for prompt_id, line in read_journal(path).items()}


@contextmanager
def appending(path: Path) -> Iterator[Callable[[Completion], None]]:
    """Yields the function that appends one completion, in a single write: lines of two workers never mix.

    The page cache survives a killed process, so nothing is synced here.

    Raises:
        UserError: the line could not be written, for example because the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)

    def append(completion: Completion) -> None:
        _write(descriptor, json.dumps(asdict(completion), separators=(",", ":")).encode() + b"\n", path)

    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            _write(descriptor, b"\n", path)
        yield append
    finally:
        os.close(descriptor)


def _write(descriptor: int, line: bytes, path: Path) -> None:
    try:
        written = os.write(descriptor, line)
    except OSError as error:
        raise UserError(f"journal {path}: {error.strerror}; free space or rights there, then submit again") from error
    if written != len(line):
        raise UserError(f"journal {path}: the disk is full; free space there, then submit again")
