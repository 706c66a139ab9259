"""Caches of several documents of different lengths, for decoding them in one batch.

Each document's rows begin at 0 of a buffer [batch, heads, capacity, head_dim]. A pass writes its rows from the
document's own length on and sees them; only `lengths` says which of them stay. So a rejected guess needs no
removal: the next pass overwrites it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import DynamicLayer

from dflash.model import KeysValues


class RaggedLayer(DynamicLayer):
    """One target layer's buffers, filled by the target's own attention through transformers' cache interface."""

    def __init__(self, buffers: KeysValues, lengths: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lazy_initialization(*buffers)
        self.keys, self.values = buffers
        # A target's layers may be on several cards.
        self.buffers, self.lengths = buffers, lengths.to(buffers.keys.device)

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_options: Any) -> tuple[Tensor, Tensor]:
        """Write one pass's rows [batch, heads, rows, head_dim]; return all rows up to the longest document's last."""
        write_rows(self.buffers, KeysValues(key_states, value_states), self.lengths)
        end = int(self.lengths.max()) + key_states.shape[2]
        return self.buffers.keys[:, :, :end], self.buffers.values[:, :, :end]


def stack_rows(documents: list[KeysValues], capacity: int) -> KeysValues:
    """Return buffers for documents given as [1, heads, length, head_dim] each."""

    def stack(parts: list[Tensor]) -> Tensor:
        # Zeros, as a hidden row's weight of 0 would not silence a NaN.
        return torch.cat([F.pad(part, (0, 0, 0, capacity - part.shape[2])) for part in parts])

    return KeysValues(stack([d.keys for d in documents]), stack([d.values for d in documents]))


def write_rows(buffers: KeysValues, rows: KeysValues, lengths: Tensor) -> None:
    """Write `rows` [batch, heads, count, head_dim] from each document's length on, in place."""
    columns = lengths[:, None] + torch.arange(rows.keys.shape[2], device=lengths.device)
    documents = torch.arange(len(lengths), device=lengths.device)[:, None]
    for buffer, new in zip(buffers, rows, strict=True):
        buffer[documents, :, columns] = new.transpose(1, 2)


def causal_mask(lengths: Tensor, rows: int) -> Tensor:
    """Return what `rows` new rows of each document see, themselves included: [batch, 1, rows, longest + rows]."""
    keys = torch.arange(int(lengths.max()) + rows, device=lengths.device)
    last_seen = lengths[:, None] + torch.arange(rows, device=lengths.device)
    return (keys <= last_seen[..., None])[:, None]
