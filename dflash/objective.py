"""The block objective: cross entropy with exponentially falling position weights, under a frozen head.

Slot k of a block (k = 0 is the anchor) predicts the token at anchor + k, with no shift. Its weight is
exp(-(k - 1) / gamma) for k >= 1, zero where the position is outside the document or not supervised, and the
loss is sum(w * CE) / sum(w). (DFlash paper, section A.1 for gamma.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Labels(NamedTuple):
    """Targets of block rows, both [blocks, block_size]: token ids, and weights (fp32; zero: not a label)."""

    ids: Tensor
    weights: Tensor


class BlockLoss(NamedTuple):
    """The loss (scalar with gradient); each supervised row's cross entropy and whether its argmax hit."""

    loss: Tensor
    cross_entropy: Tensor
    correct: Tensor


def block_labels(
    input_ids: Tensor, loss_mask: Tensor, documents: Tensor, anchors: Tensor, block_size: int, gamma: float
) -> Labels:
    """Look up the labels of each block in a pack.

    Args:
        input_ids, loss_mask, documents: int [tokens], the pack's documents one after another.
        anchors: int [blocks], row of each anchor.
        block_size: rows of a block.
        gamma: decay of the position weights, in positions.
    """
    offsets = torch.arange(block_size, device=input_ids.device)
    rows = anchors[:, None] + offsets[None]
    inside = rows < len(input_ids)
    rows = rows.clamp(max=len(input_ids) - 1)
    # The next document of the pack follows at once: without this check a tail block would learn its tokens.
    inside &= documents[rows] == documents[anchors][:, None]
    supervised = inside & (loss_mask[rows] != 0) & (offsets > 0)[None]
    decay = torch.exp(-(offsets - 1).clamp(min=0).float() / gamma)
    return Labels(input_ids[rows], supervised.float() * decay[None])


def reference_block_loss(hidden: Tensor, head: Tensor, labels: Labels) -> BlockLoss:
    """The objective as written above, with all logits at once: what `chunked_block_loss` is tested against.

    Args:
        hidden: [blocks, block_size, hidden], the drafter's normed output.
        head: [vocabulary, hidden], the target's frozen output weights.
        labels: from `block_labels`.
    """
    logits = hidden.float() @ head.float().T
    cross_entropy = F.cross_entropy(logits.flatten(0, 1), labels.ids.flatten(), reduction="none")
    weights = labels.weights.flatten()
    kept = weights > 0
    correct = logits.argmax(-1).flatten() == labels.ids.flatten()
    loss = (cross_entropy * weights).sum() / weights.sum()
    return BlockLoss(loss, cross_entropy[kept].detach(), correct[kept])


def chunked_block_loss(hidden: Tensor, head: Tensor, labels: Labels, chunk_blocks: int) -> BlockLoss:
    """`reference_block_loss` in bounded memory: logits exist for `chunk_blocks` blocks at a time.

    Only supervised rows reach the head. As the head is frozen, the gradient of the rows is computed in the
    forward pass while the chunk's logits are at hand, so nothing is recomputed.
    """
    kept = labels.weights.flatten() > 0
    rows = hidden.flatten(0, 1)[kept]
    weights = labels.weights.flatten()[kept]
    weighted_sum, cross_entropy, correct = _FrozenHeadCrossEntropy.apply(  # type: ignore[no-untyped-call]
        rows, head, labels.ids.flatten()[kept], weights, chunk_blocks * (hidden.shape[1] - 1)
    )
    return BlockLoss(weighted_sum / weights.sum(), cross_entropy, correct)


class _FrozenHeadCrossEntropy(torch.autograd.Function):
    """sum(w * CE(rows @ head.T, ids)) whose gradient with respect to `rows` is made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, head: Tensor, ids: Tensor, weights: Tensor, chunk_rows: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient = torch.empty_like(rows)
        cross_entropy = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
        correct = torch.empty(len(rows), dtype=torch.bool, device=rows.device)
        for start in range(0, len(rows), chunk_rows):
            part = slice(start, start + chunk_rows)
            logits = (rows[part].to(head.dtype) @ head.T).float()
            label = ids[part, None]
            correct[part] = logits.argmax(-1) == ids[part]
            normalizer = logits.logsumexp(-1, keepdim=True)
            cross_entropy[part] = (normalizer - logits.gather(-1, label)).squeeze(-1)
            # From here on the buffer holds d(sum w * CE) / d logits = w * (softmax - onehot).
            slope = logits.sub_(normalizer).exp_()
            slope.scatter_add_(-1, label, slope.new_full(label.shape, -1.0))
            slope *= weights[part, None]
            gradient[part] = (slope.to(head.dtype) @ head).to(rows.dtype)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(cross_entropy, correct)
        return (cross_entropy * weights).sum(), cross_entropy, correct

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0].to(gradient.dtype), None, None, None, None
