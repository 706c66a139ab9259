"""Held-out prompts, and what the target alone answers to them: made once, kept in a file, shared by measurements."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.decode import greedy_decode, why_no_blocks
from dflash.decode_batch import greedy_decode_batch
from dflash.errors import DflashError
from dflash.journal import Journal
from dflash.target import Target, target_identity


@dataclass(frozen=True)
class Prompt:
    """One held-out prompt, already tokenized."""

    prompt_id: str
    source: str
    input_ids: list[int]

    @property
    def key(self) -> str:
        """The id with a digest of the tokens: another text under an old id is another prompt."""
        return f"{self.prompt_id}#{hashlib.sha256(json.dumps(self.input_ids).encode()).hexdigest()[:16]}"


def read_prompts(path: Path) -> list[Prompt]:
    """Read JSONL with prompt_id, source and input_ids; more keys are ignored.

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
            prompt = Prompt(str(value["prompt_id"]), str(value["source"]), [int(i) for i in value["input_ids"]])
        except (ValueError, KeyError, TypeError) as error:
            raise DflashError(f"{path}:{number}: expected prompt_id, source and input_ids ({error!r})") from error
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


def rollout_settings(target: Path, max_new_tokens: int, dtype: str) -> dict[str, Any]:
    """Return what the target's answers depend on: the identity of their file."""
    return {"target": target_identity(target), "max_new_tokens": max_new_tokens, "dtype": dtype}


def roll_out(target: Target, prompts: list[Prompt], rollouts: Journal, max_new_tokens: int) -> None:
    """Add the target's answers (tokens, logit gaps, seconds) to those of `prompts` that have none.

    They are made in one batch, or one by one where the target's cache does not allow it.
    """
    missing = [prompt for prompt in prompts if prompt.key not in rollouts.records]
    if not missing:
        return
    start = time.monotonic()
    if why_no_blocks(target) is None:
        outputs = greedy_decode_batch(target, [prompt.input_ids for prompt in missing], max_new_tokens)
    else:
        outputs = [greedy_decode(target, prompt.input_ids, max_new_tokens) for prompt in missing]
    seconds = (time.monotonic() - start) / len(missing)
    for prompt, output in zip(missing, outputs, strict=True):
        gaps = [round(gap, 6) for gap in output.gaps]
        rollouts.add(prompt.key, {"tokens": output.tokens, "gaps": gaps, "seconds": seconds})
