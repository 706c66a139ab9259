"""Held-out prompts, and what the target alone answers to them: made once, kept in a file, shared by measurements."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash.config import Sampling
from dflash.decode import greedy_decode, sampled_decode, why_no_blocks
from dflash.decode_batch import greedy_decode_batch, sampled_decode_batch
from dflash.errors import DflashError
from dflash.journal import Journal
from dflash.sampling import Draws
from dflash.target import Target, target_identity

# Keeps the numbers that the target alone draws apart from those that it draws with a drafter.
ALONE, WITH_DRAFTER = 0, 1


@dataclass(frozen=True)
class Prompt:
    """One held-out prompt, already tokenized; `thinking` is the template's switch, None where it has none."""

    prompt_id: str
    source: str
    input_ids: list[int]
    thinking: bool | None = None

    @property
    def key(self) -> str:
        """The id with a digest of the tokens: another text under an old id is another prompt."""
        return f"{self.prompt_id}#{self._digest.hex()[:16]}"

    @property
    def _digest(self) -> bytes:
        return hashlib.sha256(json.dumps(self.input_ids).encode()).digest()

    def stream(self, seed: int, use: int) -> list[int]:
        """Return the seed of this prompt's random numbers, which depends on no other prompt."""
        return [seed, use, int.from_bytes(self._digest[:8], "big")]


def read_prompts(path: Path) -> list[Prompt]:
    """Read JSONL with prompt_id, source, input_ids and maybe thinking (true, false or null); more keys are ignored.

    Raises DflashError naming the file and line of what cannot be used.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DflashError(f"{path}: cannot be read ({error.strerror})") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
            ids, thinking = [int(i) for i in value["input_ids"]], value.get("thinking")
            prompt = Prompt(str(value["prompt_id"]), str(value["source"]), ids, thinking)
        except (ValueError, KeyError, TypeError) as error:
            raise DflashError(f"{path}:{number}: expected prompt_id, source and input_ids ({error!r})") from error
        if thinking not in (True, False, None):
            raise DflashError(f"{path}:{number}: thinking is {thinking!r}, not true, false or null")
        if not prompt.input_ids:
            raise DflashError(f"{path}:{number}: prompt {prompt.prompt_id} has no tokens")
        prompts.append(prompt)
    if not prompts:
        raise DflashError(f"{path}: no prompts to evaluate on")
    if len({prompt.prompt_id for prompt in prompts}) != len(prompts):
        raise DflashError(f"{path}: a prompt_id appears twice")
    return prompts


def check_ids(prompts: list[list[int]], target: Target) -> None:
    """Raise DflashError when a prompt has a token that the target does not know."""
    vocab_size = target.embedding.num_embeddings
    for number, ids in enumerate(prompts, start=1):
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            raise DflashError(f"prompt {number} has a token outside the {vocab_size} tokens of {target.path}")


def rollout_settings(
    target: Path, max_new_tokens: int, dtype: str, sampling: Sampling | None = None, seed: int = 0
) -> dict[str, Any]:
    """Return what the target's answers depend on: the identity of their file."""
    settings = {"target": target_identity(target), "max_new_tokens": max_new_tokens, "dtype": dtype}
    if sampling is None:
        return settings
    drawn = {name: value for name, value in asdict(sampling).items() if name != "guessing"}
    return settings | {"sampling": drawn | {"seed": seed}}


def roll_out(
    target: Target,
    prompts: list[Prompt],
    rollouts: Journal,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    seed: int = 0,
) -> None:
    """Add the target's answers (tokens, logit gaps of greedy ones, seconds) to those of `prompts` that have none.

    They are made in one batch, or one by one where the target's cache does not allow it.
    """
    missing = [prompt for prompt in prompts if prompt.key not in rollouts.records]
    if not missing:
        return
    start = time.monotonic()
    ids, at_once = [prompt.input_ids for prompt in missing], why_no_blocks(target) is None
    answers: list[dict[str, Any]]
    if sampling is not None:
        answers = [{"tokens": tokens} for tokens in _sample(target, missing, max_new_tokens, sampling, seed, at_once)]
    else:
        if at_once:
            outputs = greedy_decode_batch(target, ids, max_new_tokens)
        else:
            outputs = [greedy_decode(target, prompt, max_new_tokens) for prompt in ids]
        answers = [{"tokens": o.tokens, "gaps": [round(gap, 6) for gap in o.gaps]} for o in outputs]
    seconds = (time.monotonic() - start) / len(missing)
    for prompt, answer in zip(missing, answers, strict=True):
        rollouts.add(prompt.key, {**answer, "seconds": seconds})


def _sample(
    target: Target, prompts: list[Prompt], max_new_tokens: int, sampling: Sampling, seed: int, at_once: bool
) -> list[list[int]]:
    if at_once:
        draws = Draws([prompt.stream(seed, ALONE) for prompt in prompts], target.device)
        ids = [prompt.input_ids for prompt in prompts]
        return sampled_decode_batch(target, ids, max_new_tokens, sampling, draws)
    return [
        sampled_decode(
            target, prompt.input_ids, max_new_tokens, sampling, Draws([prompt.stream(seed, ALONE)], target.device)
        )
        for prompt in prompts
    ]
