"""The acceptance curve of a training run: exact acceptance on held-out prompts every few steps.

OUTPUT/acceptance.jsonl has a line for each measured step; the best of them decides which checkpoint is kept and used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflash.acceptance import Answer, Counts, count, guess_everywhere, summarize
from dflash.config import TrainingConfig
from dflash.data import Dataset
from dflash.features import FeatureSource
from dflash.held_out import check_held_out
from dflash.journal import Journal
from dflash.metrics import ACCEPTANCE_CURVE, append_line, best_step, drop_lines_after
from dflash.model import DraftModel
from dflash.report import THINKING
from dflash.rollouts import check_ids, read_prompts, roll_out, rollout_settings
from dflash.target import Target

# Prompts that the target answers at once.
BATCH_SIZE = 8
Measure = Callable[[DraftModel], dict[str, Any]]


class AcceptanceCurve:
    """The measurements of one run: which are due, and which was the best."""

    def __init__(self, config: TrainingConfig, measure: Measure, resumed_at: int) -> None:
        """Take up the curve of a run.

        Args:
            config: the run, with `acceptance` given.
            measure: measures a drafter, on the same answers each time.
            resumed_at: the step from which the run goes on; lines after it are dropped.
        """
        self._config = config
        self._path = config.output / ACCEPTANCE_CURVE
        self._measure = measure
        drop_lines_after(self._path, resumed_at)
        self._measured = {resumed_at} if best_step(self._path, at=resumed_at) is not None else set()

    @property
    def best(self) -> int | None:
        """The step of the highest acceptance length so far."""
        return best_step(self._path)

    def is_due(self, step: int) -> bool:
        """Whether the drafter after `step` steps is to be measured."""
        return step not in self._measured and self._config.measures_after(step)

    def measure(self, step: int, model: DraftModel) -> dict[str, Any]:
        """Measure the drafter after `step` steps, append the line to the curve and return it."""
        line = {"step": step, **self._measure(model)}
        append_line(self._path, line)
        self._measured.add(step)
        return line


def acceptance_meter(
    config: TrainingConfig,
    dataset: Dataset,
    target: Target,
    target_layer_ids: tuple[int, ...],
    beat: Callable[[], None],
) -> Measure:
    """Have the target answer the prompts that have no answer yet; return what measures a drafter on them.

    Args:
        config: the run, with `acceptance` given.
        dataset: the run's.
        target_layer_ids: the drafter's taps.
        beat: called now and then, to show that this goes on.

    Raises DflashError for unusable prompts, prompts that are in the training data, or rollouts of other settings.
    """
    chosen = config.acceptance
    assert chosen is not None
    prompts = read_prompts(chosen.prompts)
    check_held_out(prompts, dataset, chosen.prompts)
    check_ids([prompt.input_ids for prompt in prompts], target)
    settings = rollout_settings(config.target, chosen.max_new_tokens, config.target_dtype)
    rollouts = Journal(chosen.rollouts or config.output / "rollouts.jsonl", settings, replace_other=False)
    for first in range(0, len(prompts), BATCH_SIZE):
        roll_out(target, prompts[first : first + BATCH_SIZE], rollouts, chosen.max_new_tokens)
        beat()
    answers = [Answer(p.input_ids, rollouts.records[p.key]["tokens"]) for p in prompts]
    source = FeatureSource(target, target_layer_ids, chosen.feature_cache_bytes)

    def measure(model: DraftModel) -> dict[str, Any]:
        by_source: dict[str, list[Counts]] = {}
        by_thinking: dict[str, list[Counts]] = {}
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            features = source.states([row], [answer.sample]).features
            found = count(answer, guess_everywhere(target, model, answer, features))
            by_source.setdefault(prompt.source, []).append(found)
            by_thinking.setdefault(THINKING[prompt.thinking], []).append(found)
            beat()
        size = model.architecture.block_size
        return {
            **summarize([item for items in by_source.values() for item in items], size),
            "by_source": {name: summarize(items, size) for name, items in sorted(by_source.items())},
            "by_thinking": {name: summarize(items, size) for name, items in sorted(by_thinking.items())},
        }

    return measure
