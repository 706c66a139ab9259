"""Acceptance on held-out prompts: really decoding, with the target alone as the judge of every token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dflash.config import EvaluationConfig
from dflash.decode_batch import speculative_decode_batch
from dflash.export import check_pair, draft_identity, find_draft, load_draft
from dflash.files import write_json
from dflash.journal import Journal
from dflash.model import DraftModel
from dflash.report import build_report
from dflash.rollouts import Prompt, check_ids, read_prompts, roll_out, rollout_settings
from dflash.target import Target, load_target


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
    dtype = getattr(torch, config.dtype)
    target = load_target(config.target, dtype, config.device)
    draft = load_draft(draft_folder, config.device).to(dtype)
    check_pair(draft.architecture, target, str(draft_folder))
    prompts = read_prompts(config.prompts)
    check_ids([prompt.input_ids for prompt in prompts], target)
    settings = rollout_settings(config.target, config.max_new_tokens, config.dtype)
    rollouts = Journal(config.rollouts, settings, replace_other=False)
    journal_path = config.report.with_name(f"{config.report.stem}.journal.jsonl")
    journal = Journal(journal_path, settings | {"draft": draft_identity(draft_folder)}, replace_other=True)
    done = 0
    for batch in _batches(prompts, config.batch_size):
        roll_out(target, batch, rollouts, config.max_new_tokens)
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


def _batches(prompts: list[Prompt], size: int) -> Iterator[list[Prompt]]:
    for start in range(0, len(prompts), size):
        yield prompts[start : start + size]


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
