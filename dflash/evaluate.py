"""Acceptance on held-out prompts: really decoding, with the target alone as the judge of every token."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash.config import EvaluationConfig
from dflash.decode_batch import greedy_decode_batch, speculative_decode_batch
from dflash.errors import DflashError
from dflash.export import check_pair, draft_identity, find_draft, load_draft
from dflash.files import write_json
from dflash.journal import Journal
from dflash.model import DraftModel
from dflash.report import build_report
from dflash.target import Target, load_target, target_identity


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


def evaluate(
    config: EvaluationConfig, on_progress: Callable[[dict[str, Any]], None] = lambda _line: None
) -> dict[str, Any]:
    """Decode every prompt with the drafter, compare it with the target alone, and write the report.

    A killed evaluation goes on where it stopped: finished prompts are in REPORT.journal.jsonl, and the
    target's own answers in `config.rollouts`. `on_progress` gets {"done", "prompts", "prompt_id", "tokens"}
    for each prompt after its batch.

    Raises DflashError for unusable prompts, a drafter that does not fit the target, or rollouts of other
    settings.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    draft_folder = find_draft(config.draft)
    prompts = read_prompts(config.prompts)
    dtype = getattr(torch, config.dtype)
    target = load_target(config.target, dtype, config.device)
    draft = load_draft(draft_folder, config.device).to(dtype)
    check_pair(draft.architecture, target, str(draft_folder))
    _check_ids(prompts, target.embedding.num_embeddings, config.prompts)
    settings = {
        "target": target_identity(config.target),
        "max_new_tokens": config.max_new_tokens,
        "dtype": config.dtype,
    }
    rollouts = Journal(config.rollouts, settings, replace_other=False)
    journal_path = config.report.with_name(f"{config.report.stem}.journal.jsonl")
    journal = Journal(journal_path, settings | {"draft": draft_identity(draft_folder)}, replace_other=True)
    done = 0
    for batch in _batches(prompts, config.batch_size):
        _roll_out(target, [prompt for prompt in batch if prompt.key not in rollouts.records], config, rollouts)
        _decode(target, draft, [prompt for prompt in batch if prompt.key not in journal.records], config, journal)
        for prompt in batch:
            done += 1
            tokens = len(journal.records[prompt.key]["tokens"])
            on_progress({"done": done, "prompts": len(prompts), "prompt_id": prompt.prompt_id, "tokens": tokens})
    pairs = [(journal.records[prompt.key], rollouts.records[prompt.key]) for prompt in prompts]
    report = build_report(pairs, draft.architecture.block_size, config.tie_gap)
    report["settings"] = settings | {"block_size": draft.architecture.block_size, "draft": str(draft_folder)}
    write_json(config.report, report)
    return report


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


def _check_ids(prompts: list[Prompt], vocab_size: int, path: Path) -> None:
    for prompt in prompts:
        if not 0 <= min(prompt.input_ids) <= max(prompt.input_ids) < vocab_size:
            raise DflashError(f"{path}: prompt {prompt.prompt_id} has a token outside the target's {vocab_size} tokens")


def _batches(prompts: list[Prompt], size: int) -> Iterator[list[Prompt]]:
    for start in range(0, len(prompts), size):
        yield prompts[start : start + size]


def _roll_out(target: Target, prompts: list[Prompt], config: EvaluationConfig, rollouts: Journal) -> None:
    if not prompts:
        return
    start = time.monotonic()
    outputs = greedy_decode_batch(target, [prompt.input_ids for prompt in prompts], config.max_new_tokens)
    seconds = (time.monotonic() - start) / len(prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        gaps = [round(gap, 6) for gap in output.gaps]
        rollouts.add(prompt.key, {"tokens": output.tokens, "gaps": gaps, "seconds": seconds})


def _decode(
    target: Target, draft: DraftModel, prompts: list[Prompt], config: EvaluationConfig, journal: Journal
) -> None:
    if not prompts:
        return
    start = time.monotonic()
    outputs = speculative_decode_batch(target, draft, [prompt.input_ids for prompt in prompts], config.max_new_tokens)
    seconds = (time.monotonic() - start) / len(prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        record = {
            "prompt_id": prompt.prompt_id,
            "source": prompt.source,
            "tokens": output.tokens,
            "acceptance_lengths": output.acceptance_lengths,
            "seconds": seconds,
        }
        journal.add(prompt.key, record)
