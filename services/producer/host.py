"""Where this process generates: one event loop in a thread, for all chunks that its worker has taken."""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from services.chunks import Chunk
from services.producer.generate import generate_chunk
from services.producer.servers import StoppedError
from services.producer.session import Session, open_session
from services.runs import Run
from services.settings import Settings
from services.threaded_worker import HandedBackError

POLL_SECONDS = 0.5


@dataclass
class OpenSession:
    """A session and the number of chunks that use it; it is closed with the last of them."""

    session: Session
    stack: contextlib.AsyncExitStack
    chunks: int = 0


class GenerateHost:
    """Chunks of the same run share a session, so that one fills the slots that another leaves."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._sessions: dict[str, OpenSession] = {}
        # Chunks whose prompts are queued. Sets, and not numbers, as two threads change them.
        self._begun: set[object] = set()
        self._tasks: set[asyncio.Task[bool]] = set()
        self._ending = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def generate(self, run: Run, chunk: Chunk, settings: Settings, urls: list[str]) -> bool:
        """Publish a chunk's completions; blocks its caller's thread. False: the run is paused.

        Raises:
            HandedBackError: this process ends before the chunk is complete.
        """
        mark = object()
        coroutine = self._generate(run, chunk, settings, urls, mark)
        generating = asyncio.run_coroutine_threadsafe(coroutine, self._running_loop())
        try:
            return self._wait(generating, chunk)
        finally:
            self._begun.discard(mark)

    def has_room(self, running: int) -> bool:
        """Whether slots are free, nothing waits for one, and all the worker's running jobs have begun."""
        if self._ending or len(self._begun) < running:
            return False
        sessions = [opened.session for opened in list(self._sessions.values())]
        return all(session.servers.free > 0 and not session.servers.queued for session in sessions)

    def live(self) -> dict[str, dict[str, Any]]:
        return {name: opened.session.live() for name, opened in list(self._sessions.items())}

    def stop(self, at_once: bool) -> None:
        """Send no further prompt; answers in flight have the grace period, or none."""
        self._ending = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end, 0 if at_once else self._grace)

    def _wait(self, generating: "concurrent.futures.Future[bool]", chunk: Chunk) -> bool:
        try:
            # In short steps: only between them does a job's time-out reach this thread.
            while not generating.done():
                concurrent.futures.wait([generating], POLL_SECONDS)
            return generating.result()
        except concurrent.futures.CancelledError:
            raise _handed_back(chunk) from None
        except BaseException:
            generating.cancel()
            raise

    async def _generate(self, run: Run, chunk: Chunk, settings: Settings, urls: list[str], mark: object) -> bool:
        task: asyncio.Task[bool] | None = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            async with self._session(run, settings, urls) as session:
                await generate_chunk(session, chunk, lambda: self._begun.add(mark))
        except StoppedError:
            if self._ending:
                raise _handed_back(chunk) from None
            return False
        finally:
            self._tasks.discard(task)
        return True

    @contextlib.asynccontextmanager
    async def _session(self, run: Run, settings: Settings, urls: list[str]) -> AsyncIterator[Session]:
        if self._ending:
            raise StoppedError
        opened = self._sessions.get(run.name)
        # One that was paused awaits its last answers; a chunk that comes after the pause needs a new one.
        if opened is None or opened.session.stopped:
            stack = contextlib.AsyncExitStack()
            opened = OpenSession(await stack.enter_async_context(open_session(run, settings, urls)), stack)
            self._sessions[run.name] = opened
        opened.chunks += 1
        try:
            yield opened.session
        finally:
            opened.chunks -= 1
            if not opened.chunks:
                if self._sessions.get(run.name) is opened:
                    del self._sessions[run.name]
                await opened.stack.aclose()

    def _end(self, grace: float) -> None:
        for opened in self._sessions.values():
            opened.session.stop("this worker ends")
        for task in self._tasks:
            asyncio.get_running_loop().call_later(grace, task.cancel)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="generate", daemon=True).start()
        return self._loop


def _handed_back(chunk: Chunk) -> HandedBackError:
    return HandedBackError(f"this worker ends before chunk {chunk.chunk} is complete")
