"""Publishing files and folders atomically: a reader sees the whole of one or nothing."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash.errors import DflashError


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON to `path`, replacing what is there only once the new file is on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=2, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def read_json(path: Path) -> Any:
    """Return the JSON value in `path`. Raises DflashError when it is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DflashError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:
        raise DflashError(f"{path}: not readable as JSON ({error})") from error


@contextmanager
def publish_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside `path`; on success it is synced to disk and renamed to `path`.

    Raises DflashError when `path` exists: what was published once is not replaced.
    """
    if path.exists():
        raise DflashError(f"{path} already exists: remove it or choose another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield temporary
        for entry in sorted(temporary.rglob("*"), reverse=True):
            # A container may read the folder under another user than the one that wrote it.
            entry.chmod(0o755 if entry.is_dir() else 0o644)
            _sync(entry)
        temporary.chmod(0o755)
        _sync(temporary)
        temporary.rename(path)
        _sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def set_aside(folder: Path) -> Path | None:
    """Move all that is in `folder` into a new folder `earlier-N` of it; return that, or None where nothing was."""
    if not folder.is_dir():
        return None
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith("earlier-")]
    if not entries:
        return None
    aside = folder / f"earlier-{1 + sum(1 for _ in folder.glob('earlier-*'))}"
    aside.mkdir()
    for entry in entries:
        entry.rename(aside / entry.name)
    return aside


def remove_unpublished(folder: Path) -> None:
    """Remove what `publish_folder` left in `folder` when its process was killed."""
    for entry in folder.glob(".step-*"):
        shutil.rmtree(entry, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
