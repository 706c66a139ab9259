"""`dflash-stack top`: what the overview dashboard shows, in the terminal, from the files and Redis themselves."""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.registry import Collector
from rich.console import Group, RenderableType
from rich.table import Table

from services.stack.number_table import number_table

Labels = Mapping[str, str]


@dataclass(frozen=True)
class Snapshot:
    """Every metric at one moment, by its name."""

    at: float
    series: Mapping[str, list[tuple[Labels, float]]] = field(default_factory=dict)

    def by(self, label: str, name: str, **wanted: str) -> dict[str, float]:
        """Sums of a metric's series with the wanted labels, by one label."""
        sums: dict[str, float] = defaultdict(float)
        for labels, value in self.series.get(name, ()):
            if label in labels and all(labels.get(key) == of_key for key, of_key in wanted.items()):
                sums[labels[label]] += value
        return dict(sums)

    def largest(self, label: str, name: str, **wanted: str) -> dict[str, float]:
        """The same with the largest value in place of the sum: every rank tells of the same run."""
        found: dict[str, float] = {}
        for labels, value in self.series.get(name, ()):
            if label in labels and all(labels.get(key) == of_key for key, of_key in wanted.items()):
                found[labels[label]] = max(value, found.get(labels[label], value))
        return found

    def value(self, name: str) -> float | None:
        """Of a metric with one series; None when there is none."""
        found = self.series.get(name)
        return found[0][1] if found else None


def take(collector: Collector) -> Snapshot:
    """Ask for all metrics now."""
    series: dict[str, list[tuple[Labels, float]]] = defaultdict(list)
    for family in collector.collect():
        for sample in family.samples:
            series[sample.name].append((sample.labels, sample.value))
    return Snapshot(time.time(), series)


def render(now: Snapshot, before: Snapshot | None) -> RenderableType:
    """Runs, training, queues and the machine; rates are those since `before`."""
    runs = now.by("run", "dflash_run_unreadable")
    parts: list[RenderableType] = [
        _runs_table(now, before, runs) if runs else "no run yet; begin with `dflash-stack prepare`"
    ]
    if now.by("run", "dflash_training_steps_planned"):
        parts.append(_training_table(now, before))
    if now.value("dflash_redis_up"):
        parts.append(_queues_table(now))
    else:
        parts.append("[yellow]Redis does not answer: queues and workers are not known[/]")
    for run, unreadable in runs.items():
        if unreadable:
            parts.append(f"[yellow]run {run}: its files cannot be counted; see `dflash-stack status {run}`[/]")
    size, free = now.value("dflash_disk_size_bytes"), now.value("dflash_disk_free_bytes")
    if size and free is not None:
        parts.append(f"disk of the runs: {free / 1e9:,.0f} GB of {size / 1e9:,.0f} GB free")
    return Group(*parts)


def _runs_table(now: Snapshot, before: Snapshot | None, runs: Iterable[str]) -> Table:
    columns = ("prompts", "done", "%", "rejected", "failed", "tok/s", "left", "samples", "dataset")
    table = number_table("run", *columns, gap=1)
    prompts = now.by("run", "dflash_prompts")
    finished = _finished(now)
    rejected = now.by("run", "dflash_completions_total", status="rejected")
    failed = now.by("run", "dflash_completions_total", status="failed")
    tokens = _rates(now, before, now.by("run", "dflash_output_tokens_total"), "dflash_output_tokens_total")
    pace = _differences(now, before, finished, _finished(before) if before else {})
    samples, merged = now.by("run", "dflash_samples_total"), now.by("run", "dflash_merge_samples", part="after")
    for run in runs:
        all_of, done = prompts.get(run, 0), finished.get(run, 0)
        left = (all_of - done) / pace[run] if pace.get(run) else None
        table.add_row(
            run,
            f"{all_of:,.0f}",
            f"{done:,.0f}",
            f"{100 * done / all_of:.1f}" if all_of else "-",
            f"{rejected.get(run, 0):,.0f}",
            f"{failed.get(run, 0):,.0f}",
            _number(tokens.get(run)),
            _duration(left) if all_of > done else "-",
            f"{samples.get(run, 0):,.0f}",
            _number(merged.get(run)),
        )
    return table


def _training_table(now: Snapshot, before: Snapshot | None) -> Table:
    table = number_table("training", "step", "of", "tok/s", "loss", "acceptance", "last step", "checkpoint")
    name = "dflash_training_tokens_total"
    trained = {
        run: tokens - now.by("run", name, role="target").get(run, 0) for run, tokens in now.by("run", name).items()
    }
    rates = _rates(now, before, trained, name)
    steps, losses = now.largest("run", "dflash_training_steps_total"), now.largest("run", "dflash_training_loss")
    acceptance = now.largest("run", "dflash_training_acceptance_length", source="all")
    stepped = now.largest("run", "dflash_training_last_step_timestamp_seconds")
    saved = now.largest("run", "dflash_training_checkpoint_timestamp_seconds")
    for run, planned in now.largest("run", "dflash_training_steps_planned").items():
        table.add_row(
            run,
            _number(steps.get(run)),
            _number(planned),
            _number(rates.get(run)),
            f"{losses[run]:.3f}" if run in losses else "-",
            f"{acceptance[run]:.3f}" if run in acceptance else "-",
            _ago(now, stepped.get(run)),
            _ago(now, saved.get(run)),
        )
    return table


def _queues_table(now: Snapshot) -> Table:
    states = ("waiting", "running", "abandoned", "scheduled", "failed")
    table = number_table("queue", *states, "workers", "oldest waits")
    jobs = {state: now.by("queue", "dflash_queue_jobs", state=state) for state in states}
    oldest = now.by("queue", "dflash_queue_oldest_waiting_seconds")
    for queue, workers in now.by("queue", "dflash_workers").items():
        counts = (_number(jobs[state].get(queue)) for state in states)
        table.add_row(queue, *counts, _number(workers), _duration(oldest.get(queue) or None))
    return table


def _finished(snapshot: Snapshot) -> dict[str, float]:
    journaled = snapshot.by("run", "dflash_journaled_prompts")
    return {run: count + journaled.get(run, 0) for run, count in snapshot.by("run", "dflash_completions_total").items()}


def _rates(now: Snapshot, before: Snapshot | None, current: dict[str, float], name: str) -> dict[str, float]:
    return _differences(now, before, current, before.by("run", name) if before else {})


def _differences(
    now: Snapshot, before: Snapshot | None, current: Mapping[str, float], earlier: Mapping[str, float]
) -> dict[str, float]:
    """Increase a second; a run that began again under its name has none yet."""
    if before is None or now.at <= before.at:
        return {}
    seconds = now.at - before.at
    return {run: max(0.0, value - earlier[run]) / seconds for run, value in current.items() if run in earlier}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _ago(now: Snapshot, moment: float | None) -> str:
    return "-" if moment is None else _duration(max(0.0, now.at - moment))


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f}{unit}"
    return f"{seconds:.0f}s"


def oldest_within(history: Iterable[Snapshot], seconds: float, now: Snapshot) -> Snapshot | None:
    """The oldest snapshot that is no older than so many seconds: rates over a short while jump."""
    return next((snapshot for snapshot in history if now.at - snapshot.at <= seconds), None)
