"""The training loop of one drafter; alone, or as one of several that keep step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from dflash.attention_choice import choose_attention
from dflash.batch import read_pack
from dflash.checkpoint import Progress, describe_run, list_checkpoints, resume, save_checkpoint
from dflash.config import TrainingConfig
from dflash.curve import AcceptanceCurve, Measure, acceptance_meter
from dflash.errors import DflashError
from dflash.features import FeatureSource, TargetStates
from dflash.files import remove_unpublished, write_json
from dflash.founding import Data, Foundation, found_data, found_target, own_devices, receive
from dflash.initialize import initialize
from dflash.limits import limits_after, next_step_down, nothing_left, repeat_until_it_fits
from dflash.metrics import StepSums, append_line, drop_lines_after
from dflash.objective import BlockLoss, Labels, LabelTotals
from dflash.optimizer import ShardedAdamW
from dflash.pack import Pack, build_pack
from dflash.parts import Clock
from dflash.plan import check_memory
from dflash.rank_metrics import EventFiles, RankMetrics
from dflash.step import accumulate_gradient, count_totals
from dflash.supply import OtherTargets, OwnTarget, Supply
from dflash.target import Target, target_identity, template_identity
from dflash.world import ALONE, World

OnProgress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class TrainingResult:
    """How `train` ended: steps done, whether it was stopped before the last one, the newest checkpoint."""

    steps: int
    interrupted: bool
    checkpoint: Path


def train(
    config: TrainingConfig,
    on_progress: OnProgress = lambda _line: None,
    should_stop: Callable[[], bool] = lambda: False,
    world: World = ALONE,
    clock: Clock | None = None,
) -> TrainingResult:
    """Train a drafter, from the newest checkpoint in `config.output` if there is one.

    Args:
        config: the run. On resuming it must be what it was, but for what `checkpoint` names as changeable.
        on_progress: called on the lead with each line of metrics.jsonl and acceptance.jsonl as it is written, with
            {"step": n} after other steps, and with {"note": text} for what a person should know.
        should_stop: asked at the end of each step; True on any drafter ends the call on all, with a checkpoint.
        world: this process among those of the run; the others call `train` or `target_rank.serve_states`.
        clock: counts the seconds by part.

    Raises DflashError for a user's mistake and for a loss or gradient that is not finite (the last checkpoint stays
    whole).
    """
    if (world.targets, world.drafters) != (config.topology.targets, config.topology.drafters):
        raise DflashError(f"topology needs {config.topology.processes} processes: start them with `dflash train`")
    devices = own_devices(config, world.rank)
    planned = check_memory(config, world.role, devices)
    clock = clock or Clock()
    target = None if world.targets else found_target(config, devices)
    if target is None:
        with clock.part("data_wait"):
            foundation = receive(config, world, devices[0])
    else:
        foundation = Foundation(initialize(config.draft, target, config.seed).to(target.device), target)
    data = found_data(config, world, foundation.ends.embedding.num_embeddings)
    return _Run(config, world, clock, foundation, target, data, planned, on_progress, should_stop).loop()


class _Run:
    """The state of one call to `train`."""

    def __init__(
        self,
        config: TrainingConfig,
        world: World,
        clock: Clock,
        foundation: Foundation,
        target: Target | None,
        data: Data,
        planned: int,
        on_progress: OnProgress,
        should_stop: Callable[[], bool],
    ) -> None:
        self.config, self.world, self.clock = config, world, clock
        self.model, self.ends = foundation
        self.data, self.on_progress, self.should_stop = data, on_progress, should_stop
        self.optimizer = ShardedAdamW(self.model, config, world)
        self.attention, note = choose_attention(config, self.model.architecture, self.ends.device, world)
        if note is not None and world.leads:
            on_progress({"note": note})
        self.metrics = config.output / "metrics.jsonl"
        self.identity = self._describe()
        self.supply, measure = self._open_supply(target)
        self.progress = self._start()
        self.packs = data.order.packs_from(self.progress.cursor)
        self.rank_metrics = RankMetrics(config, world, clock, planned)
        if world.leads:
            self.rank_metrics.progress(self.progress)
        self.event_files = EventFiles(config.output, self.progress.step + 1)
        self.curve = AcceptanceCurve(config, measure, self.progress.step) if measure and world.leads else None

    def _describe(self) -> dict[str, Any]:
        config, dataset = self.config, self.data.dataset
        facts = {
            "fingerprint": dataset.fingerprint,
            "samples": len(dataset),
            "tokens": int(dataset.lengths.sum()),
            "samples_without_anchor": len(dataset) - len(self.data.rows),
        }
        target = target_identity(config.target) | {"template": template_identity(config.target)}
        return describe_run(config, facts, target)

    def _open_supply(self, target: Target | None) -> tuple[Supply, Measure | None]:
        """Return where states come from, and what measures acceptance where it is measured."""
        config, world, clock = self.config, self.world, self.clock
        taps = self.model.architecture.target_layer_ids
        if target is not None:
            source = FeatureSource(target, taps, config.feature_cache_bytes, config.objective.needs_teacher)
            own = OwnTarget(source, clock)
            if config.acceptance is None or not world.leads:
                return own, None
            return own, acceptance_meter(config, self.data.dataset, target, taps, clock.beat)
        world.share(None, world.first_target)
        addresses = [world.share(None, rank) for rank in range(world.drafters, world.drafters + world.targets)]
        others = OtherTargets(addresses, self.ends.device, clock)
        return others, (lambda model: others.measure(world, model)) if config.acceptance is not None else None

    def _start(self) -> Progress:
        output = self.config.output
        newest = None
        if self.world.leads:
            remove_unpublished(output / "checkpoints")
            newest = next(reversed(list_checkpoints(output)), None)
        # The lead may be having its target answer the held-out prompts.
        with self.clock.part("data_wait"):
            newest = self.world.share_among_drafters(newest)
        progress, changes = Progress(), []
        if newest is not None:
            resumed = resume(newest, self.model, self.optimizer, self.identity)
            progress, changes = resumed.progress, resumed.changes
        if self.world.leads:
            write_json(output / "run.json", self.identity | {"resumed_at_step": progress.step, "changes": changes})
            drop_lines_after(self.metrics, progress.step)
            for change in changes:
                self.on_progress({"note": f"resuming at step {progress.step}: {change}"})
        if self.world.targets:
            self.world.share(progress)
        return progress

    def loop(self) -> TrainingResult:
        """Step until the last one or until asked to stop."""
        config = self.config
        self._measure()
        checkpoint = self._save()
        sums, stopping = StepSums(config.draft.block_size), False
        while self.progress.step < config.steps and not stopping:
            stopping = self._step(sums)
            step = self.progress.step
            stopping = stopping or step == config.steps
            # The curve's line comes before the checkpoint: a run killed between them measures again.
            saving = self._measure() or stopping or step % config.checkpoint_every == 0
            if saving or step % config.log_every == 0:
                self._log(sums)
                sums = StepSums(config.draft.block_size)
            elif self.world.leads:
                self.on_progress({"step": step})
            if saving:
                checkpoint = self._save()
        self.supply.close()
        self.event_files.close()
        self.rank_metrics.write()
        return TrainingResult(self.progress.step, self.progress.step < config.steps, checkpoint)

    def _step(self, sums: StepSums) -> bool:
        """Train on the packs of one step; return whether a drafter was asked to stop."""
        start = time.monotonic()
        config, world, clock = self.config, self.world, self.clock
        first = self.progress.step * config.step_packs
        taken = list(islice(self.packs, config.step_packs))
        numbers = range(world.rank, config.step_packs, world.drafters)
        contents = [read_pack(self.data.dataset, taken[number][0], config) for number in numbers]
        packs = [build_pack(content.samples, content.anchors, self.ends.device) for content in contents]
        totals = None
        if config.step_packs > 1:
            own = count_totals(packs, config)
            with clock.part("transfer"):
                totals = LabelTotals(*world.add_among_drafters([*own]))
        self.optimizer.begin()
        loss = torch.zeros(())
        for number, content, pack in zip(numbers, contents, packs, strict=True):
            states = self.supply.take(first + number, content)
            with clock.part("gradient"):
                result, labels = self._accumulate(pack, states, totals)
                loss = loss + result.loss
                # It waits for the device, so that what the gradient takes there is counted here.
                sums.add(result, labels, pack)
        with clock.part("transfer"):
            mean, stops = world.add_among_drafters([float(loss), float(self.should_stop())])
            self._check_finite("the loss", mean)
            self.optimizer.collect()
        with clock.part("optimizer"):
            # A finite loss may have a gradient that is not; the weights after it could go into a checkpoint.
            self._check_finite("the norm of the gradient", self.optimizer.clip())
            self.optimizer.step(learning_rate(self.progress.step, config))
        seconds = time.monotonic() - start
        sums.end_step(seconds)
        self.progress = replace(
            self.progress,
            step=self.progress.step + 1,
            cursor=taken[-1][1],
            seconds=self.progress.seconds + seconds,
        )
        return stops > 0

    def _accumulate(self, pack: Pack, states: TargetStates, totals: LabelTotals | None) -> tuple[BlockLoss, Labels]:
        """Add a pack's gradient; after out of memory, step down what leaves it as it is, and repeat the pack."""
        limits_at = partial(limits_after, self.config, len(self.ends.head), self.ends.device)

        def attempt() -> tuple[BlockLoss, Labels]:
            limits = limits_at(self.progress.step_downs)
            return accumulate_gradient(self.model, self.ends, pack, states, self.config, totals, limits, self.attention)

        def step_down(reason: str) -> None:
            step, limits = self.progress.step + 1, limits_at(self.progress.step_downs)
            further = next_step_down(limits_at, self.progress.step_downs, max(pack.lengths()))
            if further is None:
                raise nothing_left(step, limits, reason)
            self.progress = replace(self.progress, step_downs=further)
            self.on_progress({"note": f"step {step}: out of memory ({reason}), repeated with {limits_at(further)}"})

        return repeat_until_it_fits(attempt, self.model.parameters(), step_down)

    def _check_finite(self, name: str, value: float) -> None:
        if math.isfinite(value):
            return
        self.rank_metrics.set("loss_finite", 0)
        self.rank_metrics.write()
        raise DflashError(
            f"step {self.progress.step + 1}: {name} is {value}; the last checkpoint "
            f"in {self.config.output} is whole; use a lower learning_rate or dtype float32 elsewhere"
        )

    def _log(self, own: StepSums) -> None:
        sums = own.over_drafters(self.world)
        step = self.progress.step
        self.progress = replace(
            self.progress,
            tokens=self.progress.tokens + sums.tokens,
            draft_rows=self.progress.draft_rows + sums.draft_rows,
            samples=self.progress.samples + sums.samples,
        )
        line = {
            "step": step,
            "steps": self.config.steps,
            "epoch": self.progress.cursor.epoch,
            **sums.line(),
            "learning_rate": learning_rate(step - 1, self.config),
            "seconds": self.progress.seconds,
            "step_downs": self.progress.step_downs,
            "parts": {part: round(seconds, 3) for part, seconds in self.clock.seconds.items()},
        }
        if self.world.leads:
            append_line(self.metrics, line)
            self.event_files.line(line, "training")
            self.rank_metrics.progress(self.progress)
            self.rank_metrics.line(line)
            self.on_progress(line)
        self.rank_metrics.set("last_step_timestamp_seconds", time.time())
        self.rank_metrics.write()

    def _measure(self) -> bool:
        """Measure acceptance if it is due; return whether the drafter is the best so far."""
        step = self.progress.step
        if not self.config.measures_after(step):
            return False
        best = False
        if self.curve is not None and self.curve.is_due(step):
            line = self.curve.measure(step, self.model)
            self.event_files.line(line, "acceptance")
            self.rank_metrics.acceptance(line)
            self.on_progress(line)
            best = self.curve.best == step
        with self.clock.part("data_wait"):
            return self.world.share_among_drafters(best)

    def _save(self) -> Path:
        config, best = self.config, self.curve.best if self.curve is not None else None
        path = save_checkpoint(
            config.output, self.progress, self.model, self.optimizer, self.identity, config.keep, best, self.world
        )
        self.rank_metrics.set("checkpoint_timestamp_seconds", time.time())
        return path


def learning_rate(step: int, config: TrainingConfig) -> float:
    """Return the rate of the step after `step` steps: a linear rise, then a cosine down to zero."""
    warmup = math.ceil(config.warmup_ratio * config.steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(config.steps - warmup, 1)
    return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))
