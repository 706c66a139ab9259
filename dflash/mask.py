"""Which keys a block row may see in training, where many blocks of many documents share one pass.

Keys are [context rows | block rows], queries are the block rows. A row of block j sees
- the context rows of its own document strictly before the block's anchor (when decoding, the target has not
  yet computed the anchor's own feature, so seeing it in training would be a leak), and
- all rows of its own block, in both directions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_visible(query: int, key: int, documents: list[int], anchors: list[int], block_size: int) -> bool:
    """The rule for one element, in plain words: the reference that `block_mask` is tested against.

    Args:
        query: index of a block row.
        key: index into [context rows | block rows].
        documents: the document of each context row; -1 for padding.
        anchors: the context row of each block's anchor.
        block_size: rows of a block.
    """
    block = query // block_size
    if key >= len(documents):
        return (key - len(documents)) // block_size == block
    anchor = anchors[block]
    return documents[key] != -1 and documents[key] == documents[anchor] and key < anchor


def block_mask(documents: Tensor, anchors: Tensor, block_size: int) -> Tensor:
    """Build the mask [blocks * block_size, context + blocks * block_size], True where visible.

    Args:
        documents: int [context], the document of each context row; -1 for padding, which nobody sees.
        anchors: int [blocks], the context row of each block's anchor.
        block_size: rows of a block.
    """
    device = documents.device
    rows = torch.arange(len(documents), device=device)
    same_document = (documents[None] == documents[anchors][:, None]) & (documents >= 0)[None]
    context = same_document & (rows[None] < anchors[:, None])
    own_block = torch.eye(len(anchors), dtype=torch.bool, device=device).repeat_interleave(block_size, dim=1)
    return torch.cat((context, own_block), dim=1).repeat_interleave(block_size, dim=0)


def is_visible_in_stretches(
    row: Tensor, key: Tensor, starts: Tensor, anchors: Tensor, context_length: int, block_size: int
) -> Tensor:
    """The rule for block rows and keys given by index, broadcast together: what flex attention evaluates.

    Args:
        starts, anchors: int [blocks], the first context row of each block's document, and its anchor.
        context_length: context rows; the block rows' keys come after them.
        block_size: rows of a block.
    """
    block = row // block_size
    of_context = (starts[block] <= key) & (key < anchors[block])
    return of_context | ((key >= context_length) & ((key - context_length) // block_size == block))
