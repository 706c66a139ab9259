"""SGLang servers of one model, and how a prompt is asked for until it has an answer or a final failure.

The server with the fewest requests in flight gets the next one. A server that cannot be reached, loses a
connection or says that it is unavailable is left out until its health check passes again, so that a broken
one does not draw all prompts because it is the quickest to fail.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx
import structlog
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    retry_if_result,
    stop_after_attempt,
    wait_random_exponential,
)

from services.errors import UserError
from services.producer.outcome import Answer, is_aborted
from services.settings import Settings

RETRIED_STATUS = {408, 409, 425, 429}
UNAVAILABLE_STATUS = {502, 503, 504}
DETAIL_LENGTH = 300


class ServersUnavailableError(Exception):
    """No server was healthy for as long as a job waits; the job is retried later."""


class AskError(Exception):
    """One try of a prompt that brought no answer: a short reason, and what the server said."""

    def __init__(self, reason: str, detail: str | None, server: str, retried: bool) -> None:
        super().__init__(f"{reason} at {server}")
        self.reason = reason
        self.detail = detail
        self.server = server
        self.retried = retried


@dataclass(frozen=True)
class Pace:
    """Seconds: how long to wait for a healthy server, between health checks, and before asking again."""

    patience: float = 300
    probe_interval: float = 2
    first_backoff: float = 0.5
    longest_backoff: float = 30


@dataclass(frozen=True)
class Reply:
    """How asking ended; `answer` or the last try's error, after `attempts` tries."""

    answer: Answer | AskError
    attempts: int
    seconds: float


@dataclass
class Server:
    url: str
    healthy: bool = False
    in_flight: int = 0
    trouble: str = "not asked yet"


class Servers:
    """The servers while a chunk is generated: `async with Servers(urls, settings) as servers`.

    Entering waits for the first healthy one.

    Raises:
        UserError: an address is no URL, or a server serves another model than the target or a shorter context.
        ServersUnavailableError: none became healthy in time (also raised by `ask`).
    """

    def __init__(self, urls: Sequence[str], settings: Settings, pace: Pace | None = None) -> None:
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise UserError(f"server {url!r} in DFLASH_SERVERS: write it as http://HOST:PORT")
        if not urls:
            raise UserError("DFLASH_SERVERS names no server; set it to http://HOST:PORT, separated by commas")
        self._servers = [Server(url) for url in urls]
        self._settings = settings
        self._pace = pace or Pace()
        self._some_healthy = asyncio.Event()
        self._log = structlog.get_logger()
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=settings.generate.connect_timeout),
            # SGLang closes an idle connection after 5 s; one that is reused just then looks like a lost one.
            limits=httpx.Limits(max_connections=None, keepalive_expiry=2),
            # Proxy variables are meant for the internet, not for the servers beside us.
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        try:
            await self._probe_all()
            self._watch = asyncio.create_task(self._keep_probing())
            await self._wait_for_one()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self._close()

    async def ask(self, input_ids: list[int]) -> Reply:
        """One prompt's answer, or the error of its last try; never more than `generate.attempts` tries."""
        generate = self._settings.generate
        attempts = 0
        started = time.monotonic()

        async def attempt() -> Answer:
            nonlocal attempts
            attempts += 1
            return await self._ask_once(input_ids)

        retrying = AsyncRetrying(
            stop=stop_after_attempt(generate.attempts),
            wait=wait_random_exponential(multiplier=self._pace.first_backoff, max=self._pace.longest_backoff),
            retry=retry_if_exception(_is_retried) | retry_if_result(is_aborted),
            before_sleep=self._log_retry,
            retry_error_callback=_last_outcome,
        )
        try:
            answer: Answer | AskError = await retrying(attempt)
        except AskError as error:
            answer = error
        return Reply(answer, attempts, time.monotonic() - started)

    async def _ask_once(self, input_ids: list[int]) -> Answer:
        generate = self._settings.generate
        body = {
            "input_ids": input_ids,
            "sampling_params": generate.model_dump(
                include={"max_new_tokens", "temperature", "top_p", "top_k", "repetition_penalty"}
            ),
        }
        while True:
            server = await self._least_busy()
            server.in_flight += 1
            try:
                async with asyncio.timeout(generate.request_timeout):
                    response = await self._http.post(f"{server.url}/generate", json=body)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                # The prompt was never sent, so this try does not count against it.
                self._leave_out(server, _describe(error))
            except TimeoutError:
                detail = f"no answer in {generate.request_timeout:g} s"
                raise AskError("timed out", detail, server.url, True) from None
            except httpx.TransportError as error:
                self._leave_out(server, _describe(error))
                raise AskError("connection lost", _describe(error), server.url, True) from error
            else:
                if response.status_code in UNAVAILABLE_STATUS:
                    self._leave_out(server, f"HTTP {response.status_code}")
                return _read_answer(response, server.url)
            finally:
                server.in_flight -= 1

    async def _least_busy(self) -> Server:
        await self._wait_for_one()
        return min((server for server in self._servers if server.healthy), key=lambda server: server.in_flight)

    async def _wait_for_one(self) -> None:
        try:
            async with asyncio.timeout(self._pace.patience):
                while not any(server.healthy for server in self._servers):
                    self._some_healthy.clear()
                    await self._some_healthy.wait()
        except TimeoutError:
            troubles = "; ".join(f"{server.url}: {server.trouble}" for server in self._servers)
            raise ServersUnavailableError(
                f"no SGLang server was healthy for {self._pace.patience:g} s ({troubles})"
            ) from None

    def _leave_out(self, server: Server, trouble: str) -> None:
        if server.healthy:
            self._log.warning("server_left_out", server=server.url, trouble=trouble)
        server.healthy = False
        server.trouble = trouble

    async def _keep_probing(self) -> None:
        while True:
            await asyncio.sleep(self._pace.probe_interval)
            try:
                await self._probe_all()
            except UserError as error:
                # The run goes on with the others; when none is left, the next try of the job says it.
                self._log.error("server_refused", error=str(error))

    async def _probe_all(self) -> None:
        await asyncio.gather(*(self._probe(server) for server in self._servers if not server.healthy))

    async def _probe(self, server: Server) -> None:
        timeout = self._settings.generate.connect_timeout
        try:
            health = await self._http.get(f"{server.url}/health", timeout=timeout)
            if health.status_code != httpx.codes.OK:
                server.trouble = f"HTTP {health.status_code} from /health"
                return
            models = await self._http.get(f"{server.url}/v1/models", timeout=timeout)
        except httpx.TransportError as error:
            server.trouble = _describe(error)
            return
        check_identity(server.url, models, self._settings)
        server.healthy = True
        self._some_healthy.set()
        self._log.info("server_ready", server=server.url)

    def _log_retry(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        self._log.warning("request_retried", attempt=state.attempt_number, error=str(error or "aborted"))

    async def _close(self) -> None:
        if watch := getattr(self, "_watch", None):
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
        await self._http.aclose()


def check_identity(url: str, response: httpx.Response, settings: Settings) -> None:
    """Raises UserError unless /v1/models names the target, with a context that holds prompt and answer.

    SGLang answers any model name with 200, so nothing else would tell.
    """
    try:
        models = {model["id"]: model for model in response.json()["data"]}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"server {url}: /v1/models is not what SGLang answers; correct DFLASH_SERVERS") from None
    wanted = settings.target.served_name
    if wanted not in models:
        raise UserError(
            f"server {url} serves {', '.join(models) or 'nothing'}, not {wanted}; "
            "correct target.served_name, or start the server with that --served-model-name"
        )
    longest = settings.render.max_prompt_tokens + settings.generate.max_new_tokens
    context = models[wanted].get("max_model_len")
    if context is not None and context < longest:
        raise UserError(
            f"server {url} has a context of {context} tokens, but render.max_prompt_tokens + "
            f"generate.max_new_tokens = {longest}; lower them, or start it with a larger --context-length"
        )


def _read_answer(response: httpx.Response, server: str) -> Answer:
    status = response.status_code
    if status != httpx.codes.OK:
        retried = status in RETRIED_STATUS or status >= httpx.codes.INTERNAL_SERVER_ERROR
        raise AskError(f"http {status}", _shorten(response.text), server, retried)
    try:
        content: dict[str, Any] = response.json()
        return Answer(list(content["output_ids"]), dict(content["meta_info"]["finish_reason"]), server)
    except (ValueError, KeyError, TypeError):
        raise AskError("unreadable answer", _shorten(response.text), server, False) from None


def _is_retried(error: BaseException) -> bool:
    return isinstance(error, AskError) and error.retried


def _last_outcome(state: RetryCallState) -> Any:
    return state.outcome.result() if state.outcome else None


def _describe(error: httpx.TransportError) -> str:
    return _shorten(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def _shorten(text: str) -> str:
    return " ".join(text.split())[:DETAIL_LENGTH]
