"""The gradient of one pack: the drafter forward, its loss, and backward."""

from __future__ import annotations

import torch

from dflash.config import TrainingConfig
from dflash.features import TargetStates
from dflash.forward import forward_blocks
from dflash.model import DraftModel
from dflash.objective import BlockLoss, Labels, LabelTotals, block_labels, chunked_block_loss
from dflash.pack import Pack
from dflash.target import TargetEnds


def accumulate_gradient(
    model: DraftModel,
    target: TargetEnds,
    pack: Pack,
    states: TargetStates,
    config: TrainingConfig,
    totals: LabelTotals | None = None,
) -> tuple[BlockLoss, Labels]:
    """Add the gradient of a pack's loss to `model`'s parameters; return the loss, without its graph, and the labels.

    `totals` are those of the whole step where the pack is one of several.
    """
    result, labels = pack_loss(model, target, pack, states, config, totals)
    result.loss.backward()  # type: ignore[no-untyped-call]
    return result._replace(loss=result.loss.detach()), labels


def pack_loss(
    model: DraftModel,
    target: TargetEnds,
    pack: Pack,
    states: TargetStates,
    config: TrainingConfig,
    totals: LabelTotals | None = None,
) -> tuple[BlockLoss, Labels]:
    """Run the drafter on every block of a pack at once and return the loss (with gradient) and the labels."""
    block_size = model.architecture.block_size
    labels = block_labels(
        pack.input_ids, pack.loss_mask, pack.documents, pack.anchors, block_size, config.effective_gamma
    )
    with torch.autocast(pack.input_ids.device.type, torch.bfloat16, enabled=config.dtype == "bfloat16"):
        hidden = forward_blocks(model, target, pack, states.features)
        result = chunked_block_loss(
            hidden, target.head, labels, config.objective, config.loss_chunk_blocks, states.final, totals
        )
    return result, labels
