"""What a drafter is trained on: losses of each block's guesses, under a frozen head.

Slot k of a block (k = 0 is the anchor) predicts the token at anchor + k, with no shift. With q the drafter's
distribution at slot k, p the target's at position anchor + k - 1, y the token and alpha = sum(min(p, q)):

    ce         -log q(y)                                           DFlash paper
    dpace      -log q(y), weighted by D-PACE instead of decay      arXiv 2605.18810
    kl         sum(p * log(p / q))
    tv         1 - alpha, the chance that a sampled guess is rejected
    lk_alpha   -log(max(alpha, 1e-5))                              arXiv 2602.23881
    lk_lambda  l * kl + (1 - l) * tv, l = exp(-eta * alpha)        arXiv 2602.23881; l is a constant to the gradient

All but dpace are weighted by w = exp(-(k - 1) / gamma) and divided by sum(w). dpace weighs slot k by the sum over the
labelled slots i >= k of the product of (1 - a) * q_j(y_j) + a over the labelled slots j <= i, a constant to the
gradient, and divides by the number of blocks with a label. Peers differ in what they divide by: SpecForge divides
dpace by the number of sequences, speculators everything by the number of labels; the values by slot are the same.
speculators' `ce` predicts the target's most likely token, ours the data's.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash.config import ObjectiveConfig
from dflash.transfer import to_device

LEAST_ALPHA = 1e-5
# Logits of one chunk: what a CPU's cache nearly holds, and on CUDA enough rows to keep the card busy.
CHUNK_BYTES = {False: 2**26, True: 2**30}
TERMS = ("ce", "dpace", "kl", "tv", "lk_alpha", "lk_lambda")


class Labels(NamedTuple):
    """Targets of block slots, all [blocks, block_size].

    Token ids; decay weights (fp32; zero: not a label); and the row of the pack that holds the token.
    """

    ids: Tensor
    weights: Tensor
    rows: Tensor


class LabelTotals(NamedTuple):
    """What losses are divided by: the sum of the decay weights, and the number of blocks with a label."""

    decay: float
    blocks: float

    @classmethod
    def of(cls, labels: Labels) -> LabelTotals:
        """The totals of some blocks."""
        return cls(float(labels.weights.sum()), float((labels.weights > 0).any(-1).sum()))


class BlockLoss(NamedTuple):
    """The loss (scalar with gradient), and without gradient each term's value and each label's hit (bool)."""

    loss: Tensor
    terms: dict[str, Tensor]
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
    return Labels(input_ids[rows], supervised.float() * decay[None], rows)


def reference_block_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Labels,
    objective: ObjectiveConfig,
    teacher: Tensor | None = None,
    totals: LabelTotals | None = None,
) -> BlockLoss:
    """The objective as written above, with all logits at once: what `chunked_block_loss` is tested against.

    Args:
        hidden: [blocks, block_size, hidden], the drafter's normed output.
        head: [vocabulary, hidden], the target's frozen output weights.
        labels: from `block_labels`.
        objective: the weight of each term.
        teacher: [tokens, hidden], the target's normed last hidden states of the pack; for kl, tv and lk only.
        totals: of the whole step; default: of `labels` alone.
    """
    totals = totals or LabelTotals.of(labels)
    logits = hidden.float() @ head.float().T
    log_q = logits.log_softmax(-1)
    labelled = labels.weights > 0
    decay = labels.weights / totals.decay
    values = {"ce": -log_q.gather(-1, labels.ids[..., None]).squeeze(-1)}
    values["dpace"] = values["ce"]
    if teacher is not None:
        log_p = (teacher[labels.rows - 1].float() @ head.float().T).log_softmax(-1)
        alpha = torch.minimum(log_p.exp(), log_q.exp()).sum(-1)
        values["kl"] = (log_p.exp() * (log_p - log_q)).sum(-1)
        values["tv"] = 1 - alpha
        values["lk_alpha"] = -alpha.clamp(min=LEAST_ALPHA).log()
        share = torch.exp(-objective.lk_eta * alpha.detach())
        values["lk_lambda"] = share * values["kl"] + (1 - share) * values["tv"]
    dpace = dpace_weights(values["ce"].detach(), labelled, objective.dpace_alpha) / totals.blocks
    terms = {
        name: (torch.where(labelled, values[name], 0.0) * (dpace if name == "dpace" else decay)).sum()
        for name, weight in term_weights(objective).items()
        if weight
    }
    loss = torch.stack([term_weights(objective)[name] * value for name, value in terms.items()]).sum()
    correct = (logits.argmax(-1) == labels.ids)[labelled]
    return BlockLoss(loss, {name: value.detach() for name, value in terms.items()}, correct)


def term_weights(objective: ObjectiveConfig) -> dict[str, float]:
    """Return the weight of each of TERMS."""
    return {name: float(getattr(objective, name)) for name in TERMS}


def dpace_weights(cross_entropy: Tensor, labelled: Tensor, alpha: float) -> Tensor:
    """Return D-PACE's weights [blocks, slots] of `cross_entropy`; slots that are not `labelled` (bool) get zero."""
    confidence = (1 - alpha) * torch.exp(-cross_entropy) + alpha
    reached = torch.where(labelled, confidence, 1.0).cumprod(-1) * labelled
    return reached.flip(-1).cumsum(-1).flip(-1) * labelled


def default_chunk_blocks(block_size: int, vocabulary: int, device: torch.device) -> int:
    """Return how many blocks have CHUNK_BYTES of fp32 logits on a device of this kind, at least one."""
    return max(CHUNK_BYTES[device.type == "cuda"] // (4 * vocabulary * block_size), 1)


def chunked_block_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Labels,
    objective: ObjectiveConfig,
    chunk_blocks: int,
    teacher: Tensor | None = None,
    totals: LabelTotals | None = None,
) -> BlockLoss:
    """`reference_block_loss` in bounded memory: logits exist for `chunk_blocks` blocks at a time.

    Only labelled rows reach the head. As the head is frozen, the gradient of the rows is computed in the forward
    pass while the chunk's logits are at hand, so nothing is recomputed. With labels in the host's memory nothing waits
    for the device.

    Args:
        totals: what the loss is divided by, where these blocks are a part of more; default: these blocks' own.
    """
    host = Labels(*(tensor.cpu() for tensor in labels))
    labelled = host.weights > 0
    places = labelled.flatten().nonzero()[:, 0]
    wanted = _LabelledRows(
        to_device(places, hidden.device),
        to_device(host.ids[labelled], hidden.device),
        to_device(host.weights[labelled], hidden.device),
        to_device(host.rows[labelled], hidden.device),
        [0, *labelled.sum(-1).cumsum(0).tolist()],
        labelled.shape[1],
    )
    rows = hidden.flatten(0, 1).index_select(0, wanted.places)
    loss, terms, correct = _FrozenHead.apply(  # type: ignore[no-untyped-call]
        rows, head, wanted, objective, chunk_blocks, teacher, totals or LabelTotals.of(host)
    )
    names = [name for name, weight in term_weights(objective).items() if weight]
    return BlockLoss(loss, dict(zip(names, terms, strict=True)), correct)


class _LabelledRows(NamedTuple):
    """What the labelled slots have to say: the first four are [labels], in order of the slots.

    Place among all slots; token id; decay weight; row of the pack that holds the token. `ends[b]` is the number of
    labels before block b.
    """

    places: Tensor
    ids: Tensor
    weights: Tensor
    rows: Tensor
    ends: list[int]
    block_size: int


class _FrozenHead(torch.autograd.Function):
    """The objective of labelled rows [labels, hidden], whose gradient is made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        head: Tensor,
        labels: _LabelledRows,
        objective: ObjectiveConfig,
        chunk_blocks: int,
        teacher: Tensor | None,
        totals: LabelTotals,
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = {name: weight for name, weight in term_weights(objective).items() if weight}
        sums = dict.fromkeys(weights, rows.new_zeros((), dtype=torch.float32))
        gradient = torch.empty_like(rows)
        correct = torch.empty(len(rows), dtype=torch.bool, device=rows.device)
        blocks = len(labels.ends) - 1
        bounds = [labels.ends[min(first, blocks)] for first in range(0, blocks + chunk_blocks, chunk_blocks)]
        # One buffer for all chunks: fresh pages cost the CPU more than the softmax that fills them.
        largest = max(end - begin for begin, end in pairwise(bounds))
        buffer = rows.new_empty(largest, len(head), dtype=torch.float32)
        for number, (begin, end) in enumerate(pairwise(bounds)):
            part = slice(begin, end)
            logits = _logits(rows[part], head, buffer[: end - begin])
            ids = labels.ids[part, None]
            decay = labels.weights[part] / totals.decay
            log_p = None
            if objective.needs_teacher:
                assert teacher is not None
                log_p = _logits(teacher[labels.rows[part] - 1], head).log_softmax(-1)
                correct[part] = logits.argmax(-1) == ids[:, 0]
                log_q = logits.log_softmax(-1)
                cross_entropy = -log_q.gather(-1, ids)[:, 0]
            else:
                cross_entropy, correct[part] = _softmax_in_place(logits, ids)
            # The loss is a sum over rows of c * -log q(y), of k * KL and of t * -alpha, up to constants: its slope
            # by the logits is (c + k) * q - c * onehot - k * p - t * q * (below - sum(below * q)).
            c = decay * weights.get("ce", 0.0)
            if "ce" in weights:
                sums["ce"] = sums["ce"] + (cross_entropy * decay).sum()
            if "dpace" in weights:
                share = _dpace_shares(cross_entropy, labels, part, number * chunk_blocks, chunk_blocks, objective)
                share = share / totals.blocks
                sums["dpace"] = sums["dpace"] + (cross_entropy * share).sum()
                c = c + share * weights["dpace"]
            if log_p is None:
                # The factor c comes after the product with the head, where there is far less to multiply.
                slope, factor = logits.scatter_add_(-1, ids, -torch.ones_like(c)[:, None]), c
            else:
                p, q = log_p.exp(), log_q.exp()
                alpha = torch.minimum(p, q).sum(-1)
                kl = (p * log_p.sub_(log_q)).sum(-1)
                k, t = _teacher_terms(weights, sums, objective, decay, alpha, kl)
                # Where p == q either side may count; half of each is what autograd takes.
                below = (q < p).float() + 0.5 * (q == p)
                below -= (below * q).sum(-1, keepdim=True)
                slope = q * ((c + k)[:, None] - t[:, None] * below) - k[:, None] * p
                slope.scatter_add_(-1, ids, -c[:, None])
                factor = torch.ones_like(c)
            gradient[part] = (slope.to(head.dtype) @ head).to(rows.dtype) * factor[:, None].to(rows.dtype)
        ctx.save_for_backward(gradient)
        terms = torch.stack(list(sums.values()))
        ctx.mark_non_differentiable(terms, correct)
        loss = torch.stack([weight * sums[name] for name, weight in weights.items()]).sum()
        return loss, terms, correct

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0].to(gradient.dtype), None, None, None, None, None, None


def _logits(rows: Tensor, head: Tensor, out: Tensor | None = None) -> Tensor:
    """Return fp32 logits, computed in the head's dtype."""
    rows = rows.to(head.dtype)
    if out is not None and out.dtype == head.dtype:
        return torch.mm(rows, head.T, out=out)
    logits = rows @ head.T
    return logits.float() if out is None else out.copy_(logits)


def _softmax_in_place(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Turn logits [rows, vocabulary] into probabilities; return the cross entropy of `ids` [rows, 1] and the hits."""
    best = logits.argmax(-1, keepdim=True)
    gap = (logits.gather(-1, best) - logits.gather(-1, ids))[:, 0]
    torch.softmax(logits, -1, out=logits)
    # The likeliest token's probability never underflows, as the label's may.
    return gap - logits.gather(-1, best)[:, 0].log(), (best == ids)[:, 0]


def _dpace_shares(
    cross_entropy: Tensor,
    labels: _LabelledRows,
    part: slice,
    first_block: int,
    blocks: int,
    objective: ObjectiveConfig,
) -> Tensor:
    """Return D-PACE's weights of the labels in `part`, which begin at block `first_block`."""
    size = labels.block_size
    places = labels.places[part] - first_block * size
    by_slot = cross_entropy.new_zeros(blocks * size).scatter(0, places, cross_entropy)
    labelled = torch.zeros_like(by_slot, dtype=torch.bool).index_fill(0, places, value=True)
    weights = dpace_weights(by_slot.view(blocks, size), labelled.view(blocks, size), objective.dpace_alpha)
    return weights.flatten().gather(0, places)


def _teacher_terms(
    weights: dict[str, float],
    sums: dict[str, Tensor],
    objective: ObjectiveConfig,
    decay: Tensor,
    alpha: Tensor,
    kl: Tensor,
) -> tuple[Tensor, Tensor]:
    """Add the rows' teacher terms to `sums`; return the factors of KL's slope and of -alpha's slope by row."""
    share = torch.exp(-objective.lk_eta * alpha)
    alive = alpha.clamp(min=LEAST_ALPHA)
    values = {
        "kl": kl,
        "tv": 1 - alpha,
        "lk_alpha": -alive.log(),
        "lk_lambda": share * kl + (1 - share) * (1 - alpha),
    }
    for name in values.keys() & weights.keys():
        sums[name] = sums[name] + (values[name] * decay).sum()
    k = weights.get("kl", 0.0) + weights.get("lk_lambda", 0.0) * share
    t = weights.get("tv", 0.0) + weights.get("lk_lambda", 0.0) * (1 - share)
    t = t + weights.get("lk_alpha", 0.0) * (alpha >= LEAST_ALPHA) / alive
    return decay * k, decay * t
