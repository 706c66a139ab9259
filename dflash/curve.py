"""The acceptance curve of a training run: exact acceptance on held-out prompts every few steps.

OUTPUT/acceptance.jsonl has a line for each measured step; the best of them decides which checkpoint is kept and used.
"""

from __future__ import annotations

from typing import Any

from dflash.acceptance import Answer, Counts, count, guess_everywhere, summarize
from dflash.config import TrainingConfig
from dflash.data import open_dataset
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


class AcceptanceCurve:
    """Measures the drafter of one run on the same answers each time."""

    def __init__(
        self, config: TrainingConfig, target: Target, target_layer_ids: tuple[int, ...], resumed_at: int
    ) -> None:
        """Read the prompts, and have the target answer those that have no answer yet.

        Args:
            config: the run, with `acceptance` given.
            target_layer_ids: the drafter's taps.
            resumed_at: the step from which the run goes on; lines after it are dropped.

        Raises DflashError for unusable prompts, prompts that are in the training data, or rollouts of other settings.
        """
        chosen = config.acceptance
        assert chosen is not None
        self._every = chosen.every
        self._last = config.steps
        self._path = config.output / ACCEPTANCE_CURVE
        self._target = target
        self._prompts = read_prompts(chosen.prompts)
        check_held_out(self._prompts, open_dataset(config.dataset), chosen.prompts)
        check_ids([prompt.input_ids for prompt in self._prompts], target)
        settings = rollout_settings(config.target, chosen.max_new_tokens, config.target_dtype)
        rollouts = Journal(chosen.rollouts or config.output / "rollouts.jsonl", settings, replace_other=False)
        for first in range(0, len(self._prompts), BATCH_SIZE):
            roll_out(target, self._prompts[first : first + BATCH_SIZE], rollouts, chosen.max_new_tokens)
        self._answers = [Answer(p.input_ids, rollouts.records[p.key]["tokens"]) for p in self._prompts]
        self._features = FeatureSource(target, target_layer_ids, chosen.feature_cache_bytes)
        drop_lines_after(self._path, resumed_at)
        self._measured = {resumed_at} if best_step(self._path, at=resumed_at) is not None else set()

    @property
    def best(self) -> int | None:
        """The step of the highest acceptance length so far."""
        return best_step(self._path)

    def is_due(self, step: int) -> bool:
        """Whether the drafter after `step` steps is to be measured."""
        return step not in self._measured and (step % self._every == 0 or step == self._last)

    def measure(self, step: int, model: DraftModel) -> dict[str, Any]:
        """Measure the drafter after `step` steps, append the line to the curve and return it."""
        by_source: dict[str, list[Counts]] = {}
        by_thinking: dict[str, list[Counts]] = {}
        for row, (prompt, answer) in enumerate(zip(self._prompts, self._answers, strict=True)):
            features = self._features.states([row], [answer.sample]).features
            found = count(answer, guess_everywhere(self._target, model, answer, features))
            by_source.setdefault(prompt.source, []).append(found)
            by_thinking.setdefault(THINKING[prompt.thinking], []).append(found)
        size = model.architecture.block_size
        line = {
            "step": step,
            **summarize([item for items in by_source.values() for item in items], size),
            "by_source": {name: summarize(items, size) for name, items in sorted(by_source.items())},
            "by_thinking": {name: summarize(items, size) for name, items in sorted(by_thinking.items())},
        }
        append_line(self._path, line)
        self._measured.add(step)
        return line
