"""A folder for what is written while a source is prepared; what a killed process left is removed."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def scratch_folder(parent: Path, name: str) -> Iterator[Path]:
    """A new hidden folder in `parent`, locked while it is in use and removed at the end.

    The kernel releases the lock of a killed process, so a folder of the same name that is not locked is of no use.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(f".{name}.*.scratch"):
        with suppress(OSError), _locked(left):  # locked by another process, or gone
            shutil.rmtree(left)
    with (
        tempfile.TemporaryDirectory(dir=parent, prefix=f".{name}.", suffix=".scratch") as folder,
        _locked(Path(folder)),
    ):
        yield Path(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Raises OSError when another process holds the lock."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
