"""Metrics of one rank for Prometheus, and TensorBoard's event files of the run.

OUTPUT/metrics/rank-N.prom is replaced whole at every log interval; OUTPUT/tensorboard has what metrics.jsonl and
acceptance.jsonl have.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, write_to_textfile
from torch.utils.tensorboard import SummaryWriter

from dflash.checkpoint import Progress
from dflash.config import TrainingConfig
from dflash.founding import own_devices
from dflash.parts import Clock
from dflash.world import World

PREFIX = "dflash_training_"


class RankMetrics:
    """The Prometheus series of this rank."""

    def __init__(self, config: TrainingConfig, world: World, clock: Clock, planned: int) -> None:
        """Begin a rank's series; `planned` is what it should hold on its cards, in bytes, beside its baseline."""
        self._clock, self._every = clock, config.log_every
        self._labels = {"rank": str(world.rank), "role": world.role}
        self._path = config.output / "metrics" / f"rank-{world.rank}.prom"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # A second series beside each counter, that nobody reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._series: dict[str, Gauge | Counter] = {}
        self._counted: dict[tuple[str, str], float] = {}
        self._written_at = -1
        self._on_gpu = config.device.startswith("cuda")
        self._cards = own_devices(config, world.rank)
        self._baseline, self._planned = config.memory.baseline_bytes, planned
        self.set("steps_planned", config.steps)
        info = {
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda or "none",
            "driver": _driver(),
            "device": torch.cuda.get_device_name() if self._on_gpu else "cpu",
        }
        self.set("info", 1, **info)

    def set(self, name: str, value: float | None, **labels: str) -> None:
        """Set a gauge; None leaves it as it is."""
        if value is not None:
            self._get(Gauge, name, labels).set(value)

    def raise_to(self, name: str, value: float, **labels: str) -> None:
        """Raise a counter to `value`."""
        key = (name, ",".join(labels.values()))
        self._get(Counter, name, labels).inc(max(value - self._counted.get(key, 0.0), 0.0))
        self._counted[key] = max(value, self._counted.get(key, 0.0))

    def count(self, **amounts: int) -> None:
        """Add to counters of the same names."""
        for name, amount in amounts.items():
            self._get(Counter, name, {}).inc(amount)

    def progress(self, progress: Progress) -> None:
        """Take over how far the run is."""
        self.raise_to("steps", progress.step)
        self.raise_to("tokens", progress.tokens)
        self.raise_to("draft_rows", progress.draft_rows)
        self.raise_to("samples", progress.samples)
        for setting, times in progress.step_downs.items():
            self.raise_to("step_downs", times, setting=setting)
        self.set("epoch", progress.cursor.epoch)

    def line(self, line: dict[str, Any]) -> None:
        """Take over a line of metrics.jsonl."""
        self.set("loss", line["loss"])
        self.set("loss_finite", 1)
        self.set("learning_rate", line["learning_rate"])
        self.set("acceptance_estimate", line["acceptance_estimate"])
        for position, value in enumerate(line["accuracy_by_position"], start=1):
            self.set("accuracy", value, position=str(position))

    def acceptance(self, line: dict[str, Any]) -> None:
        """Take over a line of acceptance.jsonl."""
        for source, found in {"all": line, **line["by_source"]}.items():
            self.set("acceptance_length", found["acceptance_length"], source=source)
        self.set("acceptance_step", line["step"])

    def write_if_due(self, step: int) -> None:
        """Write the file when another log interval is over."""
        if step // self._every != self._written_at:
            self._written_at = step // self._every
            self.set("last_step_timestamp_seconds", time.time())
            self.write()

    def write(self) -> None:
        """Replace the file."""
        for part, seconds in self._clock.seconds.items():
            self.raise_to("part_seconds", seconds, part=part)
        self.set("memory_bytes", _resident_bytes(), kind="resident")
        if self._on_gpu:
            self._measure_cards()
        write_to_textfile(str(self._path), self._registry)

    def _measure_cards(self) -> None:
        """Take over what torch holds on this rank's cards, and what was planned: a target may have several."""
        contexts = [_context_bytes(card) for card in self._cards]
        sums = {"allocated": torch.cuda.memory_allocated, "reserved": torch.cuda.memory_reserved}
        for kind, held in {**sums, "peak": torch.cuda.max_memory_allocated}.items():
            self.set("memory_bytes", sum(held(card) for card in self._cards), kind=kind)
        # It is compared with that of an idle process, which has one card.
        self.set("memory_bytes", max(contexts), kind="context")
        self.set("memory_bytes", self._planned + (self._baseline or max(contexts)), kind="planned")

    def _get(self, kind: type[Gauge] | type[Counter], name: str, labels: dict[str, str]) -> Any:
        if name not in self._series:
            names = [*self._labels, *labels]
            self._series[name] = kind(PREFIX + name, HELP[name], names, registry=self._registry)
        return self._series[name].labels(**self._labels, **labels)


HELP = {
    "steps": "Optimizer steps done, over all parts of the run.",
    "steps_planned": "Optimizer steps of the whole run.",
    "epoch": "Epoch of the data, from 0.",
    "tokens": "Tokens trained on; on a target, tokens whose states it made since it started.",
    "draft_rows": "Rows of blocks trained on.",
    "samples": "Samples trained on; on a target, samples whose states it made since it started.",
    "part_seconds": "Seconds since this process started, by part of the step; data_wait is waiting for another rank.",
    "loss": "Mean loss of the last log interval.",
    "loss_finite": "1, or 0 once the loss or its gradient was not finite, which ends the run.",
    "learning_rate": "Learning rate of the last step.",
    "accuracy": "Share of right guesses by slot of the block, last log interval.",
    "acceptance_estimate": "Acceptance length as the accuracies on training data suggest.",
    "acceptance_length": "Acceptance length of the last exact measurement on held-out prompts.",
    "acceptance_step": "Step of that measurement.",
    "step_downs": "Settings stepped down after an out of memory.",
    "memory_bytes": "Memory of this process; planned: its plan and its baseline (unless given, its context).",
    "last_step_timestamp_seconds": "When the last step ended.",
    "checkpoint_timestamp_seconds": "When the last checkpoint was written.",
    "info": "Versions and device.",
}


class EventFiles:
    """TensorBoard's event files of a run; they are made when there is something to write."""

    def __init__(self, output: Path, purged_from: int) -> None:
        self._folder, self._purged_from = output / "tensorboard", purged_from
        self._writer: SummaryWriter | None = None

    def line(self, line: dict[str, Any], group: str) -> None:
        """Write the numbers of a line of metrics.jsonl or acceptance.jsonl as `group`/name."""
        if self._writer is None:
            # Readers drop what a killed run wrote of steps that are done again.
            self._writer = SummaryWriter(str(self._folder), purge_step=self._purged_from)
        for name, value in line.items():
            numbers = value if isinstance(value, dict) else {"": value}
            for part, number in numbers.items():
                if isinstance(number, int | float) and name != "step":
                    tag = "/".join(filter(None, (group, name, part)))
                    self._writer.add_scalar(tag, number, line["step"])

    def close(self) -> None:
        """Write what is not on disk yet."""
        if self._writer is not None:
            self._writer.close()


def _context_bytes(card: str) -> int:
    """What is in use on a card beside the memory of torch's allocator in this process."""
    free, total = torch.cuda.mem_get_info(card)
    return total - free - torch.cuda.memory_reserved(card)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _driver() -> str:
    version = Path("/sys/module/nvidia/version")
    return version.read_text().strip() if version.is_file() else "none"
