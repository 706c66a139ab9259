"""One chunk generated in the test's own process."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from services.chunks import Chunk
from services.producer.generate import generate_chunk
from services.producer.journal import hold
from services.producer.servers import Pace
from services.producer.session import open_session
from services.records import Completion
from services.runs import Run
from services.settings import Settings

LONGEST_SECONDS = 60
QUICK = Pace(patience=10, probe_interval=0.02, first_backoff=0.01, longest_backoff=0.02)


async def generate_once(
    run: Run, chunk: Chunk, settings: Settings, urls: Sequence[str], pace: Pace | None = None
) -> None:
    async with asyncio.timeout(LONGEST_SECONDS), open_session(run, settings, urls, pace) as session:
        await generate_chunk(session, chunk)


def append_to_journal(path: Path, *completions: Completion) -> None:
    with hold(path) as journal:
        assert journal
        for completion in completions:
            journal.append(completion)
