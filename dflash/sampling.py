"""Sampling from the target, and which guesses of a block are kept so that the output stays the target's.

A guess x that was drawn from q is kept with probability min(1, p(x) / q(x)), where p is the target's distribution;
the first guess that is not kept is replaced by a draw from max(p - q, 0), made to sum to 1 (Leviathan et al., arXiv
2211.17192, algorithm 1). Whatever q is, the tokens are then distributed as the target's own. Two kinds of guesses:

    greedy   the drafter's likeliest token: q is all on it, so it is kept with probability p(x). SGLang's DFLASH.
    sampled  a draw from the drafter's distribution under the same settings. z-lab's dflash.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dflash.config import Sampling


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the probabilities (fp32) that `logits` [.., vocabulary] stand for: temperature, then top-k, then top-p."""
    scaled = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scaled.shape[-1]:
        likeliest = scaled.topk(sampling.top_k, dim=-1)
        scaled = torch.full_like(scaled, -torch.inf).scatter(-1, likeliest.indices, likeliest.values)
    probabilities = scaled.softmax(-1)
    if sampling.top_p < 1:
        ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
        # A token stays while those above it have not reached top_p, so the likeliest always does.
        stays = ordered.cumsum(-1) - ordered < sampling.top_p
        probabilities = torch.zeros_like(probabilities).scatter(-1, ids, ordered * stays)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return the token [..] at which the running sum of `weights` [.., vocabulary] passes `uniform` [..] of the whole.

    Args:
        weights: not negative, not all zero; they need not sum to 1.
        uniform: float64 in [0, 1).
    """
    running = weights.double().cumsum(-1)
    reached = running <= uniform[..., None] * running[..., -1:]
    return reached.sum(-1).clamp(max=weights.shape[-1] - 1)


def keep_drawn(guesses: Tensor, q: Tensor | None, p: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each block how many guesses are kept [batch], and the token that follows them [batch].

    Args:
        guesses: [batch, slots].
        q: [batch, slots, vocabulary], what the guesses were drawn from; None: they are the likeliest tokens.
        p: [batch, slots + 1, vocabulary], the target's distribution of each guess and of the token after the last.
        uniforms: float64 in [0, 1), [batch, slots + 1]: one for each guess, and one for the token that follows.
    """
    slots = guesses.shape[1]
    batch = torch.arange(len(guesses), device=guesses.device)
    p_guess = p[:, :slots].gather(-1, guesses[..., None])[..., 0].double()
    q_guess = 1.0 if q is None else q.gather(-1, guesses[..., None])[..., 0].double()
    kept = (uniforms[:, :slots] * q_guess < p_guess).long().cumprod(dim=1).sum(dim=1)
    rejected = kept.clamp(max=slots - 1)
    if q is None:
        q_there = torch.zeros_like(p[:, 0]).scatter(-1, guesses[batch, rejected][:, None], 1.0)
    else:
        q_there = q[batch, rejected]
    p_there = p[batch, kept]
    rest = (p_there - q_there).clamp(min=0)
    # After a block that was kept whole nothing was refused; and where p and q agree, rounding may leave no rest.
    whole = (kept == slots) | (rest.sum(-1) == 0)
    return kept, draw(torch.where(whole[:, None], p_there, rest), uniforms[:, -1])


class Draws:
    """A stream of uniform numbers for each of several prompts: what a prompt gets does not depend on the others."""

    def __init__(self, seeds: list[list[int]], device: torch.device) -> None:
        self._streams = [np.random.default_rng(seed) for seed in seeds]
        self._device = device

    def uniform(self, prompts: list[int], count: int) -> Tensor:
        """Return the next `count` numbers, float64 in [0, 1), of each of `prompts` (indices): [prompts, count]."""
        numbers = np.stack([self._streams[prompt].random(count) for prompt in prompts])
        return torch.from_numpy(numbers).to(self._device)
