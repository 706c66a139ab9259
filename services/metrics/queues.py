"""Metrics of queues, jobs and workers, from Redis."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from redis import Redis
from rq import worker_registration
from rq.job import Job

from services.queue_names import JOB_MODULES
from services.queues import ask_for_life, queue

# More jobs than these do not run at once; were they to, the oldest of them would still be told.
LOOKED_AT = 256


def queue_metrics(connection: Redis) -> Iterable[Metric]:
    """Raises RedisError when Redis does not answer."""
    jobs = GaugeMetricFamily(
        "dflash_queue_jobs",
        "Jobs by queue and state; abandoned: of a worker that shows no sign of life.",
        labels=["queue", "state"],
    )
    waiting = GaugeMetricFamily(
        "dflash_queue_oldest_waiting_seconds", "How long the first job of the queue waits.", labels=["queue"]
    )
    running = GaugeMetricFamily(
        "dflash_queue_oldest_running_seconds", "How long the longest of the running jobs runs.", labels=["queue"]
    )
    timeouts = GaugeMetricFamily(
        "dflash_queue_running_timeout_ratio", "The largest share of its time-out that a job has used.", labels=["queue"]
    )
    workers = GaugeMetricFamily("dflash_workers", "Live workers by queue.", labels=["queue"])
    for stage in JOB_MODULES:
        of_stage = queue(stage, connection)
        started_key = of_stage.started_job_registry.key
        begun: list[bytes] = connection.zrange(started_key, 0, -1)  # type: ignore[assignment]
        of_workers = worker_registration.get_keys(of_stage)
        with connection.pipeline() as pipeline:
            pipeline.llen(of_stage.key)
            pipeline.lrange(of_stage.key, 0, 0)
            pipeline.zrange(started_key, 0, -1)
            pipeline.zcard(of_stage.scheduled_job_registry.key)
            pipeline.zcard(of_stage.failed_job_registry.key)
            # Of a worker that died the name stays for a while, and its key does not.
            for key in of_workers:
                pipeline.exists(key)
            ask_for_life(begun, pipeline)
            count, first, entries, scheduled, failed, *lives = pipeline.execute()
        live_workers, alive = sum(lives[: len(of_workers)]), lives[len(of_workers) :]
        dead = {entry for entry, lives in zip(begun, alive, strict=True) if not lives}
        abandoned = sum(entry in dead for entry in entries)
        jobs.add_metric([stage, "waiting"], count)
        jobs.add_metric([stage, "running"], len(entries) - abandoned)
        jobs.add_metric([stage, "abandoned"], abandoned)
        jobs.add_metric([stage, "scheduled"], scheduled)
        jobs.add_metric([stage, "failed"], failed)
        waiting.add_metric([stage], max((job.waits for job in _fetch(connection, first)), default=0.0))
        # An entry is a job's id and that of its execution.
        of_running = _fetch(connection, [entry.rpartition(b":")[0] for entry in entries[:LOOKED_AT]])
        running.add_metric([stage], max((job.runs for job in of_running), default=0.0))
        timeouts.add_metric([stage], max((job.runs / job.timeout for job in of_running), default=0.0))
        workers.add_metric([stage], live_workers)
    return [jobs, waiting, running, timeouts, workers]


class Ages(NamedTuple):
    """Of a job, in seconds: how long it waits and runs, 0 where that is not known, and how long it may run."""

    waits: float
    runs: float
    timeout: float


def _fetch(connection: Redis, ids: list[bytes]) -> list[Ages]:
    """Only what is told: a job that another version of RQ wrote may have more that this one does not understand."""
    with connection.pipeline(transaction=False) as pipeline:
        for name in ids:
            pipeline.hmget(Job.key_for(name.decode()), "enqueued_at", "started_at", "timeout")
        return [
            Ages(_since(enqueued), _since(started), _seconds(time)) for enqueued, started, time in pipeline.execute()
        ]


def _since(moment: bytes | None) -> float:
    try:
        begun = datetime.fromisoformat((moment or b"").decode())
    except ValueError:
        return 0.0
    return max(0.0, (datetime.now(UTC) - begun.astimezone(UTC)).total_seconds())


def _seconds(timeout: bytes | None) -> float:
    """Of a job without a time-out, or with one that is no number, infinite: it never uses that up."""
    try:
        seconds = float(timeout or b"inf")
    except ValueError:
        return float("inf")
    return seconds if seconds > 0 else float("inf")
