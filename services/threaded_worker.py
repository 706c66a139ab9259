"""A worker that runs several jobs of its queue at once, each in a thread, for jobs that mostly wait for others.

It takes a job only when its host has room for one, so that no job lies here while another worker idles. Told to
stop, it takes none any more and ends with its last job, which the host makes finish or hand back.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

import structlog
from redis import Redis
from redis.exceptions import RedisError
from rq import Queue, SimpleWorker, worker_registration
from rq.exceptions import DequeueTimeout
from rq.executions import Execution
from rq.job import Job
from rq.scheduler import RQScheduler
from rq.timeouts import TimerDeathPenalty
from rq.worker import WorkerStatus

from services.live import publish_live
from services.queue_names import Stage
from services.workers import QueueWorker

# A killed worker's jobs are found again this many seconds after its last beat.
HEARTBEAT_TTL = 30
BEAT_SECONDS = 2.0
DEQUEUE_SECONDS = 1
SCHEDULE_SECONDS = 1.0
REDIS_PAUSE_SECONDS = 1.0


class HandedBackError(Exception):
    """The job was stopped before its end, and has to be taken up again by whoever is next."""


class Host(Protocol):
    """Where the jobs' work is done."""

    def has_room(self, running: int) -> bool:
        """Whether another job could begin now, beside so many that run."""

    def stop(self, at_once: bool) -> None:
        """Make the running jobs end: within the grace period, or at once."""

    def live(self) -> dict[str, dict[str, Any]]:
        """What goes on, by run."""


class ThreadedWorker(QueueWorker, SimpleWorker):
    death_penalty_class = TimerDeathPenalty

    def __init__(self, stage: Stage, connection: Redis, heartbeat_file: Path, host: Host) -> None:
        super().__init__(stage, connection, heartbeat_file)
        self._host = host
        self._threads: dict[threading.Thread, tuple[Job, Execution]] = {}
        self._beaten = 0.0
        self._scheduled = 0.0
        self._structlog = structlog.get_logger()

    def work(  # type: ignore[override]
        self, burst: bool = False, logging_level: str = "INFO", with_scheduler: bool = False
    ) -> bool:
        """Run jobs until told to stop; in burst mode, until the queue is empty and the last job has ended."""
        self._patiently(lambda: self.bootstrap(logging_level))
        # In this process: one that was forked would outlive this worker when it is killed.
        scheduler = RQScheduler(self.queues, self.connection, serializer=self.serializer) if with_scheduler else None
        if not burst:
            self._install_signal_handlers()  # type: ignore[no-untyped-call]
        worked = False
        while not (self._stop_requested or burst) or self._threads:
            worked |= bool(self._patiently(lambda: self._turn(burst, scheduler)))
            if burst and worked and not self._threads and self.queues[0].is_empty():
                break
        if scheduler:
            self._patiently(scheduler.release_locks)
        self._patiently(self.teardown)
        return worked

    def request_stop(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002  (a signal handler)
        self._host.stop(at_once=self._stop_requested)
        self._stop_requested = True

    def subscribe(self) -> None:
        """RQ's remote commands are for the forking worker."""

    def unsubscribe(self) -> None:
        """See `subscribe`."""

    def get_heartbeat_ttl(self, job: Job, working_time: float = 0.0) -> int:  # noqa: ARG002  (RQ calls it so)
        return HEARTBEAT_TTL

    def execute_job(self, job: Job, queue: Queue) -> None:
        execution = self.prepare_execution(job)
        thread = threading.Thread(target=self._perform, args=(job, queue, execution), name=job.id, daemon=True)
        self._threads[thread] = (job, execution)
        thread.start()

    def _finalize_failure(
        self,
        job: Job,
        queue: Queue,
        execution: Execution,
        exc_info: tuple[type[BaseException] | None, BaseException | None, TracebackType | None],
    ) -> None:
        if not isinstance(exc_info[1], HandedBackError):
            super()._finalize_failure(job, queue, execution, exc_info)
            return
        # Killed between the two, the job is delivered twice, and not lost.
        queue.enqueue_job(job, at_front=True)
        with self.connection.pipeline() as pipeline:
            self.cleanup_execution(job, pipeline=pipeline, execution=execution)
            pipeline.execute()
        self._structlog.info("job_handed_back", job=job.id)

    def _turn(self, burst: bool, scheduler: RQScheduler | None) -> bool:
        """One round: show life, maintain, take a job when there is room. Returns whether one was taken."""
        self._threads = {thread: taken for thread, taken in self._threads.items() if thread.is_alive()}
        self._beat()
        if scheduler and time.monotonic() - self._scheduled > SCHEDULE_SECONDS:
            self._scheduled = time.monotonic()
            if scheduler.acquire_locks():  # type: ignore[no-untyped-call]
                scheduler.enqueue_scheduled_jobs()  # type: ignore[no-untyped-call]
        if self._stop_requested or not self._host.has_room(len(self._threads)):
            time.sleep(0.05)
            return False
        if self.should_run_maintenance_tasks:
            self.run_maintenance_tasks()  # type: ignore[no-untyped-call]
        taken = self._take(None if burst else DEQUEUE_SECONDS)
        if taken is None:
            time.sleep(0.05 if burst else 0)
            return False
        self.execute_job(*taken)
        return True

    def _take(self, timeout: int | None) -> tuple[Job, Queue] | None:
        try:
            return self.queue_class.dequeue_any(
                self.queues,
                timeout,
                connection=self.connection,
                job_class=self.job_class,
                serializer=self.serializer,
                death_penalty_class=self.death_penalty_class,
            )
        except DequeueTimeout:
            return None

    def _beat(self) -> None:
        if time.monotonic() - self._beaten < BEAT_SECONDS:
            return
        self._beaten = time.monotonic()
        self.set_state(WorkerStatus.BUSY if self._threads else WorkerStatus.IDLE)
        self.heartbeat()
        # After a loss of Redis, nobody there knows this worker.
        worker_registration.register(self)
        for job, execution in list(self._threads.values()):
            self.maintain_heartbeats(job, execution)
        for run, content in self._host.live().items():
            publish_live(self.connection, run, self.name, content)

    def _perform(self, job: Job, queue: Queue, execution: Execution) -> None:
        try:
            self.perform_job(job, queue, execution)
        except RedisError as error:
            # Its results are files: whoever runs the job again finds them.
            self._structlog.error("job_end_not_recorded", job=job.id, error=str(error))

    def _patiently(self, action: Callable[[], Any]) -> Any:
        """Do it again until Redis answers: what runs here goes on without it, and so does the end of it all."""
        while True:
            try:
                return action()
            except (RedisError, OSError) as error:
                self._structlog.error("redis_unreachable", error=str(error))
                if self._stop_requested and not any(thread.is_alive() for thread in self._threads):
                    return None
                time.sleep(REDIS_PAUSE_SECONDS)
