"""How a file or folder is published: once, whole, and the first writer wins.

It is written as `.NAME.*.tmp` first, locked by its writer: one that is not locked was left by a kill, and the next
writer of the same name removes it.
"""

import fcntl
import glob
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

SYNCED_AT_ONCE = 8


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def publish(final: Path, write: Callable[[Path], None]) -> bool:
    """Let `write` fill a temporary file beside `final`, then publish it whole under that name.

    Returns whether this call published it: False when the file was there already, which is left as it is.
    """
    if final.exists():
        sweep(final)
        return False
    with _temporary(final) as temporary:
        write(temporary)
        _sync(temporary)
        try:
            os.link(temporary, final)
        except FileExistsError:
            return False
        _sync(final.parent)
    return True


def publish_json(final: Path, content: dict[str, Any]) -> bool:
    """Publish a JSON object under the rules of `publish`."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    return publish(final, lambda temporary: _write_text(temporary, text))


def publish_folder(final: Path, fill: Callable[[Path], None]) -> bool:
    """Let `fill` write into a new folder beside `final`, then rename it to that name; the first writer wins."""
    if final.exists():
        sweep(final)
        return False
    with _temporary(final, folder=True) as temporary:
        fill(temporary)
        # Together, since the file system writes its own journal once for all that wait for it.
        with ThreadPoolExecutor(SYNCED_AT_ONCE) as pool:
            list(pool.map(_sync, (path for path in temporary.rglob("*") if not path.is_symlink())))
        try:
            temporary.rename(final)
        except OSError:
            if final.is_dir():
                return False
            raise
        _sync(final.parent)
    return True


def replace_json(final: Path, content: dict[str, Any]) -> None:
    """Write a JSON file that may be written again, whole at any moment (reports and snapshots, not results)."""
    replace_text(final, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def replace_text(final: Path, text: str) -> None:
    """The same with any text."""
    with _temporary(final) as temporary:
        _write_text(temporary, text)
        # Else a machine that loses power may keep the new name and none of the content.
        _sync(temporary)
        temporary.replace(final)


@contextmanager
def scratch_folder(parent: Path, name: str) -> Iterator[Path]:
    """A new hidden folder in `parent`, removed at the end; those of this name that killed processes left go first."""
    with _temporary(parent / name, folder=True) as folder:
        yield folder


@contextmanager
def _temporary(final: Path, *, folder: bool = False) -> Iterator[Path]:
    """An empty file or folder beside `final`, locked for as long as it is written to."""
    final.parent.mkdir(parents=True, exist_ok=True)
    sweep(final)
    temporary, lock = _make_locked(final, folder)
    try:
        yield temporary
    finally:
        _remove(temporary)
        os.close(lock)


def _make_locked(final: Path, folder: bool) -> tuple[Path, int]:
    while True:
        temporary = final.parent / f".{final.name}.{uuid.uuid4().hex}.tmp"
        if folder:
            temporary.mkdir()
        else:
            temporary.touch(exist_ok=False)
        # Between making and locking it, another writer's sweep may take it for a left one.
        with suppress(FileNotFoundError):
            lock = os.open(temporary, os.O_RDONLY)
            with suppress(OSError):  # a file system without locks: nothing is swept there
                fcntl.flock(lock, fcntl.LOCK_EX)
            if temporary.exists():
                return temporary, lock
            os.close(lock)


def sweep(final: Path) -> None:
    """Remove what killed writers of `final` left: the kernel has released their locks. Publishing does so by itself."""
    for left in final.parent.glob(f".{glob.escape(final.name)}.*.tmp"):
        remove_unlocked(left)


def remove_unlocked(temporary: Path) -> bool:
    """Remove a temporary file or folder unless a live writer has locked it. Returns whether it was removed.

    On a file system without locks nothing is.
    """
    try:
        lock = os.open(temporary, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(temporary)
        finally:
            os.close(lock)
    except OSError:  # it is locked, so being written; or gone
        return False
    return True


def _remove(temporary: Path) -> None:
    if temporary.is_dir():
        shutil.rmtree(temporary)
    else:
        temporary.unlink(missing_ok=True)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
