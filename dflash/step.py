"""The gradient of one pack: the drafter forward, its loss, and backward, in bounded memory.

Blocks of a pack see the context and themselves, never each other, so the loss is a sum over blocks once its divisors
are known: groups of blocks go forward and backward one after another, and only the context's keys and values, which
they share, collect what all groups ask of them before their own backward pass.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from dflash.attention import PackAttention, attention_by_prefix
from dflash.config import TrainingConfig
from dflash.features import TargetStates
from dflash.forward import forward_with_context, pack_context
from dflash.limits import Limits, documents_at_once, limits_after
from dflash.mask import block_mask
from dflash.model import DraftModel, KeysValues, masked_attention
from dflash.objective import (
    BlockLoss,
    Labels,
    LabelTotals,
    block_labels,
    chunked_block_loss,
    reference_block_loss,
)
from dflash.pack import Pack
from dflash.target import TargetEnds


def accumulate_gradient(
    model: DraftModel,
    target: TargetEnds,
    pack: Pack,
    states: TargetStates,
    config: TrainingConfig,
    totals: LabelTotals | None = None,
    limits: Limits | None = None,
    attention: PackAttention = attention_by_prefix,
) -> tuple[BlockLoss, Labels]:
    """Add the gradient of a pack's loss to `model`'s parameters; return the loss, without its graph, and the labels.

    The labels are in the host's memory; nothing here waits for the device.

    Args:
        totals: what the loss is divided by, those of the whole step where the pack is one of several; default: the
            pack's own.
        limits: what may be in memory at once; default: as configured.
        attention: from `attention_choice.choose_attention`.
    """
    labels = labels_of(pack, config)
    totals = totals or LabelTotals.of(labels)
    limits = limits or limits_after(config, len(target.head), pack.input_ids.device, {})
    results = []
    first = 0
    lengths = pack.lengths()
    for documents in documents_at_once(lengths, limits.tokens_at_once):
        end = first + sum(lengths[documents])
        part = pack.with_documents(documents)
        if len(part.anchors):
            final = None if states.final is None else states.final[first:end]
            part_states = TargetStates(states.features[first:end], final)
            results += _accumulate_groups(model, target, part, part_states, config, totals, limits, attention)
        first = end
    return _add_up(results), labels


def _accumulate_groups(
    model: DraftModel,
    target: TargetEnds,
    pack: Pack,
    states: TargetStates,
    config: TrainingConfig,
    totals: LabelTotals,
    limits: Limits,
    attention: PackAttention,
) -> list[BlockLoss]:
    """Add the gradient of a pack's blocks, group by group, and return the loss of each group."""
    device = pack.input_ids.device
    block_size = config.draft.block_size
    labels = labels_of(pack, config)
    with _arithmetic(device, config):
        context = pack_context(model, pack, states.features)
    shared = [KeysValues(*(tensor.detach().requires_grad_() for tensor in layer)) for layer in context]
    results = []
    for blocks in block_groups(len(pack.anchors), block_size, limits.max_draft_rows):
        part = pack.with_blocks(blocks)
        with _arithmetic(device, config):
            hidden = forward_with_context(model, target, part, shared, attention(part, block_size))
        part_labels = Labels(*(tensor[blocks] for tensor in labels))
        result = chunked_block_loss(
            hidden, target.head, part_labels, config.objective, limits.loss_chunk_blocks, states.final, totals
        )
        del hidden
        result.loss.backward()  # type: ignore[no-untyped-call]
        results.append(result._replace(loss=result.loss.detach()))
    torch.autograd.backward(
        [tensor for layer in context for tensor in layer], [tensor.grad for layer in shared for tensor in layer]
    )
    return results


def reference_loss(
    model: DraftModel, target: TargetEnds, pack: Pack, states: TargetStates, config: TrainingConfig
) -> BlockLoss:
    """The loss of a pack, with its graph, the plain way: one mask, all rows and all logits at once.

    What `accumulate_gradient` is tested and measured against.
    """
    device = pack.input_ids.device
    block_size = config.draft.block_size
    labels = Labels(*(tensor.to(device) for tensor in labels_of(pack, config)))
    attend = masked_attention(partial(block_mask, pack.documents, pack.anchors, block_size))
    with _arithmetic(device, config):
        context = pack_context(model, pack, states.features)
        hidden = forward_with_context(model, target, pack, context, attend)
    return reference_block_loss(hidden, target.head, labels, config.objective, states.final)


def count_totals(packs: list[Pack], config: TrainingConfig) -> LabelTotals:
    """Return what the loss of a step of `packs` is divided by."""
    totals = [LabelTotals.of(labels_of(pack, config)) for pack in packs]
    return LabelTotals(sum(each.decay for each in totals), sum(each.blocks for each in totals))


def labels_of(pack: Pack, config: TrainingConfig) -> Labels:
    """Return the labels of a pack's blocks, in the host's memory."""
    host = pack.on_host
    return block_labels(
        host.input_ids,
        host.loss_mask,
        host.documents,
        host.anchors,
        config.draft.block_size,
        config.effective_gamma,
    )


def block_groups(blocks: int, block_size: int, max_draft_rows: int) -> list[slice]:
    """Cut `blocks` into as few groups as `max_draft_rows` allows, of sizes as equal as can be."""
    count = -(-blocks // (max_draft_rows // block_size))
    ends = [blocks * part // count for part in range(count + 1)]
    return [slice(first, end) for first, end in pairwise(ends)]


def _arithmetic(device: torch.device, config: TrainingConfig) -> AbstractContextManager[object]:
    """The drafter's arithmetic; the head, the target's, computes in the target's dtype."""
    if config.dtype == "bfloat16":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


def _add_up(results: list[BlockLoss]) -> BlockLoss:
    names = results[0].terms
    return BlockLoss(
        _sum([result.loss for result in results]),
        {name: _sum([result.terms[name] for result in results]) for name in names},
        torch.cat([result.correct for result in results]),
    )


def _sum(values: list[Tensor]) -> Tensor:
    return torch.stack(values).sum()
