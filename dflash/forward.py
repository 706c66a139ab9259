"""The drafter on the blocks of a pack, as in training."""

from __future__ import annotations

from torch import Tensor

from dflash.attention import attention_by_prefix
from dflash.model import Attend, DraftModel, KeysValues
from dflash.pack import Pack, block_inputs, block_positions
from dflash.target import TargetEnds


def forward_blocks(model: DraftModel, target: TargetEnds, pack: Pack, features: Tensor) -> Tensor:
    """Return the drafter's hidden states for every block of a pack: [blocks, block_size, hidden].

    Args:
        features: [tokens, taps * hidden], the target's features of the pack.
    """
    attend = attention_by_prefix(pack, model.architecture.block_size)
    return forward_with_context(model, target, pack, pack_context(model, pack, features), attend)


def pack_context(model: DraftModel, pack: Pack, features: Tensor) -> list[KeysValues]:
    """Return every layer's context keys and values of a pack, which all its blocks share."""
    return model.context(features[None], pack.positions[None])


def forward_with_context(
    model: DraftModel, target: TargetEnds, pack: Pack, context: list[KeysValues], attend: Attend
) -> Tensor:
    """Return the drafter's hidden states for the blocks of a pack: [blocks, block_size, hidden].

    Args:
        context: from `pack_context`; it may be of a pack with more blocks.
        attend: the attention of this pack's blocks.
    """
    block_size = model.architecture.block_size
    inputs = block_inputs(pack, target.embedding, block_size, model.architecture.mask_token_id)
    hidden: Tensor = model(
        inputs.to(model.fc.weight.dtype).flatten(0, 1)[None],
        block_positions(pack, block_size).flatten()[None],
        context,
        attend,
    )
    return hidden.view(len(pack.anchors), block_size, -1)
