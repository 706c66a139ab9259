"""The state of all runs and queues as Prometheus metrics.

Everything is counted from files and Redis, so no restart loses or doubles a count; a file that is published for
good is read once.
"""

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import structlog
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from pyarrow import ArrowException
from redis.exceptions import RedisError

from services.errors import UserError
from services.ledger import GenerateCounter, count_assembled
from services.metrics.dataset import DatasetFamilies, read_published
from services.metrics.generation import GenerationFamilies
from services.metrics.gpu import gpu_metrics
from services.metrics.machine import disk_metrics
from services.metrics.operations import operations_metrics
from services.metrics.queues import queue_metrics
from services.metrics.renderable import renderable
from services.metrics.training import Known, training_metrics
from services.queues import connect
from services.runs import RUN_NAME, Run
from services.settings import Addresses

UNREADABLE = (UserError, OSError, ValueError, KeyError, TypeError, AttributeError, ArrowException)
# A scrape has ten seconds, and all but the queues can be told without Redis.
REDIS_SECONDS = 2.0


class StackCollector(Collector):
    """Metrics of every run in `addresses.runs` and of every queue; what cannot be read is a metric as well."""

    def __init__(self, addresses: Addresses) -> None:
        self._addresses = addresses
        self._counters: dict[tuple[Path, object], RunCounter] = {}
        self._ranks: dict[Path, Known] = {}
        self._counting = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        # Prometheus and the health check may ask at once, and what grows is counted from where it was left.
        with self._counting:
            families = list(self._families())
        yield from families

    def _families(self) -> Iterator[Metric]:
        addresses = self._addresses
        runs = _runs(addresses.runs)
        yield from self._run_metrics(runs)
        yield from training_metrics(runs, self._ranks)
        yield from self._queue_metrics()
        yield from disk_metrics(addresses.runs)
        yield from operations_metrics(addresses.versions, addresses.releases)
        yield from gpu_metrics()

    def _run_metrics(self, runs: Iterable[Run]) -> Iterator[Metric]:
        unreadable = GaugeMetricFamily(
            "dflash_run_unreadable", "Whether a run's files cannot be counted.", labels=["run"]
        )
        families = _families_of_runs()
        kept: dict[tuple[Path, object], RunCounter] = {}
        for run in runs:
            key = (run.root, _identity(run.chunks))
            counter = self._counters.get(key) or RunCounter(run)
            try:
                counted = renderable(counter.families())
            except UNREADABLE as error:
                structlog.get_logger().warning("run_unreadable", run=run.name, error=str(error))
                unreadable.add_metric([run.name], 1)
                continue
            kept[key] = counter
            unreadable.add_metric([run.name], 0)
            for family, of_run in zip(families, counted, strict=True):
                family.samples.extend(of_run.samples)
        # A run that could not be read is read anew next time.
        self._counters = kept
        yield unreadable
        yield from families

    def _queue_metrics(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("dflash_redis_up", "Whether Redis answered; without it there are no queue metrics.")
        try:
            found = list(queue_metrics(connect(self._addresses, REDIS_SECONDS)))
        except (UserError, RedisError) as error:
            structlog.get_logger().warning("redis_unreadable", error=str(error))
            found = []
        up.add_metric([], bool(found))
        yield up
        yield from found


class RunCounter:
    """Counts one run at each scrape; what is published is read once."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._generated = GenerateCounter(run)
        self._assembled: dict[str, dict[str, Any]] = {}
        self._published: dict[str, dict[str, Any]] = {}

    def families(self) -> list[Metric]:
        """What is generated, assembled, merged and evaluated so far, in the families of `_families_of_runs`."""
        assembled = list(count_assembled(self._run, self._assembled).values())
        generation, dataset = GenerationFamilies(), DatasetFamilies()
        generation.add(self._run, self._generated.count())
        dataset.add(self._run, assembled, read_published(self._run, self._published))
        return [*generation.all(), *dataset.all()]


def _families_of_runs() -> list[Metric]:
    return [*GenerationFamilies().all(), *DatasetFamilies().all()]


def _runs(folder: Path) -> list[Run]:
    """Those that a command can name."""
    try:
        records = sorted(folder.glob("*/run.json"))
    except OSError as error:
        structlog.get_logger().warning("runs_unreadable", error=str(error))
        return []
    return [Run(record.parent) for record in records if RUN_NAME.match(record.parent.name)]


def _identity(path: Path) -> object:
    """Tells a file from another of the same name: a run that was removed may come again under its name."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
