"""The SGLang servers of one model: which there are, which can be asked now, and which is asked next.

The server with the fewest requests in flight gets the next one. A server that cannot be reached, loses a
connection, says that it is unavailable or makes no progress is left out until its health check passes again, so
that a broken one does not draw all prompts because it is the quickest to fail.
"""

import asyncio
import contextlib
import heapq
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp
import structlog

from services.errors import UserError
from services.producer import probes
from services.records import Prompt
from services.settings import Settings

RATE_WINDOW_SECONDS = 120.0
LONGEST_PROGRESS_INTERVAL = 10.0
FIRST_LOOK_SECONDS = 3.0


class ServersUnavailableError(Exception):
    """No server was healthy for as long as a job waits; the job is retried later."""


class StoppedError(Exception):
    """No further request is sent: the run is paused, or this process ends."""


@dataclass(frozen=True)
class Pace:
    """Seconds: how long to wait for a healthy server, between checks of the servers, and before asking again."""

    patience: float = 300
    probe_interval: float = 2
    first_backoff: float = 0.5
    longest_backoff: float = 30


@dataclass(eq=False)
class Server:
    """One address.

    `gone`: its name no longer has it, and it is kept for what is in flight there.
    `trying_suspect`: a prompt that lost a connection before is in flight, and it may be why.
    """

    url: str
    healthy: bool = False
    gone: bool = False
    refused: bool = False
    stalled: bool = False
    trouble: str = "not asked yet"
    version: str | None = None
    in_flight: int = 0
    trying_suspect: bool = False
    requests: set[asyncio.Task[Any]] = field(default_factory=set)
    progress: object = None
    progressed_at: float = 0.0
    answered: deque[tuple[float, int]] = field(default_factory=deque)

    def note_answer(self, tokens: int) -> None:
        now = time.monotonic()
        self.progressed_at = now
        self.answered.append((now, tokens))
        while now - self.answered[0][0] > RATE_WINDOW_SECONDS:
            self.answered.popleft()


class Servers:
    """`async with Servers(urls, settings) as servers`; `reserve` waits for one of them.

    Raises:
        UserError: an address is no URL; from `reserve`: every server was refused for what it serves.
        ServersUnavailableError: from `reserve`: none was healthy for too long.
    """

    def __init__(
        self, urls: Sequence[str], settings: Settings, pace: Pace | None = None, sample: Prompt | None = None
    ) -> None:
        for url in urls:
            if not probes.is_address(url):
                raise UserError(f"server {url!r} in DFLASH_SERVERS: write it as http://HOST:PORT")
        if not urls:
            raise UserError("DFLASH_SERVERS names no server; set it to http://HOST:PORT, separated by commas")
        self.pace = pace or Pace()
        self._urls = urls
        self._servers: dict[str, Server] = {}
        self._settings = settings
        self._sample = sample
        self._stopped = False
        self._broken: BaseException | None = None
        self._opened = False
        self._order = itertools.count()
        self._in_flight = 0
        self._healthy_at = self._begun = time.monotonic()
        # Prompts that lost a connection before, and all others: (priority, order, who waits).
        self._suspects: list[tuple[int, int, asyncio.Future[Server]]] = []
        self._waiting: list[tuple[int, int, asyncio.Future[Server]]] = []
        self._log = structlog.get_logger()

    async def __aenter__(self) -> Self:
        self.http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._settings.generate.connect_timeout),
            # SGLang closes an idle connection after 5 s; one that is reused just then looks like a lost one.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2),
        )
        self._watching = asyncio.create_task(self._watch())
        self._watching.add_done_callback(self._tell_its_end)
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._watching.cancel()
        await asyncio.wait([self._watching])
        await self.http.close()

    @property
    def all(self) -> list[Server]:
        return list(self._servers.values())

    @property
    def free(self) -> int:
        """How many more requests could be in flight."""
        return self._settings.generate.concurrency - self._in_flight

    @property
    def queued(self) -> bool:
        """Whether a request waits for its place."""
        return bool(self._waiting or self._suspects)

    def rate(self, server: Server) -> float:
        """Answer tokens a second over the last two minutes."""
        now = time.monotonic()
        # The worker's thread asks: a copy, as answers come in meanwhile.
        tokens = sum(tokens for at, tokens in list(server.answered) if now - at <= RATE_WINDOW_SECONDS)
        return tokens / max(1.0, min(RATE_WINDOW_SECONDS, now - self._begun))

    def stop(self) -> None:
        """Send nothing any more; what is in flight is not touched."""
        self._stopped = True
        self._fail_waiting(StoppedError())

    @contextlib.asynccontextmanager
    async def reserve(self, priority: int, suspect: bool) -> AsyncIterator[Server]:
        """A place on the server with the fewest requests; the least `priority` is served first.

        Of suspects, each server gets one at a time: when it dies, it is known why.
        """
        if self._stopped:
            raise StoppedError
        if self._broken:
            raise self._broken
        future: asyncio.Future[Server] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._suspects if suspect else self._waiting, (priority, next(self._order), future))
        self._hand_out()
        try:
            server = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._give_back(future.result(), suspect)
            raise
        try:
            yield server
        finally:
            self._give_back(server, suspect)

    def leave_out(self, server: Server, trouble: str) -> None:
        """Send it nothing until its health check passes again."""
        if server.healthy:
            self._log.warning("server_left_out", server=server.url, trouble=trouble)
        server.healthy = False
        server.trouble = trouble

    def _give_back(self, server: Server, suspect: bool) -> None:
        server.in_flight -= 1
        self._in_flight -= 1
        if suspect:
            server.trying_suspect = False
        self._hand_out()

    def _hand_out(self) -> None:
        if not self._opened:
            return
        ready = [server for server in self._servers.values() if server.healthy]
        for suspect, heap in ((True, self._suspects), (False, self._waiting)):
            while heap and self.free > 0:
                if heap[0][2].done():
                    heapq.heappop(heap)
                    continue
                open_to = [server for server in ready if not (suspect and server.trying_suspect)]
                if not open_to:
                    break
                server = min(open_to, key=lambda server: server.in_flight)
                if not server.in_flight:
                    server.progressed_at = time.monotonic()
                server.in_flight += 1
                server.trying_suspect |= suspect
                self._in_flight += 1
                heapq.heappop(heap)[2].set_result(server)

    def _fail_waiting(self, error: BaseException) -> None:
        for heap in (self._suspects, self._waiting):
            while heap:
                future = heapq.heappop(heap)[2]
                if not future.done():
                    future.set_exception(error)

    def _tell_its_end(self, watching: asyncio.Task[None]) -> None:
        """Nobody awaits the watch while requests wait for it: what ends it has to end them."""
        if not watching.cancelled() and (error := watching.exception()):
            self._broken = error
            self._fail_waiting(error)

    async def _watch(self) -> None:
        checked = 0.0
        stall_timeout = self._settings.generate.stall_timeout
        while True:
            await self._resolve()
            absent = [server for server in self.all if not (server.healthy or server.gone)]
            probing = [asyncio.create_task(self._probe(server)) for server in absent]
            if probing and not self._opened:
                # The first that is ready must not get what is meant for all.
                await asyncio.wait(probing, timeout=FIRST_LOOK_SECONDS)
            self._opened = True
            self._hand_out()
            await asyncio.gather(*probing)
            if time.monotonic() - checked > min(LONGEST_PROGRESS_INTERVAL, stall_timeout / 4):
                checked = time.monotonic()
                # One left out or gone may hang as well, with what it was sent before.
                busy = [server for server in self.all if server.healthy or server.in_flight]
                await asyncio.gather(*(self._check_progress(server) for server in busy))
            self._hand_out()
            self._give_up_when_none_is_left()
            await asyncio.sleep(self.pace.probe_interval)

    async def _resolve(self) -> None:
        """Take up addresses that a name has got, and leave those that it has lost."""
        urls = set()
        for found in await asyncio.gather(*(probes.addresses(url) for url in self._urls)):
            urls.update(found)
        for url in urls:
            self._servers.setdefault(url, Server(url)).gone = False
        for url in self._servers.keys() - urls:
            self.leave_out(self._servers[url], "its address is gone")
            self._servers[url].gone = True
            if not self._servers[url].in_flight:
                del self._servers[url]

    async def _probe(self, server: Server) -> None:
        before = server.trouble
        try:
            if server.stalled:
                await probes.answer_one_token(self.http, server.url)
            server.version = await probes.identify(self.http, server.url, self._settings, self._sample)
        except UserError as error:
            server.refused, server.trouble = True, str(error)
        except (aiohttp.ClientError, TimeoutError, probes.UnhealthyError) as error:
            server.trouble = probes.describe(error)
        else:
            server.healthy, server.refused, server.stalled, server.trouble = True, False, False, ""
            server.progressed_at = time.monotonic()
            self._log.info("server_ready", server=server.url, version=server.version)
            self._hand_out()
        if server.refused and server.trouble != before:
            self._log.error("server_refused", error=server.trouble)

    async def _check_progress(self, server: Server) -> None:
        """Leave out a server that holds requests and gets nowhere, whatever its health check says."""
        progress = await probes.progress(self.http, server.url, self._settings.generate.connect_timeout)
        now = time.monotonic()
        if not server.in_flight or progress != server.progress:
            server.progressed_at, server.progress = now, progress
        elif progress != probes.UNKNOWN and now - server.progressed_at > self._settings.generate.stall_timeout:
            server.stalled = True
            self.leave_out(
                server, f"no progress for {now - server.progressed_at:.0f} s with {server.in_flight} requests"
            )
            for request in list(server.requests):
                request.cancel()

    def _give_up_when_none_is_left(self) -> None:
        now = time.monotonic()
        if any(server.healthy for server in self.all):
            self._healthy_at = now
        elif self.all and all(server.refused for server in self.all):
            self._fail_waiting(UserError(self.all[0].trouble))
        elif now - self._healthy_at > self.pace.patience and (self._waiting or self._suspects):
            troubles = "; ".join(f"{server.url}: {server.trouble}" for server in self.all)
            self._fail_waiting(
                ServersUnavailableError(f"no SGLang server was healthy for {self.pace.patience:g} s ({troubles})")
            )
