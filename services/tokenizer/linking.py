"""Put a file into another folder without copying it, by what the file system gives."""

import errno
import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args

# How a base's shards came into a dataset, the best first. `renamed`: its columns had other names, so that they were
# written anew.
How = Literal["linked", "cloned", "referenced", "copied", "renamed"]

# linux/fs.h: _IOW(0x94, 9, int)
FICLONE = 0x40049409


def worse(one: How, other: How | None) -> How:
    """The one of two that is worth telling."""
    order = get_args(How)
    return one if other is None or order.index(one) > order.index(other) else other


def link_file(source: Path, target: Path) -> How:
    """Give `source` a second name: a hard link, else a clone, else a symbolic link, else a copy.

    A clone shares the blocks where the file system can (btrfs, XFS). A symbolic link is for another file system, and
    lasts only as long as the file that it refers to.
    """
    source = source.resolve()
    with suppress(OSError):
        os.link(source, target)
        return "linked"
    with suppress(OSError):
        _clone(source, target)
        return "cloned"
    with suppress(OSError):
        target.symlink_to(source)
        return "referenced"
    shutil.copy2(source, target)
    return "copied"


def _clone(source: Path, target: Path) -> None:
    try:
        with source.open("rb") as read, target.open("xb") as written:
            fcntl.ioctl(written, FICLONE, read.fileno())
        shutil.copystat(source, target)
    except OSError as error:
        if error.errno != errno.EEXIST:
            target.unlink(missing_ok=True)
        raise
