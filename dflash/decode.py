"""Decoding one prompt: the target alone, and the target verifying a drafter's blocks.

Speculative decoding is lossless. Greedily, a guess is kept only where it equals the target's own choice, and the first
wrong guess is replaced by that choice (the bonus token); `dflash.sampling` has the rule for sampled tokens. All loops
stop after an end token or `max_new_tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from dflash.config import Sampling
from dflash.errors import DflashError
from dflash.mask import decoding_mask
from dflash.model import DraftModel, KeysValues, masked_attention
from dflash.sampling import Draws, distribution, draw
from dflash.target import Target, forward_with_cache, head_logits


@dataclass(frozen=True)
class GreedyOutput:
    """What the target alone produces, and for each token the gap between its logit and the second best."""

    tokens: list[int]
    gaps: list[float]


@dataclass(frozen=True)
class SpeculativeOutput:
    """What target and drafter produce together.

    `acceptance_lengths` has one entry for each verification: the tokens kept from it, the bonus counted. The
    first token comes from the prompt's own pass, so len(tokens) == 1 + sum(acceptance_lengths).
    """

    tokens: list[int]
    acceptance_lengths: list[int]


def new_cache(target: Target) -> DynamicCache:
    """Return an empty cache whose newest entries can be dropped again.

    Raises DflashError for a target with layers that keep no entry per token (linear attention, sliding
    windows).
    """
    cache = DynamicCache(config=target.text_config)
    others = sorted({type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer})
    if others:
        raise DflashError(
            f"{target.path}: cannot be verified in blocks: rejected tokens cannot be taken out of its cache "
            f"({', '.join(others)})"
        )
    return cache


def why_no_blocks(target: Target) -> str | None:
    """Return why blocks cannot be verified with `target`, or None when they can."""
    try:
        new_cache(target)
    except DflashError as error:
        return str(error)
    return None


def greedy_decode(target: Target, prompt_ids: list[int], max_new_tokens: int) -> GreedyOutput:
    """Decode with the target alone, one token a pass. Raises DflashError for an empty prompt."""
    cache = DynamicCache(config=target.text_config)  # nothing is taken out of it: any target will do
    step = as_row(prompt_ids, target)
    tokens: list[int] = []
    gaps: list[float] = []
    while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in target.end_token_ids):
        logits = _next_logits(target, step, cache).float()
        best = torch.topk(logits, 2)
        # argmax, not topk: on equal logits the two may choose differently, and verification uses argmax.
        tokens.append(int(logits.argmax()))
        gaps.append(float(best.values[0] - best.values[1]))
        step = as_row(tokens[-1:], target)
    return GreedyOutput(tokens, gaps)


def sampled_decode(
    target: Target, prompt_ids: list[int], max_new_tokens: int, sampling: Sampling, draws: Draws
) -> list[int]:
    """Sample with the target alone, one token a pass; `draws` has one stream."""
    cache = DynamicCache(config=target.text_config)
    step = as_row(prompt_ids, target)
    tokens: list[int] = []
    while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in target.end_token_ids):
        tokens.append(_draw_one(distribution(_next_logits(target, step, cache), sampling), draws))
        step = as_row(tokens[-1:], target)
    return tokens


def speculative_decode(
    target: Target,
    draft: DraftModel,
    prompt_ids: list[int],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    draws: Draws | None = None,
) -> SpeculativeOutput:
    """Decode with `draft` guessing and `target` verifying. Raises DflashError for an empty prompt.

    Args:
        sampling: None: greedily.
        draws: one stream of numbers, with `sampling`.
    """
    taps = draft.architecture.target_layer_ids
    target_cache = new_cache(target)
    draft_cache = DraftCache(draft)
    prefill = forward_with_cache(target, as_row(prompt_ids, target), target_cache, taps, logits_to_keep=1)
    draft_cache.append(prefill.features)
    first = prefill.logits[0, -1]
    if sampling is None:
        tokens = [int(first.argmax())]
    else:
        assert draws is not None
        tokens = [_draw_one(distribution(first, sampling), draws)]
    acceptance_lengths: list[int] = []
    while len(tokens) < max_new_tokens and tokens[-1] not in target.end_token_ids:
        logits = guess_logits(target, draft, tokens[-1], draft_cache)
        q = None
        if sampling is None or draws is None or sampling.guessing == "greedy":
            guesses = logits.argmax(-1).tolist()
        else:
            q = distribution(logits, sampling)
            guesses = draw(q, draws.uniform([0], len(q))[0]).tolist()
        block = [tokens[-1], *guesses]
        verified = forward_with_cache(target, as_row(block, target), target_cache, taps)
        if sampling is None or draws is None:
            choices = verified.logits[0].argmax(-1).tolist()
            accepted = count_accepted(block, choices)
            bonus = choices[accepted]
        else:
            accepted, bonus = keep_one_by_one(guesses, q, distribution(verified.logits[0], sampling), draws)
        # The target now holds the whole block: what follows the last accepted guess goes out again.
        rejected = len(block) - 1 - accepted
        if rejected:
            target_cache.crop(-rejected)
        draft_cache.append(verified.features[:, : accepted + 1])
        kept = cut_at_end([*block[1 : accepted + 1], bonus], max_new_tokens - len(tokens), target)
        tokens += kept
        acceptance_lengths.append(len(kept))
    return SpeculativeOutput(tokens, acceptance_lengths)


def keep_one_by_one(guesses: list[int], q: Tensor | None, p: Tensor, draws: Draws) -> tuple[int, int]:
    """`sampling.keep_drawn` for one block, in plain words: the reference that it is tested against.

    Args:
        guesses: the block's guesses.
        q: [slots, vocabulary], what they were drawn from; None: they are the likeliest tokens.
        p: [slots + 1, vocabulary], the target's distributions.
        draws: gives one number for each guess and one for the token that follows.
    """
    *coins, last = draws.uniform([0], len(guesses) + 1)[0]
    for slot, (guessed, coin) in enumerate(zip(guesses, coins, strict=True)):
        guessed_from = torch.zeros_like(p[slot]) if q is None else q[slot]
        if q is None:
            guessed_from[guessed] = 1.0
        if not coin * guessed_from[guessed].double() < p[slot, guessed].double():
            rest = (p[slot] - guessed_from).clamp(min=0)
            return slot, int(draw(rest if rest.any() else p[slot], last))
    return len(guesses), int(draw(p[-1], last))


class DraftCache:
    """The context keys and values of every draft layer; block rows never enter it."""

    def __init__(self, draft: DraftModel) -> None:
        self._draft = draft
        self.length = 0
        self.layers: list[KeysValues] = []

    def append(self, features: Tensor) -> None:
        """Add the features [1, length, taps * hidden] of the next verified positions."""
        positions = torch.arange(self.length, self.length + features.shape[1], device=features.device)[None]
        with torch.no_grad():
            new = self._draft.context(features.to(self._draft.fc.weight.dtype), positions)
        self.length += features.shape[1]
        self.layers = [
            KeysValues(torch.cat((old.keys, more.keys), dim=2), torch.cat((old.values, more.values), dim=2))
            for old, more in zip(self.layers or [_empty(layer) for layer in new], new, strict=True)
        ]


@torch.no_grad()
def block_hidden(target: Target, draft: DraftModel, anchor: int, cache: DraftCache) -> Tensor:
    """Return the drafter's hidden states [block_size, hidden] for the block that `anchor` starts."""
    shape = draft.architecture
    block = as_row([anchor] + [shape.mask_token_id] * (shape.block_size - 1), target)
    positions = torch.arange(cache.length, cache.length + shape.block_size, device=block.device)[None]
    inputs = target.embedding(block).to(draft.fc.weight.dtype)

    def mask_of(window: int | None) -> Tensor | None:
        # Alone a full layer's block sees all that there is.
        return None if window is None else decoding_mask(positions[:, 0], shape.block_size, window)

    hidden: Tensor = draft(inputs, positions, cache.layers, masked_attention(mask_of))[0]
    return hidden


def guess_logits(target: Target, draft: DraftModel, anchor: int, cache: DraftCache) -> Tensor:
    """Return the drafter's logits [block_size - 1, vocabulary] for the tokens after `anchor`, all from one pass."""
    return head_logits(target, block_hidden(target, draft, anchor, cache)[1:])


def count_accepted(block: list[int], choices: list[int]) -> int:
    """Return how many guesses block[1:] lead with the target's own choices (choices[i] follows block[i])."""
    accepted = 0
    for guessed, choice in zip(block[1:], choices, strict=False):
        if guessed != choice:
            break
        accepted += 1
    return accepted


def cut_at_end(tokens: list[int], room: int, target: Target) -> list[int]:
    """Return at most `room` of `tokens`, none after an end token."""
    for i, token in enumerate(tokens[:room]):
        if token in target.end_token_ids:
            return tokens[: i + 1]
    return tokens[:room]


def _draw_one(probabilities: Tensor, draws: Draws) -> int:
    return int(draw(probabilities, draws.uniform([0], 1)[0, 0]))


def _next_logits(target: Target, input_ids: Tensor, cache: Any) -> Tensor:
    """Return the logits [vocabulary] after `input_ids`; those of a whole prompt would take gigabytes."""
    return forward_with_cache(target, input_ids, cache, (), logits_to_keep=1).logits[0, -1]


def as_row(ids: list[int], target: Target) -> Tensor:
    """Return `ids` as [1, length] where the target is. Raises DflashError when there are none."""
    if not ids:
        raise DflashError("a prompt has no tokens: decoding needs at least one")
    return torch.tensor([ids], device=target.device)


def _empty(like: KeysValues) -> KeysValues:
    return KeysValues(like.keys[:, :, :0], like.values[:, :, :0])
