"""Attention of a pack's blocks by flex attention, which computes only the tiles of the mask that somebody sees.

Which tiles those are follows from two stretches of keys for each block, its document's rows before the anchor (or its
window's) and its own rows: their lists are made on the host from the anchors, and no mask of rows x keys is made
anywhere. Lengths are padded to a few sizes, as each size is compiled once; padding is in no list, and only attention's
operands have it. `dflash.mask` has the rule, and `masked_attention` with its mask is the plain reference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dflash.errors import DflashError
from dflash.mask import is_visible_by_index
from dflash.model import Attend, KeysValues
from dflash.pack import Pack
from dflash.transfer import to_device

# Rows and keys of one tile: what flex attention's kernels take by default.
TILE = 128
# More sizes than that in one process are a mistake: compiling takes seconds each.
MOST_SIZES = 64

# Flex attention, compiled or not: queries, keys, values, mask; returns the shape of the queries.
FlexAttention = Callable[[Tensor, Tensor, Tensor, BlockMask], Tensor]


class TileLists(NamedTuple):
    """Which tiles of keys each tile of rows sees, int32: how many in part, which; how many wholly, which.

    Counts are [row tiles]; the others [row tiles, key tiles], of which the first `count` are valid in each row.
    """

    partial_counts: NDArray[np.int32]
    partial: NDArray[np.int32]
    full_counts: NDArray[np.int32]
    full: NDArray[np.int32]


def attention_by_tiles(pack: Pack, block_size: int, attention: FlexAttention | None = None) -> Attend:
    """Return the attention of `pack`'s blocks, whose anchors are sorted, as tiles of rows and keys.

    Args:
        attention: what computes it; default: flex attention, compiled once for each size.
    """
    attention = attention or compiled_flex_attention()
    tokens, rows = len(pack.input_ids), len(pack.anchors) * block_size
    context_length, padded_rows = padded_length(tokens), padded_length(rows)

    @cache
    def mask_of(window: int | None) -> BlockMask:
        return tiled_mask(pack, block_size, window)

    def join(of_context: Tensor, of_blocks: Tensor) -> Tensor:
        gap, tail = (
            of_blocks.new_zeros(*of_blocks.shape[:2], count, of_blocks.shape[-1])
            for count in (context_length - tokens, padded_rows - rows)
        )
        return torch.cat((of_context.to(of_blocks.dtype), gap, of_blocks, tail), dim=2)

    def attend(queries: Tensor, context: KeysValues, block: KeysValues, window: int | None) -> Tensor:
        # Under autocast the norms give fp32 and the projections bf16; attention is computed in the latter.
        dtype = block.values.dtype
        queries = torch.nn.functional.pad(queries.to(dtype), (0, 0, 0, padded_rows - rows))
        keys, values = join(context.keys, block.keys.to(dtype)), join(context.values, block.values)
        return attention(queries, keys, values, mask_of(window))[:, :, :rows]

    return attend


def tiled_mask(pack: Pack, block_size: int, window: int | None = None) -> BlockMask:
    """Return the mask of `pack`'s blocks, over the padded rows and the padded [context | block rows].

    Args:
        window: positions that a row of a sliding-window layer sees, itself included; None: a full layer.
    """
    device = pack.input_ids.device
    context_length = padded_length(len(pack.input_ids))
    rows = padded_length(len(pack.anchors) * block_size)
    padding = (0, -(-rows // block_size) - len(pack.anchors))
    # Blocks of padding begin and end at row 0: they see nothing of the context.
    starts, anchors = (np.pad(stretch, padding) for stretch in (pack.starts().numpy(), pack.on_host.anchors.numpy()))
    lists = tile_lists(starts, anchors, len(pack.anchors), block_size, context_length, rows, window)
    on_device, counts_and_tiles = (
        [to_device(torch.from_numpy(array), device) for array in arrays] for arrays in ((starts, anchors), lists)
    )

    def mask_mod(_batch: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return is_visible_by_index(row, key, on_device[0], on_device[1], context_length, block_size, window)

    partial_counts, partial, full_counts, full = (each[None, None] for each in counts_and_tiles)
    return BlockMask.from_kv_blocks(
        partial_counts,
        partial,
        full_counts,
        full,
        BLOCK_SIZE=TILE,
        mask_mod=mask_mod,
        seq_lengths=(rows, context_length + rows),
    )


def tile_lists(
    starts: NDArray[np.int64],
    anchors: NDArray[np.int64],
    blocks: int,
    block_size: int,
    context_length: int,
    rows: int,
    window: int | None = None,
) -> TileLists:
    """List the tiles that blocks of rows see; with a window, those at its edge always as seen in part.

    Args:
        starts, anchors: [blocks with padding], the context rows that each block sees: from, up to and without.
        blocks: how many of them are real.
        block_size: rows of a block.
        context_length, rows: multiples of TILE, with padding.
    """
    first_key = np.arange(0, context_length + rows, TILE)
    real = np.arange(len(starts)) < blocks
    own = context_length + np.arange(len(starts)) * block_size
    # What some row of a block sees, and what all of its rows see.
    some = [(starts, anchors), (own, own + block_size * real)]
    every = some
    if window is not None:
        some = [(np.maximum(starts, anchors - window + 1), anchors), some[1]]
        every = [(np.maximum(starts, anchors + block_size - window), anchors)]
    touched, covered = (np.zeros((len(starts) + 1, len(first_key)), dtype=np.int32) for _ in range(2))
    for begins, ends in some:
        begin, end = begins[:, None], ends[:, None]
        touched[1:] += (begin < end) & (begin < first_key + TILE) & (first_key < end)
    for begins, ends in every:
        covered[1:] += (begins[:, None] <= first_key) & (first_key + TILE <= ends[:, None])
    # A tile of rows may begin and end inside a block: how many of its blocks see a tile is a difference of sums.
    row = np.arange(0, rows, TILE)
    first, last = row // block_size, np.minimum((row + TILE - 1) // block_size, len(starts) - 1) + 1
    seen, seen_wholly = (sums[last] - sums[first] for sums in (touched.cumsum(0), covered.cumsum(0)))
    full = seen_wholly == (last - first)[:, None]
    return TileLists(*_ordered((seen > 0) & ~full), *_ordered(full))


def padded_length(length: int) -> int:
    """Return the next of a few multiples of TILE: at most a quarter more, and four sizes for each doubling."""
    tiles = max(-(-length // TILE), 1)
    step = 1 << max(tiles.bit_length() - 3, 0)
    return -(-tiles // step) * step * TILE


def plain_flex_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: BlockMask) -> Tensor:
    """Flex attention as it is: not compiled, it makes all scores at once, and is for small sizes only."""
    # What computes in half precision is decided by who calls; autocast would decide again.
    with torch.autocast(queries.device.type, enabled=False):
        out = flex_attention(queries, keys, values, block_mask=mask, enable_gqa=queries.shape[1] != keys.shape[1])
    assert isinstance(out, Tensor)
    return out


@cache
def compiled_flex_attention() -> FlexAttention:
    """Flex attention, compiled for each size that it meets; a size too many is an error and never computed plainly."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_SIZES)
    return told_in_a_line(torch.compile(plain_flex_attention, dynamic=False, fullgraph=True))


def told_in_a_line(compiled: FlexAttention) -> FlexAttention:
    """Return `compiled`, whose failure to compile for a size that comes late is the user's to act on."""

    def attention(queries: Tensor, keys: Tensor, values: Tensor, mask: BlockMask) -> Tensor:
        try:
            return compiled(queries, keys, values, mask)
        except TorchDynamoException as error:
            size = f"{queries.shape[2]} rows and {keys.shape[2]} keys"
            reason = " ".join(str(error).split())[:200]
            raise DflashError(
                f"flex attention does not compile for {size} ({reason}): set attention: sdpa, and train on"
            ) from error

    return attention


def _ordered(tiles: NDArray[np.bool_]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return how many tiles are set in each row, and the numbers of all, those that are set first."""
    order = np.argsort(~tiles, axis=1, kind="stable")
    return tiles.sum(1, dtype=np.int32), order.astype(np.int32)
