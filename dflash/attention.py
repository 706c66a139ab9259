"""Attention of a pack's blocks without a mask over the whole pack.

A block sees a stretch of its own document, from its first row (or its window's) to just before the anchor, and itself.
Anchors are sorted, so neighbouring blocks see almost the same stretch: `attention_by_prefix` takes a few of them at a
time over the longest stretch among them, with a mask of that size. What is computed grows with what is visible, not
with rows x (tokens + rows). `dflash.mask` has the rule, and `masked_attention` with its mask is the plain reference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from dflash.mask import own_blocks, visible_context
from dflash.model import Attend, KeysValues
from dflash.pack import Pack
from dflash.transfer import to_device

# The attention of a pack's blocks of so many rows.
PackAttention = Callable[[Pack, int], Attend]
# Block rows that share one call. More make larger products, and more of each mask is wasted on each other's rows.
ROWS_AT_ONCE = 128


class _Neighbours(NamedTuple):
    """Neighbouring blocks of one document: their rows, the context rows that any of them sees, and their mask."""

    rows: slice
    context: slice
    mask: Tensor


def attention_by_prefix(pack: Pack, block_size: int) -> Attend:
    """Return the attention of `pack`'s blocks, a few neighbours at a time.

    Neither queries, keys nor values are copied for the backward pass, which attends again.
    """
    device = pack.input_ids.device
    anchors, starts = pack.on_host.anchors.numpy(), pack.starts().numpy()
    runs = _runs(starts, max(ROWS_AT_ONCE // block_size, 1))

    @cache
    def plan_of(window: int | None) -> list[_Neighbours]:
        return [
            _neighbours(first, int(starts[first]), anchors[first:end], block_size, window, device)
            for first, end in runs
        ]

    def attend(queries: Tensor, context: KeysValues, block: KeysValues, window: int | None) -> Tensor:
        # Under autocast the norms give fp32 and the projections bf16; attention is computed in the latter.
        dtype = block.values.dtype
        out: Tensor = _PrefixAttention.apply(  # type: ignore[no-untyped-call]
            plan_of(window),
            queries.to(dtype),
            context.keys.to(dtype),
            context.values,
            block.keys.to(dtype),
            block.values,
        )
        return out

    return attend


def _runs(starts: NDArray[np.int64], longest: int) -> list[tuple[int, int]]:
    """Cut blocks into runs [first, end) of one document each, of at most `longest` blocks."""
    cuts = [0, *(np.flatnonzero(np.diff(starts)) + 1).tolist(), len(starts)]
    return [(first, min(first + longest, end)) for begin, end in pairwise(cuts) for first in range(begin, end, longest)]


def _neighbours(
    first: int, start: int, anchors: NDArray[np.int64], block_size: int, window: int | None, device: torch.device
) -> _Neighbours:
    end, count = int(anchors.max()), len(anchors)
    if window is not None:
        start = max(start, int(anchors.min()) - window + 1)
    context = visible_context(torch.arange(start, end), torch.from_numpy(anchors), block_size, window)
    own = own_blocks(count, block_size, window, context.device)
    visible = to_device(torch.cat((context, own), dim=2), device)
    mask = visible.expand(-1, block_size, -1).flatten(0, 1)
    return _Neighbours(slice(first * block_size, (first + count) * block_size), slice(start, end), mask)


class _PrefixAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: list[_Neighbours], *tensors: Tensor) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(*tensors)
        out = torch.empty_like(tensors[0])
        for part in plan:
            out[:, :, part.rows] = _attend(part.mask, *_narrow(tensors, part))
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        tensors: tuple[Tensor, ...] = ctx.saved_tensors
        gradients = [torch.zeros_like(tensor) for tensor in tensors]
        for part in ctx.plan:
            leaves = [tensor.detach().requires_grad_() for tensor in _narrow(tensors, part)]
            with torch.enable_grad():
                out = _attend(part.mask, *leaves)
            found = torch.autograd.grad(out, leaves, upstream[0][:, :, part.rows])
            # Neighbours share context rows, so these add up.
            for total, gradient in zip(_narrow(gradients, part), found, strict=True):
                total += gradient
        return None, *gradients


def _narrow(tensors: Any, part: _Neighbours) -> list[Tensor]:
    """Views of queries, context keys and values, block keys and values that belong to `part`."""
    stretches = (part.rows, part.context, part.context, part.rows, part.rows)
    return [tensor[:, :, stretch] for tensor, stretch in zip(tensors, stretches, strict=True)]


def _attend(
    mask: Tensor, queries: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor
) -> Tensor:
    batch, heads, rows, width = queries.shape
    kv_heads = keys.shape[1]
    # Heads that share keys become rows of one head: keys and values need not be repeated.
    shared = heads // kv_heads
    out = F.scaled_dot_product_attention(
        queries.reshape(batch, kv_heads, shared * rows, width),
        torch.cat((keys, own_keys), dim=2),
        torch.cat((values, own_values), dim=2),
        attn_mask=mask.repeat(shared, 1),
    )
    return out.view(batch, heads, rows, width)
