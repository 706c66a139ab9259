"""The jobs of the queue `generate`, and the worker that runs them."""

import time
from functools import cache
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry
from redis import Redis
from redis.exceptions import RedisError

from services.chunks import find_chunk
from services.errors import UserError
from services.producer.host import GenerateHost
from services.producer.metrics import register
from services.queues import connect, enqueue
from services.runs import open_run, read_settings
from services.settings import Addresses
from services.threaded_worker import ThreadedWorker

ENQUEUE_TRIES = 5
ENQUEUE_PAUSE_SECONDS = 2.0


@cache
def process_host() -> GenerateHost:
    """The one place where this process generates, whichever thread asks."""
    return GenerateHost(Addresses().grace)


def generate(run_name: str, chunk_name: str) -> None:
    """Publish one chunk's completions, unless they are there, and hand the chunk on to be assembled.

    Of a paused run, nothing is done: `dflash-stack resume` enqueues its chunks again.
    """
    addresses = Addresses()
    run = open_run(addresses.runs, run_name)
    settings = read_settings(run)
    if process_host().generate(run, find_chunk(run, chunk_name), settings, addresses.server_list()):
        _hand_on(addresses, run_name, chunk_name, settings.assemble.job_timeout)


def make_generate_worker(connection: Redis, heartbeat_file: Path) -> ThreadedWorker:
    """A worker that takes as many chunks at once as it needs to keep its requests in flight."""
    return ThreadedWorker("generate", connection, heartbeat_file, process_host())


def register_generate_metrics(registry: CollectorRegistry) -> None:
    """Have a worker's /metrics tell what it generates."""
    register(registry, process_host().live)


def _hand_on(addresses: Addresses, run: str, chunk: str, job_timeout: int) -> None:
    for left in reversed(range(ENQUEUE_TRIES)):
        try:
            enqueue("assemble", connect(addresses), "assemble", run, chunk, job_timeout=job_timeout)
            return
        except (RedisError, UserError) as error:
            # `reconcile` finds a published chunk that nobody assembles.
            structlog.get_logger().error("chunk_not_handed_on", run=run, chunk=chunk, tries_left=left, error=str(error))
            time.sleep(ENQUEUE_PAUSE_SECONDS)
