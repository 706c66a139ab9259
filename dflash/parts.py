"""Where a process spends its time, and the sign of life that the launcher watches."""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, get_args

# `gradient` is forward, loss and backward at once: the head's gradient is made in the forward pass.
Part = Literal["data_wait", "target_forward", "transfer", "gradient", "optimizer", "other"]
PARTS: tuple[Part, ...] = get_args(Part)
# In these a process waits for others: it is not to blame when nothing goes on.
WAITING = frozenset({"data_wait", "transfer"})
BEAT = struct.Struct("dq")


class Beat(NamedTuple):
    """When a process last began something (time.monotonic, which all processes of a machine share), and what."""

    time: float
    part: Part


class Beats:
    """The last beat of each process, in memory that they share with their launcher."""

    def __init__(self, file: int, processes: int) -> None:
        os.ftruncate(file, processes * BEAT.size)
        self._memory = mmap.mmap(file, processes * BEAT.size)

    def beat(self, rank: int, part: Part) -> None:
        """Note that `rank` begins `part`."""
        BEAT.pack_into(self._memory, rank * BEAT.size, time.monotonic(), PARTS.index(part))

    def last(self, rank: int) -> Beat:
        """Return the last beat of `rank`."""
        at, part = BEAT.unpack_from(self._memory, rank * BEAT.size)
        return Beat(at, PARTS[part])


class Clock:
    """Seconds by part; what no part claims is `other`. On a GPU a part that does not wait ends with its launches."""

    def __init__(self, beats: Beats | None = None, rank: int = 0) -> None:
        self.seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self._beats, self._rank = beats, rank
        self._part: Part = "other"
        self._since = time.monotonic()
        self.beat()

    def beat(self) -> None:
        """Show that this process goes on."""
        if self._beats is not None:
            self._beats.beat(self._rank, self._part)

    @contextmanager
    def part(self, part: Part) -> Iterator[None]:
        """Count the time inside as `part`."""
        before = self._turn_to(part)
        try:
            yield
        finally:
            self._turn_to(before)

    def _turn_to(self, part: Part) -> Part:
        now, before = time.monotonic(), self._part
        self.seconds[before] += now - self._since
        self._part, self._since = part, now
        self.beat()
        return before
