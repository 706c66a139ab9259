"""The order of training: epochs cut into packs, and the place in them where a run is.

Rows come in the order that seed and epoch decide. Windows of them are packed so that packs are nearly full, whatever
the lengths are and whichever limit is reached first. The packs of a window come in random order, so that none comes
early for being long.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Rows that are packed together: enough to find the right one for most gaps.
WINDOW = 4096
PACK_STREAM = 2


class PackLimits(NamedTuple):
    """Most tokens and most rows of a pack."""

    token_budget: int
    max_batch_size: int


class Span(NamedTuple):
    """The first `packs` packs of what was left of an epoch, made with these limits."""

    limits: PackLimits
    packs: int


@dataclass(frozen=True)
class Cursor:
    """Where a run is in its data: packs done in this epoch, and those done before under other limits."""

    epoch: int = 0
    pack: int = 0
    earlier: tuple[Span, ...] = ()


class PackRows(NamedTuple):
    """The rows of one pack, and its epoch and number, from which its random choices are made."""

    epoch: int
    pack: int
    rows: list[int]


class DataOrder:
    """The endless sequence of packs of a run, from any cursor on."""

    def __init__(
        self,
        rows_of: Callable[[int], NDArray[np.int64]],
        lengths: NDArray[np.int64],
        limits: PackLimits,
        seed: int,
    ) -> None:
        """`rows_of` gives the rows of an epoch in order; `lengths` the tokens of every row of the dataset."""
        self._rows_of, self._lengths, self._limits, self._seed = rows_of, lengths, limits, seed

    def packs_from(self, cursor: Cursor) -> Iterator[tuple[PackRows, Cursor]]:
        """Yield each pack from `cursor` on, with the cursor after it."""
        while True:
            rows = self._rows_of(cursor.epoch)
            done = 0
            for span in cursor.earlier:
                rows = _without(rows, self._packs(rows, span.limits, cursor.epoch), span.packs)
                done += span.packs
            for number, pack in enumerate(self._packs(rows, self._limits, cursor.epoch)):
                if number >= cursor.pack:
                    after = Cursor(cursor.epoch, number + 1, cursor.earlier)
                    yield PackRows(cursor.epoch, done + number, pack), after
            cursor = Cursor(cursor.epoch + 1)

    def _packs(self, rows: NDArray[np.int64], limits: PackLimits, epoch: int) -> Iterator[list[int]]:
        return pack_rows(rows, self._lengths, limits, np.random.default_rng([self._seed, epoch, PACK_STREAM]))


def with_limits(cursor: Cursor, old: PackLimits, new: PackLimits) -> Cursor:
    """Return the cursor that goes on with what is left of the epoch, packed under other limits."""
    if old == new or cursor.pack == 0:
        return cursor
    return Cursor(cursor.epoch, 0, (*cursor.earlier, Span(old, cursor.pack)))


def pack_rows(
    rows: NDArray[np.int64], lengths: NDArray[np.int64], limits: PackLimits, rng: np.random.Generator
) -> Iterator[list[int]]:
    """Yield packs of `rows`, each row once.

    Args:
        rows: rows of the dataset in order.
        lengths: tokens of every row of the dataset, none above the budget.
        limits: most tokens and rows of a pack.
        rng: decides the order of a window's packs.
    """
    waiting = rows[:0]
    for first in range(0, len(rows), WINDOW):
        window = np.concatenate((waiting, rows[first : first + WINDOW]))
        last = first + WINDOW >= len(rows)
        # Best fit leaves the least room, but gathers short rows in packs that are full by their number.
        packs = min((pack(window, lengths[window], limits) for pack in (_best_fit, _balanced)), key=len)
        if not last:
            # The pack with the most room waits for the next window's rows.
            loosest = min(range(len(packs)), key=lambda i: int(lengths[packs[i]].sum()))
            waiting = np.array(packs.pop(loosest), dtype=np.int64)
        for index in rng.permutation(len(packs)).tolist():
            yield packs[index]


def padding(packs: list[list[int]], lengths: NDArray[np.int64], token_budget: int) -> float:
    """Return the part of the packs' budget that is not used."""
    return 1.0 - sum(int(lengths[pack].sum()) for pack in packs) / (len(packs) * token_budget)


def _best_fit(rows: NDArray[np.int64], lengths: NDArray[np.int64], limits: PackLimits) -> list[list[int]]:
    """Put the longest row first into the pack in which it leaves the least room."""
    packs: list[list[int]] = []
    # (room, pack) of the packs that may take another row, by room.
    open_packs: list[tuple[int, int]] = []
    order = np.argsort(-lengths, kind="stable")
    for row, length in zip(rows[order].tolist(), lengths[order].tolist(), strict=True):
        place = bisect_left(open_packs, (length, -1))
        if place == len(open_packs):
            room, number = limits.token_budget, len(packs)
            packs.append([])
        else:
            room, number = open_packs.pop(place)
        packs[number].append(row)
        if len(packs[number]) < limits.max_batch_size and room > length:
            insort(open_packs, (room - length, number))
    return packs


def _balanced(rows: NDArray[np.int64], lengths: NDArray[np.int64], limits: PackLimits) -> list[list[int]]:
    """Put the longest row first into the pack with the fewest tokens, of as few packs as the limits allow."""
    least = max(-(-int(lengths.sum()) // limits.token_budget), -(-len(rows) // limits.max_batch_size))
    packs: list[list[int]] = [[] for _ in range(least)]
    loads = [(0, number) for number in range(least)]
    order = np.argsort(-lengths, kind="stable")
    for row, length in zip(rows[order].tolist(), lengths[order].tolist(), strict=True):
        if loads and loads[0][0] + length <= limits.token_budget:
            load, number = heappop(loads)
        else:
            load, number = 0, len(packs)
            packs.append([])
        packs[number].append(row)
        if len(packs[number]) < limits.max_batch_size:
            heappush(loads, (load + length, number))
    return packs


def _without(rows: NDArray[np.int64], packs: Iterator[list[int]], count: int) -> NDArray[np.int64]:
    """Return `rows` without those of the first `count` packs."""
    taken: dict[int, int] = {}
    for _ in range(count):
        for row in next(packs):
            taken[row] = taken.get(row, 0) + 1
    kept = []
    for row in rows.tolist():
        if taken.get(row, 0):
            taken[row] -= 1
        else:
            kept.append(row)
    return np.array(kept, dtype=np.int64)
