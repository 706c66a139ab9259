"""Decoding many prompts at once: the same tokens as `decode`, which is the plain reference.

A pass over one short block is bound by reading the weights; a batch reads them once for all its prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from dflash.config import Sampling
from dflash.decode import GreedyOutput, SpeculativeOutput, as_row, cut_at_end, new_cache
from dflash.mask import decoding_mask
from dflash.model import DraftModel, KeysValues, masked_attention
from dflash.ragged import RaggedLayer, causal_mask, stack_rows, write_rows
from dflash.sampling import Draws, distribution, draw, keep_drawn
from dflash.target import Target, TargetOutput, forward_with_cache, head_logits


@torch.no_grad()
def greedy_decode_batch(target: Target, prompts: list[list[int]], max_new_tokens: int) -> list[GreedyOutput]:
    """Decode with the target alone, one token of each prompt a pass. Raises DflashError for an empty prompt."""
    gaps: list[list[float]] = [[] for _ in prompts]

    def choose(rows: list[int], logits: Tensor) -> Tensor:
        best = torch.topk(logits.float(), 2).values
        for i, gap in zip(rows, (best[:, 0] - best[:, 1]).tolist(), strict=True):
            gaps[i].append(gap)
        # argmax, not topk: on equal logits the two may choose differently, and verification uses argmax.
        return logits.argmax(-1)

    answers = _decode_alone(target, prompts, max_new_tokens, choose)
    return [GreedyOutput(*pair) for pair in zip(answers, gaps, strict=True)]


@torch.no_grad()
def sampled_decode_batch(
    target: Target, prompts: list[list[int]], max_new_tokens: int, sampling: Sampling, draws: Draws
) -> list[list[int]]:
    """Sample with the target alone; `draws` has a stream for each prompt. Raises DflashError for an empty prompt."""

    def choose(rows: list[int], logits: Tensor) -> Tensor:
        return draw(distribution(logits, sampling), draws.uniform(rows, 1)[:, 0])

    return _decode_alone(target, prompts, max_new_tokens, choose)


@torch.no_grad()
def speculative_decode_batch(
    target: Target,
    draft: DraftModel,
    prompts: list[list[int]],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    draws: Draws | None = None,
) -> list[SpeculativeOutput]:
    """Decode with `draft` guessing and `target` verifying a block of each prompt a pass.

    Args:
        sampling: None: greedily.
        draws: a stream of numbers for each prompt, with `sampling`.

    Raises DflashError for an empty prompt.
    """
    slots = draft.architecture.block_size - 1
    batch, logits = _prefill(target, draft, prompts, max_new_tokens)
    if sampling is None or draws is None:
        first = logits.argmax(-1)
    else:
        first = draw(distribution(logits, sampling), draws.uniform(batch.prompts, 1)[:, 0])
    answers: list[list[int]] = [[choice] for choice in first.tolist()]
    acceptance_lengths: list[list[int]] = [[] for _ in prompts]
    batch = batch.without(_finished(target, batch, answers, max_new_tokens))
    while batch.prompts:
        anchors = torch.tensor([answers[i][-1] for i in batch.prompts], device=target.device)
        logits, q = _guess_logits(target, draft, anchors, batch), None
        guesses = logits.argmax(-1)
        if sampling is not None and draws is not None and sampling.guessing == "sampled":
            q = distribution(logits, sampling)
            guesses = draw(q, draws.uniform(batch.prompts, slots))
        blocks = torch.cat((anchors[:, None], guesses), dim=1)
        verified = _pass(target, batch, blocks, draft.architecture.target_layer_ids)
        if sampling is None or draws is None:
            choices = verified.logits.argmax(-1)
            accepted = (guesses == choices[:, :-1]).long().cumprod(dim=1).sum(dim=1)
            bonus = choices.gather(1, accepted[:, None])[:, 0]
        else:
            uniforms = draws.uniform(batch.prompts, slots + 1)
            accepted, bonus = keep_drawn(guesses, q, distribution(verified.logits, sampling), uniforms)
        _add_context(draft, batch, verified.features)
        batch.lengths += accepted + 1
        rows = zip(batch.prompts, guesses.tolist(), accepted.tolist(), bonus.tolist(), strict=True)
        for i, guessed, count, last in rows:
            kept = cut_at_end([*guessed[:count], last], max_new_tokens - len(answers[i]), target)
            answers[i] += kept
            acceptance_lengths[i].append(len(kept))
        batch = batch.without(_finished(target, batch, answers, max_new_tokens))
    return [SpeculativeOutput(*pair) for pair in zip(answers, acceptance_lengths, strict=True)]


def _decode_alone(
    target: Target, prompts: list[list[int]], max_new_tokens: int, choose: Callable[[list[int], Tensor], Tensor]
) -> list[list[int]]:
    """Decode with the target alone; `choose` gets the prompts' indices and logits [rows, vocabulary]."""
    batch, logits = _prefill(target, None, prompts, max_new_tokens)
    answers: list[list[int]] = [[] for _ in prompts]
    while True:
        for i, choice in zip(batch.prompts, choose(batch.prompts, logits).tolist(), strict=True):
            answers[i].append(choice)
        batch = batch.without(_finished(target, batch, answers, max_new_tokens))
        if not batch.prompts:
            return answers
        last = [answers[i][-1:] for i in batch.prompts]
        logits = _pass(target, batch, torch.tensor(last, device=target.device), ()).logits[:, -1]
        batch.lengths += 1


@dataclass
class _Batch:
    """Prompts still being decoded (indices into the caller's list) and their caches, which share `lengths`."""

    prompts: list[int]
    lengths: Tensor
    target_layers: list[KeysValues]
    draft_layers: list[KeysValues]

    def cache(self) -> Cache:
        return Cache(layers=[RaggedLayer(layer, self.lengths) for layer in self.target_layers])

    def without(self, finished: set[int]) -> _Batch:
        if not finished:
            return self
        stay = [row for row, prompt in enumerate(self.prompts) if prompt not in finished]
        return _Batch(
            [self.prompts[row] for row in stay],
            self.lengths[stay],
            [KeysValues(layer.keys[stay], layer.values[stay]) for layer in self.target_layers],
            [KeysValues(layer.keys[stay], layer.values[stay]) for layer in self.draft_layers],
        )


def _prefill(
    target: Target, draft: DraftModel | None, prompts: list[list[int]], max_new_tokens: int
) -> tuple[_Batch, Tensor]:
    """Run each prompt by itself, equal ones once; return the batch and the logits [prompts, vocabulary] after each."""
    taps = draft.architecture.target_layer_ids if draft else ()
    # The last pass may begin one token before the end, and its block reaches past it.
    capacity = max(map(len, prompts)) + max_new_tokens + (draft.architecture.block_size if draft else 1)
    passes: dict[tuple[int, ...], tuple[list[KeysValues], list[KeysValues], Tensor]] = {}
    for prompt in prompts:
        if tuple(prompt) in passes:
            continue
        cache = new_cache(target)
        output = forward_with_cache(target, as_row(prompt, target), cache, taps, logits_to_keep=1)
        layers: Any = cache.layers  # DynamicLayers, as new_cache makes sure, filled by the pass
        context = []
        if draft:
            positions = torch.arange(len(prompt), device=target.device)[None]
            context = draft.context(output.features.to(draft.fc.weight.dtype), positions)
        rows = [KeysValues(layer.keys, layer.values) for layer in layers]
        passes[tuple(prompt)] = rows, context, output.logits[0, -1]
    target_layers, draft_layers, logits = zip(*(passes[tuple(prompt)] for prompt in prompts), strict=True)
    batch = _Batch(
        list(range(len(prompts))),
        torch.tensor([len(prompt) for prompt in prompts], device=target.device),
        [stack_rows(list(documents), capacity) for documents in zip(*target_layers, strict=True)],
        [stack_rows(list(documents), capacity) for documents in zip(*draft_layers, strict=True)],
    )
    return batch, torch.stack(logits)


def _pass(target: Target, batch: _Batch, rows: Tensor, taps: tuple[int, ...]) -> TargetOutput:
    """Run the target on `rows` [batch, count] after each document's own length."""
    count = rows.shape[1]
    return forward_with_cache(
        target,
        rows,
        batch.cache(),
        taps,
        attention_mask=causal_mask(batch.lengths, count),
        position_ids=_positions(batch.lengths, count),
    )


def _guess_logits(target: Target, draft: DraftModel, anchors: Tensor, batch: _Batch) -> Tensor:
    """Return the drafter's logits [batch, block_size - 1, vocabulary] after each anchor, all from one pass."""
    shape = draft.architecture
    masks = anchors.new_full((len(anchors), shape.block_size - 1), shape.mask_token_id)
    inputs = target.embedding(torch.cat((anchors[:, None], masks), dim=1)).to(draft.fc.weight.dtype)
    longest = int(batch.lengths.max())
    context = [KeysValues(layer.keys[:, :, :longest], layer.values[:, :, :longest]) for layer in batch.draft_layers]
    attend = masked_attention(partial(decoding_mask, batch.lengths, shape.block_size))
    hidden = draft(inputs, _positions(batch.lengths, shape.block_size), context, attend)[:, 1:]
    return head_logits(target, hidden)


def _add_context(draft: DraftModel, batch: _Batch, features: Tensor) -> None:
    positions = _positions(batch.lengths, features.shape[1])
    new = draft.context(features.to(draft.fc.weight.dtype), positions)
    for buffers, rows in zip(batch.draft_layers, new, strict=True):
        write_rows(buffers, rows, batch.lengths)


def _positions(lengths: Tensor, count: int) -> Tensor:
    return lengths[:, None] + torch.arange(count, device=lengths.device)


def _finished(target: Target, batch: _Batch, answers: list[list[int]], max_new_tokens: int) -> set[int]:
    return {i for i in batch.prompts if len(answers[i]) >= max_new_tokens or answers[i][-1] in target.end_token_ids}
