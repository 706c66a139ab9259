"""The training loop, in one process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash.anchors import sample_anchors
from dflash.checkpoint import Progress, describe_run, list_checkpoints, resume, save_checkpoint
from dflash.config import TrainingConfig
from dflash.curve import AcceptanceCurve
from dflash.data import Dataset, check_vocabulary, open_dataset, packs, trainable_rows
from dflash.errors import DflashError
from dflash.features import FeatureSource
from dflash.files import remove_unpublished, write_json
from dflash.initialize import initialize
from dflash.metrics import StepSums, append_line, drop_lines_after
from dflash.model import DraftModel
from dflash.pack import build_pack
from dflash.plan import check_memory
from dflash.step import accumulate_gradient
from dflash.target import Target, load_target, target_identity

# Keeps the draws of anchors apart from the draws of the shuffle, which share seed and epoch.
ANCHOR_STREAM = 1


@dataclass(frozen=True)
class TrainingResult:
    """How `train` ended: steps done, whether it was stopped before the last one, the newest checkpoint."""

    steps: int
    interrupted: bool
    checkpoint: Path


def train(
    config: TrainingConfig,
    on_progress: Callable[[dict[str, Any]], None] = lambda _line: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> TrainingResult:
    """Train a drafter, from the newest checkpoint in `config.output` if there is one.

    Args:
        config: the run. On resuming it must be what it was, but for checkpoint.CHANGEABLE.
        on_progress: called with each line of metrics.jsonl and acceptance.jsonl as it is written, and with
            {"step": n} after other steps.
        should_stop: asked after each step; True ends the call with a checkpoint.

    Raises DflashError for a user's mistake and for a loss that is not finite (the last checkpoint stays
    whole).
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    check_memory(config, "colocated")
    dataset = open_dataset(config.dataset)
    target = load_target(config.target, getattr(torch, config.target_dtype), config.device)
    check_vocabulary(dataset, target.embedding.num_embeddings)
    rows = trainable_rows(dataset, config.max_length)
    if not rows:
        raise DflashError(f"{config.dataset}: no sample has two supervised tokens in a row to train on")
    model = initialize(config.draft, target, config.seed)
    return _Run(config, dataset, rows, target, model, on_progress, should_stop).loop()


class _Run:
    """The state of one call to `train`."""

    def __init__(
        self,
        config: TrainingConfig,
        dataset: Dataset,
        rows: list[int],
        target: Target,
        model: DraftModel,
        on_progress: Callable[[dict[str, Any]], None],
        should_stop: Callable[[], bool],
    ) -> None:
        self.config, self.dataset, self.rows, self.target, self.model = config, dataset, rows, target, model
        self.on_progress, self.should_stop = on_progress, should_stop
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
        )
        taps = model.architecture.target_layer_ids
        self.features = FeatureSource(target, taps, config.feature_cache_bytes, config.objective.needs_teacher)
        self.metrics = config.output / "metrics.jsonl"
        facts = {
            "fingerprint": dataset.fingerprint,
            "samples": len(dataset),
            "tokens": int(dataset.lengths.sum()),
            "samples_without_anchor": len(dataset) - len(rows),
        }
        self.identity = describe_run(config, facts, target_identity(config.target))
        self.progress = self._start()
        self.curve = None
        if config.acceptance is not None:
            self.curve = AcceptanceCurve(config, target, taps, self.progress.step)

    def _start(self) -> Progress:
        output = self.config.output
        remove_unpublished(output / "checkpoints")
        checkpoints = list_checkpoints(output)
        progress = Progress()
        if checkpoints:
            progress = resume(checkpoints[-1], self.model, self.optimizer, self.identity)
        write_json(output / "run.json", self.identity | {"resumed_at_step": progress.step})
        drop_lines_after(self.metrics, progress.step)
        return progress

    def loop(self) -> TrainingResult:
        """Step until the last one or until asked to stop."""
        config = self.config
        self._measure()
        checkpoint = self._save()
        sums = StepSums(config.draft.block_size)
        while self.progress.step < config.steps:
            for rows in self._remaining_packs():
                self._step(rows, sums)
                step = self.progress.step
                stopping = self.should_stop() or step == config.steps
                # The curve's line comes before the checkpoint: a run killed between them measures again.
                saving = self._measure() or stopping or step % config.checkpoint_every == 0
                if saving or step % config.log_every == 0:
                    self._log(sums)
                    sums = StepSums(config.draft.block_size)
                else:
                    self.on_progress({"step": step})
                if saving:
                    checkpoint = self._save()
                if stopping:
                    return TrainingResult(step, step < config.steps, checkpoint)
            self.progress = replace(self.progress, epoch=self.progress.epoch + 1, pack=0)
        return TrainingResult(self.progress.step, False, checkpoint)

    def _remaining_packs(self) -> list[list[int]]:
        config = self.config
        lengths = self.dataset.lengths.clip(max=config.max_length)
        epoch = packs(self.rows, lengths, config.token_budget, config.max_batch_size, config.seed, self.progress.epoch)
        return list(epoch)[self.progress.pack :]

    def _step(self, rows: list[int], sums: StepSums) -> None:
        start = time.monotonic()
        config = self.config
        rng = np.random.default_rng([config.seed, self.progress.epoch, self.progress.pack, ANCHOR_STREAM])
        samples = [self.dataset.sample(row, config.max_length) for row in rows]
        per_pack = config.anchors if config.anchors_per == "pack" else None
        per_sequence = config.anchors if config.anchors_per == "sequence" else None
        anchors = sample_anchors([sample.loss_mask for sample in samples], per_pack, per_sequence, rng)
        pack = build_pack(samples, anchors, self.target.device)
        self.optimizer.zero_grad(set_to_none=True)
        states = self.features.states(rows, samples)
        result, labels = accumulate_gradient(self.model, self.target, pack, states, config)
        loss = float(result.loss)
        if not math.isfinite(loss):
            raise DflashError(
                f"step {self.progress.step + 1}: the loss is {loss}; the last checkpoint "
                f"in {config.output} is whole; use a lower learning_rate or dtype float32 elsewhere"
            )
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.gradient_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.progress.step, config)
        self.optimizer.step()
        seconds = time.monotonic() - start
        sums.add(result, labels, pack, seconds)
        self.progress = replace(
            self.progress,
            step=self.progress.step + 1,
            pack=self.progress.pack + 1,
            seconds=self.progress.seconds + seconds,
        )

    def _log(self, sums: StepSums) -> None:
        step = self.progress.step
        line = {
            "step": step,
            "steps": self.config.steps,
            "epoch": self.progress.epoch,
            **sums.line(),
            "learning_rate": learning_rate(step - 1, self.config),
            "seconds": self.progress.seconds,
        }
        append_line(self.metrics, line)
        self.on_progress(line)

    def _measure(self) -> bool:
        """Measure acceptance if it is due; return whether the drafter is the best so far."""
        step = self.progress.step
        if self.curve is None or not self.curve.is_due(step):
            return False
        self.on_progress(self.curve.measure(step, self.model))
        return self.curve.best == step

    def _save(self) -> Path:
        config, best = self.config, self.curve.best if self.curve is not None else None
        return save_checkpoint(
            config.output, self.progress, self.model, self.optimizer, self.identity, config.keep, best
        )


def learning_rate(step: int, config: TrainingConfig) -> float:
    """Return the rate of the step after `step` steps: a linear rise, then a cosine down to zero."""
    warmup = math.ceil(config.warmup_ratio * config.steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(config.steps - warmup, 1)
    return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))
