"""The jobs of the queue `generate`."""

import asyncio

from services.ledger import find_chunk
from services.producer.generate import generate_chunk
from services.queues import connect, enqueue
from services.runs import open_run, read_settings
from services.settings import Addresses


def generate(run_name: str, chunk_name: str) -> None:
    """Publish one chunk's completions, unless they are there, and hand the chunk on to be assembled."""
    addresses = Addresses()
    run = open_run(addresses.runs, run_name)
    settings = read_settings(run)
    asyncio.run(generate_chunk(run, find_chunk(run, chunk_name), settings, addresses.server_list()))
    enqueue(
        "assemble",
        connect(addresses),
        "assemble",
        run_name,
        chunk_name,
        job_timeout=settings.assemble.job_timeout,
    )
