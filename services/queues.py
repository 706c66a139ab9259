"""The queues: their names, their jobs, how a job is enqueued and what became of it.

A job is a dotted name and a few short strings, serialized as JSON. Every job is safe to run twice, so a
lost worker costs a retry and nothing else.
"""

import hashlib
import re
from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, cast
from urllib.parse import urlsplit

from redis import Redis
from redis.backoff import ExponentialBackoff
from redis.client import Pipeline
from redis.exceptions import RedisError
from redis.retry import Retry as ConnectionRetry
from rq import Queue, Retry
from rq.defaults import RQ_KEY_PREFIX
from rq.exceptions import NoSuchJobError
from rq.job import Job
from rq.serializers import JSONSerializer

from services.errors import UserError
from services.queue_names import JOB_MODULES, Stage
from services.secret_files import check_secret, read_secret
from services.settings import Addresses

JOB_NAME = re.compile(r"^[A-Za-z0-9_-]+$")
RETRY_INTERVALS = [5, 30, 120]
RESULT_TTL = 3600
ENQUEUED_AT_ONCE = 500

State = Literal["missing", "waiting", "running", "finished", "failed"]


class JobState(NamedTuple):
    """Where a job stands; `error` is one line, for a failed one."""

    state: State
    error: str | None = None


def connect(addresses: Addresses, seconds: float | None = None) -> Redis:
    """A connection to Redis that has answered.

    `seconds`: how long an answer may take, without another try; None: with the patience of who cannot do without.

    Raises:
        UserError: nothing answers there, or the password is a placeholder or not accepted.
    """
    password = read_secret(addresses.redis_password_file) if addresses.redis_password_file else None
    options: dict[str, Any] = {"password": password} if password else {}
    if seconds is not None:
        options |= {"socket_timeout": seconds, "socket_connect_timeout": seconds}
    try:
        if of_address := urlsplit(addresses.redis_url).password:
            check_secret(of_address, "in DFLASH_REDIS_URL")
        connection = Redis.from_url(
            addresses.redis_url,
            **options,
            health_check_interval=30,
            retry=ConnectionRetry(ExponentialBackoff(cap=2, base=0.1), retries=5 if seconds is None else 0),
        )
        connection.ping()
    except RedisError as error:
        where = addresses.redis_url.partition("?")[0].rpartition("@")[2].removeprefix("redis://")
        raise UserError(f"Redis at {where}: {error}; start it, or set DFLASH_REDIS_URL") from error
    except (ValueError, TypeError) as error:
        # An option that there is not, and a name that no host can have, are found when it is used first.
        raise UserError("DFLASH_REDIS_URL is no address of Redis; write it as redis://HOST:PORT/0") from error
    return connection


def queue(stage: Stage, connection: Redis) -> Queue:
    return Queue(stage, connection=connection, serializer=JSONSerializer)


def job_id(stage: Stage, job: str, *names: str) -> str:
    """The job's name in Redis. RQ takes no path, so a name of other characters than its own is a digest there."""
    shown = (name if JOB_NAME.match(name) else hashlib.sha256(name.encode()).hexdigest()[:16] for name in names)
    return "--".join([stage, job, *shown])


def enqueue(stage: Stage, connection: Redis, job: str, *names: str, job_timeout: int) -> bool:
    """Enqueue `job(*names)` of the stage's module, unless the same job waits or runs already.

    A finished or failed job of the same names is replaced: the job itself sees whether its result is there.
    Returns whether it was enqueued.
    """
    return bool(enqueue_missing(stage, connection, job, [names], job_timeout=job_timeout))


def enqueue_missing(
    stage: Stage, connection: Redis, job: str, names: Sequence[tuple[str, ...]], job_timeout: int
) -> list[str]:
    """`enqueue` for many jobs of one kind, in few round trips. Returns the ids of those that were enqueued."""
    ids = {job_id(stage, job, *of_job): of_job for of_job in names}
    states = job_states(stage, ids.keys(), connection)
    missing = [name for name in ids if states[name] not in {"waiting", "running"}]
    of_stage = queue(stage, connection)
    for begin in range(0, len(missing), ENQUEUED_AT_ONCE):
        some = missing[begin : begin + ENQUEUED_AT_ONCE]
        with connection.pipeline() as pipeline:
            pipeline.zrem(of_stage.failed_job_registry.key, *some)
            pipeline.zrem(of_stage.finished_job_registry.key, *some)
            pipeline.delete(*(Job.key_for(name) for name in some))
            of_stage.enqueue_many(
                [
                    Queue.prepare_data(
                        f"{JOB_MODULES[stage]}.{job}",
                        args=list(ids[name]),
                        job_id=name,
                        timeout=job_timeout,
                        result_ttl=RESULT_TTL,
                        retry=Retry(max=len(RETRY_INTERVALS), interval=RETRY_INTERVALS),
                        meta={"enqueued_at": datetime.now(UTC).isoformat()},
                    )
                    for name in some
                ],
                pipeline=pipeline,
            )
            pipeline.execute()
    return missing


def job_states(stage: Stage, names: Collection[str], connection: Redis) -> dict[str, State]:
    """Where each job with these ids stands; a few round trips for any number of them."""
    of_stage = queue(stage, connection)
    started_key = of_stage.started_job_registry.key
    begun: list[bytes] = connection.zrange(started_key, 0, -1)  # type: ignore[assignment]
    with connection.pipeline() as pipeline:
        pipeline.zrange(of_stage.finished_job_registry.key, 0, -1)
        pipeline.zrange(of_stage.failed_job_registry.key, 0, -1)
        pipeline.zrange(of_stage.scheduled_job_registry.key, 0, -1)
        pipeline.lrange(of_stage.key, 0, -1)
        pipeline.lrange(of_stage.intermediate_queue_key, 0, -1)
        pipeline.zrange(started_key, 0, -1)
        ask_for_life(begun, pipeline)
        finished, failed, scheduled, queued, popped, started, *alive = pipeline.execute()
    # What a dead worker had begun nobody runs; what was begun since was not asked for.
    dead = {entry for entry, lives in zip(begun, alive, strict=True) if not lives}
    states: dict[str, State] = dict.fromkeys(names, "missing")
    # The later of these is the newer: a retried job may still be listed as failed.
    by_age: tuple[tuple[State, list[bytes]], ...] = (
        ("finished", finished),
        ("failed", failed),
        ("waiting", [*scheduled, *queued, *popped]),
        ("running", [entry.rpartition(b":")[0] for entry in started if entry not in dead]),
    )
    for state, listed in by_age:
        for entry in listed:
            if (name := entry.decode()) in states:
                states[name] = state
    return states


def ask_for_life(entries: Iterable[bytes], pipeline: Pipeline) -> None:
    """Ask, for each entry of the started jobs, whether its worker lives.

    A worker renews a key of each job that it runs, which Redis lets go of by its own clock. The entries' scores are by
    the clock of the worker's host, which may be another than this one's.
    """
    for entry in entries:
        pipeline.exists(f"{RQ_KEY_PREFIX}:execution:{entry.decode()}")


def job_state(name: str, connection: Redis) -> JobState:
    """Where the job with this id stands, and why it failed."""
    stage = cast(Stage, name.partition("--")[0])
    state = job_states(stage, [name], connection)[name]
    return JobState(state, job_error(name, connection) if state == "failed" else None)


def job_error(name: str, connection: Redis) -> str:
    """Why the job with this id failed, in one line."""
    try:
        job = Job.fetch(name, connection=connection, serializer=JSONSerializer)
    except NoSuchJobError:
        return "it is gone from Redis"
    if told := job.meta.get("error"):
        return str(told)
    result = job.latest_result()
    text = (result.exc_string or "").strip() if result else ""
    return text.splitlines()[-1] if text else "it ended without saying why; see the worker's log"
