"""Target states on their way to the drafters: a ring of slots in host memory that the processes of a machine share.

A target fills the slots in the order of its packs, and waits while all are taken: that bounds its look-ahead. A drafter
waits for its pack, copies it to its device and frees the slot. On GPUs the memory is pinned on both sides, so a card
needs no access to another card's memory. The memory has no name in any file system: it goes with the processes.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash.errors import DflashError
from dflash.features import TargetStates

HEADER_BYTES = 4096
WORD_BYTES = 8
POLL_SECONDS = 0.0005


class SlotShape(NamedTuple):
    """What a slot has to hold: tokens of the largest pack, widths and dtype of its states (final: 0 if none)."""

    tokens: int
    features: int
    final: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one slot."""
        return self.tokens * (self.features + self.final) * self.dtype.itemsize


class Ring:
    """The slots of one target. Words of the header: closed, what the lead asks for, then the pack in each slot + 1."""

    def __init__(self, shape: SlotShape, slots: int, file: int, pinned: bool) -> None:
        self._shape, self._slots = shape, slots
        size = HEADER_BYTES + slots * shape.nbytes
        self._memory = mmap.mmap(file, size)
        self._words = memoryview(self._memory)[:HEADER_BYTES].cast("q")
        self._data = torch.frombuffer(self._memory, dtype=torch.uint8, offset=HEADER_BYTES)
        if pinned:
            _pin(self._data)

    @property
    def closed(self) -> bool:
        """Whether the drafters have stopped taking packs."""
        return self._words[0] != 0

    def close(self) -> None:
        """Tell the target that no more packs are taken."""
        self._words[0] = 1

    @property
    def asked(self) -> int:
        """How many measurements the lead has asked for."""
        return self._words[1]

    def ask(self) -> None:
        """Ask the target for a measurement."""
        self._words[1] += 1

    def await_slot(self, turn: int, goes_on: Callable[[], bool]) -> bool:
        """Wait until the slot of the target's pack number `turn` is free; return False once `goes_on` does."""
        while self._words[2 + turn % self._slots] != 0:
            if not goes_on():
                return False
            time.sleep(POLL_SECONDS)
        return goes_on()

    def put(self, turn: int, pack: int, states: TargetStates) -> None:
        """Write the states of `pack` into the free slot of `turn`."""
        slot = turn % self._slots
        for view, tensor in zip(self._views(slot, len(states.features)), states, strict=True):
            if view is not None and tensor is not None:
                # Only a copy that keeps the dtype goes straight to pinned memory.
                view.copy_(tensor.to(view.dtype))
        self._words[2 + slot] = pack + 1

    def await_pack(self, turn: int, pack: int) -> None:
        """Wait until `pack`, the target's pack number `turn`, is there."""
        while self._words[2 + turn % self._slots] != pack + 1:
            time.sleep(POLL_SECONDS)

    def take(self, turn: int, tokens: int, device: torch.device) -> TargetStates:
        """Return the states of the target's pack number `turn` (fp32) once they are on `device`, and free its slot."""
        slot = turn % self._slots
        # Widened there, not here: half the bytes cross, and straight from pinned memory.
        features, final = (
            None if view is None else view.to(device, copy=True).float() for view in self._views(slot, tokens)
        )
        assert features is not None
        self._words[2 + slot] = 0
        return TargetStates(features, final)

    def _views(self, slot: int, tokens: int) -> list[Tensor | None]:
        first = slot * self._shape.nbytes
        views: list[Tensor | None] = []
        for width in (self._shape.features, self._shape.final):
            size = tokens * width * self._shape.dtype.itemsize
            part = self._data[first : first + size]
            views.append(part.view(self._shape.dtype).view(tokens, width) if width else None)
            first += size
        return views


class RingAddress(NamedTuple):
    """Where another process of the machine finds a ring."""

    process: int
    file: int
    shape: SlotShape
    slots: int


def make_ring(shape: SlotShape, look_ahead_bytes: int, pinned: bool) -> tuple[Ring, RingAddress]:
    """Make a ring of at least one slot and at most `look_ahead_bytes`."""
    most = HEADER_BYTES // WORD_BYTES - 2
    slots = max(1, min(look_ahead_bytes // shape.nbytes, most))
    file = os.memfd_create("dflash-states")
    os.ftruncate(file, HEADER_BYTES + slots * shape.nbytes)
    return Ring(shape, slots, file, pinned), RingAddress(os.getpid(), file, shape, slots)


def open_ring(address: RingAddress, pinned: bool) -> Ring:
    """Open the ring of a target on this machine."""
    file = os.open(f"/proc/{address.process}/fd/{address.file}", os.O_RDWR)
    try:
        return Ring(address.shape, address.slots, file, pinned)
    finally:
        os.close(file)


def _pin(memory: Tensor) -> None:
    """Register memory with CUDA, so that copies run at the speed of the bus."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(status) != 0:
        raise DflashError(f"{memory.numel()} bytes of host memory cannot be pinned: lower topology.look_ahead_bytes")
