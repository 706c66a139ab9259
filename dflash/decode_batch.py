"""Greedy decoding of many prompts at once: the same tokens as `decode`, which is the plain reference.

A pass over one short block is bound by reading the weights; a batch reads them once for all its prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from dflash.decode import GreedyOutput, SpeculativeOutput, as_row, cut_at_end, new_cache
from dflash.model import DraftModel, KeysValues, masked_attention
from dflash.ragged import RaggedLayer, block_mask, causal_mask, stack_rows, write_rows
from dflash.target import Target, TargetOutput, forward_with_cache


@torch.no_grad()
def greedy_decode_batch(target: Target, prompts: list[list[int]], max_new_tokens: int) -> list[GreedyOutput]:
    """Decode with the target alone, one token of each prompt a pass. Raises DflashError for an empty prompt."""
    batch, logits = _prefill(target, None, prompts, max_new_tokens)
    answers: list[list[int]] = [[] for _ in prompts]
    gaps: list[list[float]] = [[] for _ in prompts]
    while True:
        best = torch.topk(logits.float(), 2).values
        # argmax, not topk: on equal logits the two may choose differently, and verification uses argmax.
        for i, choice, gap in zip(
            batch.prompts, logits.argmax(-1).tolist(), (best[:, 0] - best[:, 1]).tolist(), strict=True
        ):
            answers[i].append(choice)
            gaps[i].append(gap)
        batch = batch.without(_finished(target, batch, answers, max_new_tokens))
        if not batch.prompts:
            return [GreedyOutput(*pair) for pair in zip(answers, gaps, strict=True)]
        last = [answers[i][-1:] for i in batch.prompts]
        logits = _pass(target, batch, torch.tensor(last, device=target.device), ()).logits[:, -1]
        batch.lengths += 1


@torch.no_grad()
def speculative_decode_batch(
    target: Target, draft: DraftModel, prompts: list[list[int]], max_new_tokens: int
) -> list[SpeculativeOutput]:
    """Decode with `draft` guessing and `target` verifying a block of each prompt a pass.

    Raises DflashError for an empty prompt.
    """
    batch, logits = _prefill(target, draft, prompts, max_new_tokens)
    answers: list[list[int]] = [[choice] for choice in logits.argmax(-1).tolist()]
    acceptance_lengths: list[list[int]] = [[] for _ in prompts]
    batch = batch.without(_finished(target, batch, answers, max_new_tokens))
    while batch.prompts:
        anchors = torch.tensor([answers[i][-1] for i in batch.prompts], device=target.device)
        blocks = torch.cat((anchors[:, None], _guesses(target, draft, anchors, batch)), dim=1)
        verified = _pass(target, batch, blocks, draft.architecture.target_layer_ids)
        choices = verified.logits.argmax(-1)
        accepted = (blocks[:, 1:] == choices[:, :-1]).long().cumprod(dim=1).sum(dim=1)
        _add_context(draft, batch, verified.features)
        batch.lengths += accepted + 1
        for i, count, chosen in zip(batch.prompts, accepted.tolist(), choices.tolist(), strict=True):
            # Accepted guesses are the target's own choices, so these are all that was kept, the bonus last.
            kept = cut_at_end(chosen[: count + 1], max_new_tokens - len(answers[i]), target)
            answers[i] += kept
            acceptance_lengths[i].append(len(kept))
        batch = batch.without(_finished(target, batch, answers, max_new_tokens))
    return [SpeculativeOutput(*pair) for pair in zip(answers, acceptance_lengths, strict=True)]


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
    """Run each prompt by itself; return the batch and the logits [prompts, vocabulary] after each prompt."""
    taps = draft.architecture.target_layer_ids if draft else ()
    # The last pass may begin one token before the end, and its block reaches past it.
    capacity = max(map(len, prompts)) + max_new_tokens + (draft.architecture.block_size if draft else 1)
    target_layers: list[list[KeysValues]] = []
    draft_layers: list[list[KeysValues]] = []
    logits = []
    for prompt in prompts:
        cache = new_cache(target)
        output = forward_with_cache(target, as_row(prompt, target), cache, taps, logits_to_keep=1)
        logits.append(output.logits[0, -1])
        layers: Any = cache.layers  # DynamicLayers, as new_cache makes sure, filled by the pass
        target_layers.append([KeysValues(layer.keys, layer.values) for layer in layers])
        if draft:
            positions = torch.arange(len(prompt), device=target.device)[None]
            draft_layers.append(draft.context(output.features.to(draft.fc.weight.dtype), positions))
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


def _guesses(target: Target, draft: DraftModel, anchors: Tensor, batch: _Batch) -> Tensor:
    """Return the drafter's guesses [batch, block_size - 1] after each anchor, all from one pass."""
    shape = draft.architecture
    masks = anchors.new_full((len(anchors), shape.block_size - 1), shape.mask_token_id)
    inputs = target.embedding(torch.cat((anchors[:, None], masks), dim=1)).to(draft.fc.weight.dtype)
    longest = int(batch.lengths.max())
    context = [KeysValues(layer.keys[:, :, :longest], layer.values[:, :, :longest]) for layer in batch.draft_layers]
    attend = masked_attention(block_mask(batch.lengths, shape.block_size))
    hidden = draft(inputs, _positions(batch.lengths, shape.block_size), context, attend)[:, 1:]
    guesses: Tensor = (hidden.to(target.head.dtype) @ target.head.T).argmax(-1)
    return guesses


def _add_context(draft: DraftModel, batch: _Batch, features: Tensor) -> None:
    positions = _positions(batch.lengths, features.shape[1])
    new = draft.context(features.to(draft.fc.weight.dtype), positions)
    for buffers, rows in zip(batch.draft_layers, new, strict=True):
        write_rows(buffers, rows, batch.lengths)


def _positions(lengths: Tensor, count: int) -> Tensor:
    return lengths[:, None] + torch.arange(count, device=lengths.device)


def _finished(target: Target, batch: _Batch, answers: list[list[int]], max_new_tokens: int) -> set[int]:
    return {i for i in batch.prompts if len(answers[i]) >= max_new_tokens or answers[i][-1] in target.end_token_ids}
