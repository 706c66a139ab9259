"""A worker: one process that takes the jobs of one queue, and shows by a file that it is alive.

One queue a worker: only then does RQ move a job atomically, so that none is lost with a killed worker.
"""

import importlib
import inspect
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import structlog
from redis import Redis
from redis.exceptions import RedisError
from rq import Worker
from rq.exceptions import DeserializationError
from rq.executions import Execution
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.worker import BaseWorker

from services.errors import UserError
from services.heartbeats import heartbeat_file
from services.lifetime import end_forks_with_their_parent, ends_with_this_process
from services.metrics.worker import serve_worker_metrics
from services.queue_names import JOB_MODULES, Stage
from services.queues import connect, queue
from services.settings import Addresses

# A killed worker's job is found again after worker_ttl + maintenance_interval, and RQ's own minute.
WORKER_TTL = 25
MAINTENANCE_INTERVAL = 10
MONITORING_INTERVAL = 10
MAINTENANCE_LOCK_TTL = 60

OLDER_LAYOUT = "is of another version's layout; `dflash-stack reconcile RUN` enqueues what is missing in this one's"

# A worker that is told to stop finishes its job first, but a training run is told to stop as well: it saves a
# checkpoint, and its retry goes on from there.
STOPPED_WITH_WORKER: frozenset[Stage] = frozenset({"train"})


class QueueWorker(BaseWorker):
    """What every worker of ours adds to RQ's: it touches a file whenever it tells Redis that it is alive, fails a
    job that it cannot run with one clear line, and never blocks the recovery of others' jobs for long.
    """

    def __init__(self, stage: Stage, connection: Redis, heartbeat_file: Path) -> None:
        super().__init__(
            [queue(stage, connection)],
            connection=connection,
            serializer=JSONSerializer,
            worker_ttl=WORKER_TTL,
            maintenance_interval=MAINTENANCE_INTERVAL,
            job_monitoring_interval=MONITORING_INTERVAL,
            exception_handlers=[do_not_retry_user_errors],
        )
        self.stage = stage
        self.heartbeat_file = heartbeat_file

    def heartbeat(self, *arguments: Any, **keywords: Any) -> None:
        super().heartbeat(*arguments, **keywords)
        self.heartbeat_file.touch()

    def prepare_job_execution(self, job: Job, remove_from_intermediate_queue: bool = False) -> None:
        try:
            super().prepare_job_execution(job, remove_from_intermediate_queue)
            check_layout(self.stage, job.func_name, job.args, job.kwargs)
        except DeserializationError:
            raise UserError(f"job {job.id} in queue {self.stage} {OLDER_LAYOUT}") from None

    def clean_registries(self) -> None:
        # Killed in its maintenance, a worker would keep all others from it for RQ's 15 minutes.
        for of_stage in self.queues:
            if self.connection.ttl(of_stage.registry_cleaning_key) > MAINTENANCE_LOCK_TTL:
                self.connection.expire(of_stage.registry_cleaning_key, MAINTENANCE_LOCK_TTL)
        super().clean_registries()  # type: ignore[no-untyped-call]


class HeartbeatWorker(QueueWorker, Worker):
    """RQ's forking worker: one job at a time, each in a process of its own."""

    def maintain_heartbeats(self, job: Job, execution: Execution) -> None:
        """While a job runs, its process needs no Redis: a restart of Redis must not end a training run."""
        try:
            super().maintain_heartbeats(job, execution)
        except RedisError as error:
            structlog.get_logger().error("redis_unreachable", job=job.id, error=str(error))

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        # First: what RQ does then may wait for its scheduler.
        if self.stage in STOPPED_WITH_WORKER and self.horse_pid:
            os.kill(self.horse_pid, signal.SIGTERM)
        super().request_stop(signum, frame)  # type: ignore[no-untyped-call]


def check_layout(stage: Stage, function: str | None, arguments: Any, keywords: Any) -> None:
    """Raises UserError unless a job is one that this version enqueues: a function of the stage, and short names."""
    module, _, name = (function or "").rpartition(".")
    job = getattr(importlib.import_module(JOB_MODULES[stage]), name, None) if module == JOB_MODULES[stage] else None
    if not _takes(job, arguments, keywords) or not all(isinstance(argument, str) for argument in arguments):
        raise UserError(f"job {function}{tuple(arguments)} in queue {stage} {OLDER_LAYOUT}")


def _takes(job: Any, arguments: Any, keywords: Any) -> bool:
    if not inspect.isfunction(job):
        return False
    try:
        inspect.signature(job).bind(*arguments, **keywords)
    except TypeError:
        return False
    return True


def do_not_retry_user_errors(
    job: Job, _kind: type[BaseException], error: BaseException, _traceback: TracebackType
) -> bool:
    """RQ exception handler: what a user has to put right is kept as one line, and fails at once."""
    if isinstance(error, UserError):
        job.retries_left = 0
        job.meta["error"] = str(error)
        job.save_meta()  # type: ignore[no-untyped-call]
    return True


def run_worker(stage: Stage, addresses: Addresses) -> None:
    """Take jobs of one queue until SIGTERM or SIGINT; a job that runs then is finished or handed back.

    A room whose jobs want another worker than the forking one has a `make_STAGE_worker` beside them, and one that
    counts something of its own a `register_STAGE_metrics`.
    """
    module = importlib.import_module(JOB_MODULES[stage])
    serve_worker_metrics(stage, addresses, getattr(module, f"register_{stage}_metrics", None))
    make_worker = getattr(module, f"make_{stage}_worker", None) or partial(HeartbeatWorker, stage)
    worker = make_worker(connect(addresses), heartbeat_file(stage, addresses))
    # RQ forks its scheduler and its jobs: killed, a worker must not leave them to work beside its successor.
    end_forks_with_their_parent()
    worker.work(with_scheduler=True, logging_level="INFO")


def run_workers(stages: Sequence[Stage], command: Sequence[str]) -> int:
    """Run one worker process a queue (`command` + the queue's name) and end them all when one ends.

    Returns the exit status of the first that ended.
    """
    serve_worker_metrics(stages[0], Addresses())
    # One port a container, which is taken now.
    environment = {name: value for name, value in os.environ.items() if name != "DFLASH_METRICS_PORT"}
    workers = [
        subprocess.Popen([*command, stage], env=environment, preexec_fn=ends_with_this_process()) for stage in stages
    ]

    def pass_on(number: int, _frame: FrameType | None) -> None:
        for worker in workers:
            if worker.poll() is None:
                worker.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    while all(worker.poll() is None for worker in workers):
        time.sleep(0.5)
    status = next(worker.returncode for worker in workers if worker.returncode is not None)
    pass_on(signal.SIGTERM, None)
    for worker in workers:
        worker.wait()
    return int(status)


def worker_command() -> list[str]:
    """The command that runs one worker, to be followed by its queue's name."""
    return [sys.executable, "-m", "services.stack", "worker"]
