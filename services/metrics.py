"""The state of all runs and queues as Prometheus metrics.

Everything is counted anew from files and Redis at each scrape, so no restart loses or doubles a count.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from pyarrow import ArrowException
from redis import Redis
from redis.exceptions import RedisError
from rq import Worker

from services.errors import UserError
from services.ledger import count_assembled, count_generated
from services.queues import JOB_MODULES, connect, queue
from services.runs import Run
from services.settings import Addresses

UNREADABLE = (UserError, OSError, ValueError, KeyError, TypeError, ArrowException)


class StackCollector(Collector):
    """Metrics of every run in `addresses.runs` and of every queue; what cannot be read is a metric as well."""

    def __init__(self, addresses: Addresses) -> None:
        self._addresses = addresses

    def collect(self) -> Iterator[Metric]:
        yield from _run_metrics(self._addresses.runs)
        up = GaugeMetricFamily("dflash_redis_up", "Whether Redis answered; without it there are no queue metrics.")
        try:
            queue_metrics = list(_queue_metrics(connect(self._addresses)))
        except (UserError, RedisError) as error:
            structlog.get_logger().warning("redis_unreadable", error=str(error))
            queue_metrics = []
        up.add_metric([], bool(queue_metrics))
        yield up
        yield from queue_metrics


def serve_metrics(addresses: Addresses, port: int, host: str = "0.0.0.0") -> None:
    """Answer /metrics until the process is ended.

    Raises:
        UserError: the port is taken.
    """
    registry = CollectorRegistry()
    registry.register(StackCollector(addresses))
    try:
        _, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise UserError(f"metrics on {host}:{port}: {error.strerror}; choose another port") from error
    structlog.get_logger().info("metrics_ready", port=port)
    thread.join()


def _run_metrics(runs: Path) -> Iterable[Metric]:
    unreadable = GaugeMetricFamily("dflash_run_unreadable", "Whether a run's files cannot be counted.", labels=["run"])
    families = _Families()
    for record in sorted(runs.glob("*/run.json")):
        run = Run(record.parent)
        try:
            families.add(run)
        except UNREADABLE as error:
            structlog.get_logger().warning("run_unreadable", run=run.name, error=str(error))
            unreadable.add_metric([run.name], 1)
        else:
            unreadable.add_metric([run.name], 0)
    return [unreadable, *families.all()]


class _Families:
    """The metrics of runs, filled run by run; a run that cannot be read adds to none of them."""

    def __init__(self) -> None:
        by_source = ["run", "source"]
        self.prompts = GaugeMetricFamily("dflash_prompts", "Prompts cut into chunks.", labels=by_source)
        self.journaled = GaugeMetricFamily(
            "dflash_journaled_prompts", "Finished prompts of chunks that are not.", labels=by_source
        )
        self.chunks = GaugeMetricFamily("dflash_chunks", "Chunks.", labels=[*by_source, "state"])
        self.completions = CounterMetricFamily(
            "dflash_completions", "Prompts of finished chunks by what became of them.", labels=[*by_source, "status"]
        )
        self.rejections = CounterMetricFamily(
            "dflash_rejections", "Rejected answers of finished chunks.", labels=[*by_source, "reason"]
        )
        self.failures = CounterMetricFamily(
            "dflash_failures", "Prompts of finished chunks without an answer.", labels=[*by_source, "reason"]
        )
        self.output_tokens = CounterMetricFamily(
            "dflash_output_tokens", "Tokens of completed answers, unfinished chunks included.", labels=by_source
        )
        self.samples = CounterMetricFamily("dflash_samples", "Assembled samples.", labels=["run"])
        self.sample_tokens = CounterMetricFamily(
            "dflash_sample_tokens", "Tokens of assembled samples, prompts included.", labels=["run"]
        )

    def all(self) -> list[Metric]:
        return list(vars(self).values())

    def add(self, run: Run) -> None:
        generated = count_generated(run)
        assembled = count_assembled(run).values()
        samples = sum(int(chunk["samples"]) for chunk in assembled)
        sample_tokens = sum(int(chunk["tokens"]) for chunk in assembled)
        for source, counts in generated.items():
            labels = [run.name, source]
            self.prompts.add_metric(labels, counts.prompts)
            self.journaled.add_metric(labels, counts.in_journal)
            self.chunks.add_metric([*labels, "done"], counts.chunks_done)
            self.chunks.add_metric([*labels, "open"], counts.chunks - counts.chunks_done)
            self.completions.add_metric([*labels, "completed"], counts.completed)
            self.completions.add_metric([*labels, "rejected"], counts.rejected.total())
            self.completions.add_metric([*labels, "failed"], counts.failed.total())
            for reason, count in counts.rejected.items():
                self.rejections.add_metric([*labels, reason], count)
            for reason, count in counts.failed.items():
                self.failures.add_metric([*labels, reason], count)
            self.output_tokens.add_metric(labels, counts.output_tokens)
        self.samples.add_metric([run.name], samples)
        self.sample_tokens.add_metric([run.name], sample_tokens)


def _queue_metrics(connection: Redis) -> Iterable[Metric]:
    jobs = GaugeMetricFamily("dflash_queue_jobs", "Jobs by queue and state.", labels=["queue", "state"])
    workers = GaugeMetricFamily("dflash_workers", "Live workers by queue.", labels=["queue"])
    for stage in JOB_MODULES:
        of_stage = queue(stage, connection)
        jobs.add_metric([stage, "waiting"], of_stage.count)
        jobs.add_metric([stage, "running"], of_stage.started_job_registry.get_job_count(cleanup=False))
        jobs.add_metric([stage, "scheduled"], of_stage.scheduled_job_registry.get_job_count(cleanup=False))
        jobs.add_metric([stage, "failed"], of_stage.failed_job_registry.get_job_count(cleanup=False))
        workers.add_metric([stage], len(Worker.all(queue=of_stage)))
    return [jobs, workers]
