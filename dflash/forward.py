"""The drafter on every block of a pack at once, as in training."""

from __future__ import annotations

from torch import Tensor

from dflash.mask import block_mask
from dflash.model import DraftModel
from dflash.pack import Pack, block_inputs, block_positions
from dflash.target import TargetEnds


def forward_blocks(model: DraftModel, target: TargetEnds, pack: Pack, features: Tensor) -> Tensor:
    """Return the drafter's hidden states for every block of a pack: [blocks, block_size, hidden].

    Args:
        features: [tokens, taps * hidden], the target's features of the pack.
    """
    block_size = model.architecture.block_size
    inputs = block_inputs(pack, target.embedding, block_size, model.architecture.mask_token_id)
    hidden: Tensor = model(
        inputs.to(model.fc.weight.dtype).flatten(0, 1)[None],
        block_positions(pack, block_size).flatten()[None],
        model.context(features[None], pack.positions[None]),
        block_mask(pack.documents, pack.anchors, block_size),
    )
    return hidden.view(len(pack.anchors), block_size, -1)
