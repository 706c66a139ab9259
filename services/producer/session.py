"""One run's generating in this process: its servers, its rules, and whether it goes on."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from services.chunks import read_chunks
from services.control import pause, read_control
from services.ledger import GenerateCounter, total
from services.producer.client import sampling
from services.producer.outcome import END_THINK, THINK
from services.producer.servers import Pace, Servers
from services.records import Prompt, read_prompts
from services.runs import Run
from services.settings import Settings
from services.target import added_token_ids, model_fingerprint, vocabulary_size

CONTROL_SECONDS = 2.0


@dataclass(eq=False)
class Session:
    """What the chunks of one run share. `stopped` says why nothing is sent any more."""

    run: Run
    settings: Settings
    servers: Servers
    vocabulary: int
    thinking_ids: dict[str, int]
    revision: str
    open_chunks: set[str] = field(default_factory=set)
    stopped: str | None = None
    full_disk_told: float = float("-inf")
    _priorities: Iterator[int] = field(default_factory=itertools.count)

    def next_priority(self) -> int:
        """For a chunk that comes now: behind all that came before."""
        return next(self._priorities)

    def stop(self, reason: str) -> None:
        """Send no further prompt; answers in flight are awaited and kept."""
        self.stopped = self.stopped or reason
        self.servers.stop()

    def origin(self, servers: set[str]) -> dict[str, Any]:
        """How a chunk's completions came about, to be kept with them."""
        versions = {server.url: server.version for server in self.servers.all}
        return {
            "model": self.settings.target.served_name,
            "revision": self.revision,
            "sampling": sampling(self.settings.generate),
            "servers": {url: versions.get(url) for url in sorted(servers)},
        }

    def live(self) -> dict[str, Any]:
        """What goes on here at this moment."""
        return {
            "chunks": len(self.open_chunks),
            "slots": self.settings.generate.concurrency,
            "servers": {
                server.url: {
                    "state": "ready" if server.healthy else "refused" if server.refused else "left out",
                    "trouble": server.trouble,
                    "in_flight": server.in_flight,
                    "tokens_per_second": round(self.servers.rate(server), 1),
                    "version": server.version,
                }
                for server in self.servers.all
            },
        }


@contextlib.asynccontextmanager
async def open_session(
    run: Run, settings: Settings, urls: Sequence[str], pace: Pace | None = None
) -> AsyncIterator[Session]:
    """Servers of the run are watched, and its pause and budget obeyed, until the block ends.

    Raises:
        UserError: an address is no URL, or target.path is not the model's folder.
    """
    target = settings.target.path
    vocabulary = vocabulary_size(target)
    thinking_ids = added_token_ids(target, (THINK, END_THINK)) if settings.generate.unclosed_thinking != "keep" else {}
    async with Servers(urls, settings, pace, _sample(run)) as servers:
        session = Session(run, settings, servers, vocabulary, thinking_ids, model_fingerprint(target))
        obeying = asyncio.create_task(_obey(session))
        try:
            yield session
        finally:
            obeying.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await obeying


async def _obey(session: Session) -> None:
    """Stop the session when the run is paused, and pause the run when a budget of its is used up."""
    counter = GenerateCounter(session.run)
    while session.stopped is None:
        try:
            await _look_at_control(session, counter)
        except (OSError, ValueError) as error:
            # Such as of a full disk: nobody awaits this task, and the budget has to hold when there is space again.
            structlog.get_logger().error("control_not_obeyed", run=session.run.name, error=str(error))
        await asyncio.sleep(CONTROL_SECONDS)


async def _look_at_control(session: Session, counter: GenerateCounter) -> None:
    control = read_control(session.run)
    if control.paused is None and (control.max_tokens or control.until):
        tokens = total((await asyncio.to_thread(counter.count)).values()).output_tokens
        # Counting takes its time, in which the operator may have given another budget.
        control = read_control(session.run)
        if control.paused is None and (spent := control.spent(tokens)):
            pause(session.run, spent)
            control = read_control(session.run)
    if control.paused is not None:
        structlog.get_logger().warning("run_paused", run=session.run.name, reason=control.paused)
        session.stop(control.paused)


def _sample(run: Run) -> Prompt | None:
    """One of the run's prompts, to see whether a server reads it as this run does."""
    for chunk in read_chunks(run)[:1]:
        if run.prompts(chunk.source).is_file():
            return read_prompts(run.prompts(chunk.source), chunk.first, 1)[0]
    return None
