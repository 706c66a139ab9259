"""Acceptance on held-out prompts: really decoding, with the target alone as the judge of every token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch

from dflash.acceptance import Answer, Counts, count, guess_everywhere
from dflash.config import EvaluationConfig
from dflash.data import open_dataset
from dflash.decode import SpeculativeOutput, why_no_blocks
from dflash.decode_batch import speculative_decode_batch
from dflash.errors import DflashError
from dflash.export import check_pair, draft_identity, find_draft, load_draft
from dflash.files import write_json
from dflash.held_out import check_held_out
from dflash.journal import Journal
from dflash.model import DraftModel
from dflash.report import build_report
from dflash.rollouts import WITH_DRAFTER, Prompt, check_ids, read_prompts, roll_out, rollout_settings
from dflash.sampling import Draws
from dflash.target import Target, capture, load_target
from dflash.tree import tree_decode


def evaluate(
    config: EvaluationConfig, on_progress: Callable[[dict[str, Any]], None] = lambda _line: None
) -> dict[str, Any]:
    """Decode every prompt with the drafter, compare it with the target alone, and write the report.

    With a target whose cache cannot forget rejected tokens nothing is decoded: the acceptance lengths are those that
    greedy decoding would have, counted on the target's own answers, and the report says why.

    A killed evaluation goes on where it stopped: finished prompts are in REPORT.journal.jsonl, and the
    target's own answers in `config.rollouts`. `on_progress` gets {"done", "prompts", "prompt_id", "tokens"}
    for each prompt after its batch.

    Raises DflashError for unusable prompts, prompts that are in the training data, a drafter that does not fit the
    target, rollouts of other settings, or sampling or trees with a target that cannot verify blocks.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    draft_folder = find_draft(config.draft)
    prompts = read_prompts(config.prompts)
    if config.dataset is not None:
        check_held_out(prompts, open_dataset(config.dataset), config.prompts)
    dtype = getattr(torch, config.dtype)
    target = load_target(config.target, dtype, config.device)
    draft = load_draft(draft_folder, config.device).to(dtype)
    check_pair(draft.architecture, target.fit, str(draft_folder))
    check_ids([prompt.input_ids for prompt in prompts], target)
    not_decoded = why_no_blocks(target)
    if not_decoded is not None and (config.sampling is not None or config.tree_budget is not None):
        raise DflashError(f"{not_decoded}: evaluate with temperature 0 and without tree_budget")
    settings = rollout_settings(config.target, config.max_new_tokens, config.dtype, config.sampling, config.seed)
    rollouts = Journal(config.rollouts, settings, replace_other=False)
    settings |= {"tree_budget": config.tree_budget, "draft": draft_identity(draft_folder)}
    if config.sampling is not None:
        settings["sampling"] = asdict(config.sampling) | {"seed": config.seed}
    journal_path = config.report.with_name(f"{config.report.stem}.journal.jsonl")
    journal = Journal(journal_path, settings, replace_other=True)
    done = 0
    for batch in _batches(prompts, config.batch_size):
        roll_out(target, batch, rollouts, config.max_new_tokens, config.sampling, config.seed)
        missing = [prompt for prompt in batch if prompt.key not in journal.records]
        answers = [Answer(p.input_ids, rollouts.records[p.key]["tokens"]) for p in missing]
        counts = [_count(target, draft, answer) for answer in answers]
        if not_decoded is None:
            _decode(target, draft, missing, counts, config, journal)
        else:
            for prompt, answer, counted in zip(missing, answers, counts, strict=True):
                journal.add(prompt.key, _record(prompt, SpeculativeOutput(answer.tokens, counted.made), None, counted))
        for prompt in batch:
            done += 1
            tokens = len(journal.records[prompt.key]["tokens"])
            on_progress({"done": done, "prompts": len(prompts), "prompt_id": prompt.prompt_id, "tokens": tokens})
    pairs = [(journal.records[prompt.key], rollouts.records[prompt.key]) for prompt in prompts]
    if not_decoded is not None:  # these are the target's own answers: comparing them with themselves says nothing
        pairs = [(record, {"tokens": own["tokens"], "seconds": own["seconds"]}) for record, own in pairs]
    report = build_report(pairs, draft.architecture.block_size, config.tie_gap)
    report["not_decoded"] = not_decoded
    report["settings"] = settings | {
        "block_size": draft.architecture.block_size,
        "batch_size": config.batch_size,
        "draft": str(draft_folder),
    }
    write_json(config.report, report)
    return report


def _batches(prompts: list[Prompt], size: int) -> Iterator[list[Prompt]]:
    for start in range(0, len(prompts), size):
        yield prompts[start : start + size]


def _count(target: Target, draft: DraftModel, answer: Answer) -> Counts:
    ids = torch.tensor([answer.prompt_ids + answer.tokens], device=target.device)
    features = capture(target, ids, draft.architecture.target_layer_ids)[0]
    return count(answer, guess_everywhere(target, draft, answer, features))


def _decode(
    target: Target,
    draft: DraftModel,
    prompts: list[Prompt],
    counts: list[Counts],
    config: EvaluationConfig,
    journal: Journal,
) -> None:
    if not prompts:
        return
    ids = [prompt.input_ids for prompt in prompts]
    draws = Draws([prompt.stream(config.seed, WITH_DRAFTER) for prompt in prompts], target.device)
    start = time.monotonic()
    outputs = speculative_decode_batch(target, draft, ids, config.max_new_tokens, config.sampling, draws)
    seconds = (time.monotonic() - start) / len(prompts)
    for prompt, output, counted in zip(prompts, outputs, counts, strict=True):
        record = _record(prompt, output, seconds, counted)
        if config.tree_budget is not None:
            start = time.monotonic()
            tree = tree_decode(target, draft, prompt.input_ids, config.max_new_tokens, config.tree_budget)
            record["tree"] = {**asdict(tree), "seconds": time.monotonic() - start}
        journal.add(prompt.key, record)


def _record(prompt: Prompt, output: SpeculativeOutput, seconds: float | None, counted: Counts) -> dict[str, Any]:
    return {
        "prompt_id": prompt.prompt_id,
        "source": prompt.source,
        "thinking": prompt.thinking,
        **asdict(output),
        "seconds": seconds,
        "counted": {name: value for name, value in counted._asdict().items() if name != "made"},
        "tree": None,
    }
