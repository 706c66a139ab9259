"""A worker: one process that takes the jobs of one queue, and shows by a file that it is alive.

One queue a worker: only then does RQ move a job atomically, so that none is lost with a killed worker.
"""

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from redis import Redis
from rq import Worker
from rq.job import Job
from rq.serializers import JSONSerializer

from services.errors import UserError
from services.queues import JOB_MODULES, Stage, connect, queue
from services.settings import Addresses

# A killed worker's job is found again after worker_ttl + maintenance_interval, and RQ's own minute.
WORKER_TTL = 25
MAINTENANCE_INTERVAL = 10
MONITORING_INTERVAL = 10
STALE_AFTER = 60

# A worker that is told to stop finishes its job first, but a training run is told to stop as well: it saves a
# checkpoint, and its retry goes on from there.
STOPPED_WITH_WORKER: frozenset[Stage] = frozenset({"train"})


class HeartbeatWorker(Worker):
    """RQ's forking worker, which also touches a file whenever it tells Redis that it is alive."""

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
        self.heartbeat_file = heartbeat_file
        self.stops_its_job = stage in STOPPED_WITH_WORKER

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        super().request_stop(signum, frame)  # type: ignore[no-untyped-call]
        if self.stops_its_job and self.horse_pid:
            os.kill(self.horse_pid, signal.SIGTERM)

    def heartbeat(self, *arguments: Any, **keywords: Any) -> None:
        super().heartbeat(*arguments, **keywords)
        self.heartbeat_file.touch()


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
    """Take jobs of one queue until SIGTERM or SIGINT; a job that runs then is finished first."""
    importlib.import_module(JOB_MODULES[stage])
    worker = HeartbeatWorker(stage, connect(addresses), heartbeat_file(stage, addresses))
    worker.work(with_scheduler=True, logging_level="INFO")


def run_workers(stages: Sequence[Stage], command: Sequence[str]) -> int:
    """Run one worker process a queue (`command` + the queue's name) and end them all when one ends.

    Returns the exit status of the first that ended.
    """
    workers = [subprocess.Popen([*command, stage]) for stage in stages]

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


def heartbeat_file(stage: Stage, addresses: Addresses) -> Path:
    return addresses.heartbeat.with_name(f"{addresses.heartbeat.name}-{stage}")


def check_heartbeats(stages: Sequence[Stage], addresses: Addresses) -> None:
    """Raises UserError when a worker of one of the queues has shown no sign of life for a minute."""
    for stage in stages:
        path = heartbeat_file(stage, addresses)
        try:
            age = time.time() - path.stat().st_mtime
        except FileNotFoundError:
            raise UserError(f"worker of queue {stage}: no heartbeat at {path}; it has not started here") from None
        if age > STALE_AFTER:
            raise UserError(f"worker of queue {stage}: last heartbeat {age:.0f} s ago; it hangs, restart it")
