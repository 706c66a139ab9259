"""The queues: their names, their jobs, how a job is enqueued and what became of it.

A job is a dotted name and a few short strings, serialized as JSON. Every job is safe to run twice, so a
lost worker costs a retry and nothing else.
"""

import hashlib
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from redis import Redis
from redis.backoff import ExponentialBackoff
from redis.exceptions import RedisError
from redis.retry import Retry as ConnectionRetry
from rq import Queue, Retry
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from services.errors import UserError
from services.settings import Addresses

Stage = Literal["prepare", "generate", "assemble", "merge", "train"]

# Where the jobs of a queue live. Whoever enqueues one needs none of its imports.
JOB_MODULES: dict[Stage, str] = {
    "prepare": "services.prompts.jobs",
    "generate": "services.producer.jobs",
    "assemble": "services.tokenizer.jobs",
    "merge": "services.tokenizer.jobs",
    "train": "services.trainer.jobs",
}

JOB_NAME = re.compile(r"^[A-Za-z0-9_-]+$")
RETRY_INTERVALS = [5, 30, 120]
RESULT_TTL = 3600
WAITING = {JobStatus.QUEUED, JobStatus.SCHEDULED, JobStatus.DEFERRED, JobStatus.CREATED}


class JobState(NamedTuple):
    """Where a job stands; `error` is one line, for a failed one."""

    state: Literal["missing", "waiting", "running", "finished", "failed"]
    error: str | None = None


def connect(addresses: Addresses) -> Redis:
    """A connection to Redis that has answered.

    Raises:
        UserError: nothing answers there, or the password is not accepted.
    """
    password = addresses.redis_password_file.read_text().strip() if addresses.redis_password_file else None
    connection = Redis.from_url(
        addresses.redis_url,
        **({"password": password} if password else {}),
        health_check_interval=30,
        retry=ConnectionRetry(ExponentialBackoff(cap=2, base=0.1), retries=5),
    )
    try:
        connection.ping()
    except RedisError as error:
        where = addresses.redis_url.rpartition("@")[2].removeprefix("redis://")
        raise UserError(f"Redis at {where}: {error}; start it, or set DFLASH_REDIS_URL") from error
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
    name = job_id(stage, job, *names)
    if job_state(name, connection).state in {"waiting", "running"}:
        return False
    queue(stage, connection).enqueue_call(
        f"{JOB_MODULES[stage]}.{job}",
        args=names,
        job_id=name,
        timeout=job_timeout,
        result_ttl=RESULT_TTL,
        retry=Retry(max=len(RETRY_INTERVALS), interval=RETRY_INTERVALS),
        meta={"enqueued_at": datetime.now(UTC).isoformat()},
    )
    return True


def job_state(name: str, connection: Redis) -> JobState:
    """What Redis knows of the job with this id."""
    return job_states([name], connection)[name]


def job_states(names: Sequence[str], connection: Redis) -> dict[str, JobState]:
    """What Redis knows of the jobs with these ids."""
    jobs = Job.fetch_many(names, connection=connection, serializer=JSONSerializer)
    return {name: _state(job) for name, job in zip(names, jobs, strict=True)}


def _state(job: Job | None) -> JobState:
    if job is None:
        return JobState("missing")
    status = job.get_status(refresh=False)
    if status in WAITING:
        return JobState("waiting")
    if status == JobStatus.STARTED:
        return JobState("running")
    if status == JobStatus.FINISHED:
        return JobState("finished")
    return JobState("failed", _failure(job))


def _failure(job: Job) -> str:
    if told := job.meta.get("error"):
        return str(told)
    result = job.latest_result()
    text = (result.exc_string or "").strip() if result else ""
    return text.splitlines()[-1] if text else "it ended without saying why; see the worker's log"
