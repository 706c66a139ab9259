"""Which keys a block row may see: the one rule of training and decoding, for full and sliding-window layers.

Keys are [context rows | block rows], queries are the block rows. A row of block j sees
- the context rows of its own document strictly before the block's anchor (when decoding, the target has not
  yet computed the anchor's own feature, so seeing it in training would be a leak), and
- all rows of its own block, in both directions.

In a sliding-window layer a row sees itself and the window - 1 positions before it: of the context only those, and of
its own block no later row. That is the rule of SGLang, of z-lab's dflash and of SpecForge; speculators lets all rows of
a block see the same stretch of the context.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_visible(
    query: int, key: int, documents: list[int], anchors: list[int], block_size: int, window: int | None = None
) -> bool:
    """The rule for one element, in plain words: the reference that `block_mask` is tested against.

    Args:
        query: index of a block row.
        key: index into [context rows | block rows].
        documents: the document of each context row; -1 for padding.
        anchors: the context row of each block's anchor.
        block_size: rows of a block.
        window: positions that a row of a sliding-window layer sees, itself included; None: a full layer.
    """
    block, row = divmod(query, block_size)
    anchor = anchors[block]
    if key >= len(documents):
        other, position = divmod(key - len(documents), block_size)
        if other != block:
            return False
        distance = row - position
    else:
        if documents[key] == -1 or documents[key] != documents[anchor] or key >= anchor:
            return False
        distance = anchor + row - key
    return window is None or 0 <= distance < window


def visible_context(keys: Tensor, anchors: Tensor, block_size: int, window: int | None) -> Tensor:
    """Return which context rows of their own document blocks see: bool [blocks, block_size, keys].

    In a full layer the rows of a block see the same, and there is one for all of them: [blocks, 1, keys].

    Args:
        keys: int [keys], context rows.
        anchors: int [blocks], in the same count.
    """
    visible = keys < anchors[:, None, None]
    if window is None:
        return visible
    rows = anchors[:, None] + torch.arange(block_size, device=anchors.device)
    return visible & (keys > rows[..., None] - window)


def visible_in_block(block_size: int, window: int | None, device: torch.device) -> Tensor:
    """Return which rows of its own block a row sees: bool [block_size, block_size]; [1, block_size] in a full layer."""
    visible = torch.ones(1 if window is None else block_size, block_size, dtype=torch.bool, device=device)
    return visible if window is None else visible.tril().triu(1 - window)


def own_blocks(blocks: int, block_size: int, window: int | None, device: torch.device) -> Tensor:
    """Return which rows of some blocks a row of each sees: bool [blocks, block_size, blocks * block_size].

    In a full layer there is one row for all of a block: [blocks, 1, blocks * block_size].
    """
    own = torch.eye(blocks, dtype=torch.bool, device=device)[:, None, :, None]
    return (own & visible_in_block(block_size, window, device)[None, :, None]).flatten(2)


def block_mask(documents: Tensor, anchors: Tensor, block_size: int, window: int | None = None) -> Tensor:
    """Build the mask of a pack: bool [blocks * block_size, context + blocks * block_size], True where visible.

    Args:
        documents: int [context], the document of each context row; -1 for padding, which nobody sees.
        anchors: int [blocks], the context row of each block's anchor.
        block_size: rows of a block.
        window: positions that a row of a sliding-window layer sees, itself included; None: a full layer.
    """
    rows = torch.arange(len(documents), device=documents.device)
    same_document = (documents[None] == documents[anchors][:, None]) & (documents >= 0)[None]
    context = same_document[:, None] & visible_context(rows, anchors, block_size, window)
    own = own_blocks(len(anchors), block_size, window, documents.device)
    return torch.cat((context, own), dim=2).expand(-1, block_size, -1).flatten(0, 1)


def decoding_mask(lengths: Tensor, block_size: int, window: int | None = None) -> Tensor:
    """Build the mask of a batch of documents, each decoding a block after its own rows, which begin at 0.

    Args:
        lengths: int [batch], rows of each document so far: the position of the block's anchor.

    Returns bool [batch, 1, block_size, longest + block_size]; in a full layer, where all rows of a block see the same,
    [batch, 1, 1, longest + block_size].
    """
    keys = torch.arange(int(lengths.max()), device=lengths.device)
    context = visible_context(keys, lengths, block_size, window)
    own = visible_in_block(block_size, window, lengths.device).expand(len(lengths), -1, -1)
    return torch.cat((context, own), dim=2)[:, None]


def is_visible_by_index(
    row: Tensor,
    key: Tensor,
    starts: Tensor,
    anchors: Tensor,
    context_length: int,
    block_size: int,
    window: int | None = None,
) -> Tensor:
    """The rule for block rows and keys given by index, broadcast together: what flex attention evaluates.

    Args:
        starts, anchors: int [blocks], the first context row of each block's document, and its anchor.
        context_length: context rows; the block rows' keys come after them.
        block_size: rows of a block.
        window: positions that a row of a sliding-window layer sees, itself included; None: a full layer.
    """
    block, own_key = row // block_size, key - context_length
    of_context = (starts[block] <= key) & (key < anchors[block])
    of_block = (own_key >= 0) & (own_key // block_size == block)
    if window is not None:
        # Within a block the distance is that of the indices, as both rows are of the same one.
        of_context = of_context & (key > anchors[block] + row % block_size - window)
        of_block = of_block & (own_key <= row) & (own_key > row - window)
    return of_context | of_block
