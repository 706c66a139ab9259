"""Exact acceptance of a drafter on answers that the target gave once, without decoding them again.

Greedy speculative decoding reproduces the target's answer, so every block that it can start begins at some token of
that answer and sees the features before it, whatever was guessed earlier. One pass drafts the block at every token at
once; where decoding goes follows from how far each block is right: from token i to token i + length(i), starting at
the first. So the acceptance length is what decoding would give, up to rounding in the target's passes, at the cost of
the drafter's pass alone, and two checkpoints are compared on the same answers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dflash.attention import attention_by_prefix
from dflash.data import Sample
from dflash.forward import forward_with_context, pack_context
from dflash.model import DraftModel
from dflash.pack import build_pack
from dflash.target import Target, head_logits

# As many candidates for each position as published selectors and draft trees choose among.
CANDIDATES = 16
# Blocks whose logits are in memory at once.
BLOCKS_AT_ONCE = 32

DEFINITIONS = {
    "acceptance_length": (
        "(tokens of the answers - 1 each) / verifications of the target: what greedy decoding with this drafter gives"
    ),
    "acceptance_by_position": "entry k - 1: share of verifications in which guesses 1 to k were all kept",
    "recall": f"share of all guesses, from every token of the answers, whose {CANDIDATES} likeliest hold the answer's",
    "oracle_length": (
        f"mean over every token of the answers of 1 + the guesses in a row whose {CANDIDATES} likeliest hold the "
        "answer's, up to its end: what choosing among them could reach, as acceptance_length counts"
    ),
}


class Answer(NamedTuple):
    """A prompt and what the target alone answers to it, greedily, both as token ids."""

    prompt_ids: list[int]
    tokens: list[int]

    @property
    def sample(self) -> Sample:
        """Both as one document of which the answer is supervised."""
        mask = [0] * len(self.prompt_ids) + [1] * len(self.tokens)
        return Sample(np.array(self.prompt_ids + self.tokens, dtype=np.int64), np.array(mask, dtype=np.int8))


class Guesses(NamedTuple):
    """Bool [starts, block_size - 1]: for a block at every token of an answer but the last, whether guess k is the
    answer's token, and whether that is among the CANDIDATES likeliest. False past the answer's end.
    """

    right: Tensor
    near: Tensor


@torch.no_grad()
def guess_everywhere(target: Target, draft: DraftModel, answer: Answer, features: Tensor) -> Guesses:
    """Draft the block at every token of `answer` but the last.

    Args:
        features: [prompt + answer, taps * hidden], the target's features.
    """
    slots = draft.architecture.block_size - 1
    starts = torch.arange(len(answer.tokens) - 1)
    offsets = starts[:, None] + 1 + torch.arange(slots)[None]
    inside = offsets < len(answer.tokens)
    wanted = torch.tensor(answer.tokens)[offsets.clamp(max=len(answer.tokens) - 1)]
    right, near = torch.zeros_like(inside), torch.zeros_like(inside)
    pack = build_pack([answer.sample], [(len(answer.prompt_ids) + starts).numpy()], target.device)
    context = pack_context(draft, pack, features.to(draft.fc.weight.dtype))
    for first in range(0, len(starts), BLOCKS_AT_ONCE):
        part = slice(first, first + BLOCKS_AT_ONCE)
        blocks = pack.with_blocks(part)
        attend = attention_by_prefix(blocks, draft.architecture.block_size)
        logits = head_logits(target, forward_with_context(draft, target, blocks, context, attend)[:, 1:])
        token = wanted[part].to(logits.device)
        right[part] = (logits.argmax(-1) == token).cpu()
        above = (logits > logits.gather(-1, token[..., None])).sum(-1)
        near[part] = (above < CANDIDATES).cpu()
    return Guesses(right & inside, near & inside)


def kept_lengths(right: Tensor) -> list[int]:
    """Return for each start the tokens kept of its verification: its leading right guesses and the bonus token.

    Args:
        right: bool [starts, slots]; after the last right guess of the last block there is no bonus token.
    """
    leading = right.long().cumprod(dim=-1).sum(-1).tolist()
    return [min(run + 1, len(leading) - start) for start, run in enumerate(leading)]


def verifications(lengths: list[int]) -> list[int]:
    """Return the lengths of the verifications that decoding makes: from each start on by its length."""
    made, start = [], 0
    while start < len(lengths):
        made.append(lengths[start])
        start += lengths[start]
    return made


class Counts(NamedTuple):
    """Sums over answers; `summarize` makes ratios of them."""

    answers: int
    tokens: int
    made: list[int]
    guesses: int
    near: int
    starts: int
    oracle: int


def count(answer: Answer, guesses: Guesses) -> Counts:
    """Count what the drafter's guesses are worth on one answer."""
    starts, slots = guesses.right.shape
    return Counts(
        answers=1,
        tokens=len(answer.tokens),
        made=verifications(kept_lengths(guesses.right)),
        guesses=sum(min(slots, starts - start) for start in range(starts)),
        near=int(guesses.near.sum()),
        starts=starts,
        oracle=sum(kept_lengths(guesses.near)),
    )


def summarize(counts: list[Counts], block_size: int) -> dict[str, Any]:
    """Return counts and ratios over some answers, as defined in DEFINITIONS; None where nothing was verified."""
    made = [length for item in counts for length in item.made]
    guesses, starts = sum(item.guesses for item in counts), sum(item.starts for item in counts)
    return {
        "prompts": sum(item.answers for item in counts),
        "tokens": sum(item.tokens for item in counts),
        "verifications": len(made),
        "acceptance_length": sum(made) / len(made) if made else None,
        "acceptance_by_position": [
            round(sum(length > k for length in made) / max(len(made), 1), 4) for k in range(1, block_size)
        ],
        "recall": sum(item.near for item in counts) / guesses if guesses else None,
        "oracle_length": sum(item.oracle for item in counts) / starts if starts else None,
    }
