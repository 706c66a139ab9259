"""Metrics of queues, jobs and workers, from Redis."""

from collections.abc import Iterable
from datetime import UTC, datetime

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from redis import Redis
from rq import Queue, Worker
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
        with connection.pipeline() as pipeline:
            pipeline.llen(of_stage.key)
            pipeline.lrange(of_stage.key, 0, 0)
            pipeline.zrange(started_key, 0, -1)
            pipeline.zcard(of_stage.scheduled_job_registry.key)
            pipeline.zcard(of_stage.failed_job_registry.key)
            ask_for_life(begun, pipeline)
            count, first, entries, scheduled, failed, *alive = pipeline.execute()
        dead = {entry for entry, lives in zip(begun, alive, strict=True) if not lives}
        abandoned = sum(entry in dead for entry in entries)
        jobs.add_metric([stage, "waiting"], count)
        jobs.add_metric([stage, "running"], len(entries) - abandoned)
        jobs.add_metric([stage, "abandoned"], abandoned)
        jobs.add_metric([stage, "scheduled"], scheduled)
        jobs.add_metric([stage, "failed"], failed)
        waiting.add_metric([stage], max(map(_waits, _fetch(of_stage, first)), default=0.0))
        # An entry is a job's id and that of its execution.
        of_running = _fetch(of_stage, [entry.rpartition(b":")[0] for entry in entries[:LOOKED_AT]])
        running.add_metric([stage], max((_runs(job) for job in of_running), default=0.0))
        timeouts.add_metric([stage], max((_runs(job) / float(job.timeout or 1) for job in of_running), default=0.0))
        workers.add_metric([stage], len(Worker.all(queue=of_stage)))
    return [jobs, waiting, running, timeouts, workers]


def _fetch(of_stage: Queue, ids: list[bytes]) -> list[Job]:
    if not ids:
        return []
    fetched = Job.fetch_many([name.decode() for name in ids], of_stage.connection, serializer=of_stage.serializer)
    return [job for job in fetched if job is not None]


def _waits(job: Job) -> float:
    return _since(job.enqueued_at)


def _runs(job: Job) -> float:
    return _since(job.started_at)


def _since(moment: datetime | None) -> float:
    return max(0.0, (datetime.now(UTC) - moment).total_seconds()) if moment else 0.0
