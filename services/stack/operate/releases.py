"""releases.jsonl: every change of an image and every measured memory budget, a JSON line each, in order.

A change has a line when it begins and one when it is done or undone, so that one that was interrupted is found.
What is in use, and what a rollback goes back to, follows from the lines.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from services.errors import UserError

Event = Literal["begun", "done", "undone", "measured"]
Action = Literal["swap", "rollback", "measure"]


@dataclass(frozen=True)
class Release:
    """An image as it was when it was looked at; `reference` is the name that .env gives it."""

    image: str
    reference: str
    variant: str | None = None
    contents: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def short(self) -> str:
        return self.image.removeprefix("sha256:")[:12]


@dataclass(frozen=True)
class Entry:
    """One line. Of a change that begins: which services were up (`scales`), and what .env said (`setting`).

    `budget` is in bytes, by what holds them ("resident", "card 0") and stage.
    """

    when: str
    event: Event
    action: Action
    role: str
    to: Release
    before: Release | None = None
    scales: Mapping[str, int] = field(default_factory=dict)
    setting: str | None = None
    budget: Mapping[str, Mapping[str, int]] | None = None
    why: str = ""


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_entries(path: Path) -> list[Entry]:
    """All entries, oldest first; a last line that was cut short by a crash is none.

    Raises:
        UserError: another line is damaged.
    """
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    entries = []
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            entries.append(_entry(json.loads(line)))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise UserError(f"{path}, line {number}: it is damaged; put it right, or remove it") from error
    return entries


def append(path: Path, entry: Entry) -> None:
    """Add an entry; it is on the disk when this returns."""
    path.parent.mkdir(exist_ok=True)
    path.touch()
    with path.open("r+b") as file:
        content = file.read()
        file.seek(content.rfind(b"\n") + 1)  # over what a crash cut short
        file.truncate()
        file.write(json.dumps(asdict(entry), ensure_ascii=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def operating(path: Path) -> Iterator[None]:
    """Be the only one that changes this stack.

    Raises:
        UserError: another command is at it.
    """
    path.parent.mkdir(exist_ok=True)
    lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError("another command is changing this stack; wait for it") from error
        yield
    finally:
        os.close(lock)


def interrupted(entries: Sequence[Entry]) -> Entry | None:
    """The change that was begun and neither done nor undone, if there is one."""
    changes = [entry for entry in entries if entry.event != "measured"]
    return changes[-1] if changes and changes[-1].event == "begun" else None


def earlier(entries: Sequence[Entry], role: str) -> Release | None:
    """What a rollback of a role goes back to: the release before the one in use, rolled back ones left out."""
    stack: list[Release] = []
    for entry in entries:
        if entry.role != role or entry.event != "done" or entry.before is None:
            continue
        if entry.action == "swap":
            stack.append(entry.before)
        elif stack:
            stack.pop()
    return stack[-1] if stack else None


def measured(entries: Sequence[Entry], image: str) -> Mapping[str, Mapping[str, int]] | None:
    """The budget last recorded for an image id."""
    found = [entry.budget for entry in entries if entry.event == "measured" and entry.to.image == image]
    return found[-1] if found else None


def _entry(content: dict[str, Any]) -> Entry:
    before = content.get("before")
    return Entry(**{**content, "to": Release(**content["to"]), "before": Release(**before) if before else None})
