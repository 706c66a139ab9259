"""How one prompt is asked for until it has an answer or a final failure."""

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import structlog

from services.producer import metrics
from services.producer.outcome import Answer, is_aborted
from services.producer.probes import describe, shorten
from services.producer.servers import Server, Servers
from services.settings import GenerateSettings

RETRIED_STATUS = {408, 409, 425, 429}
UNAVAILABLE_STATUS = {502, 503, 504}
SAMPLING = {"max_new_tokens", "temperature", "top_p", "top_k", "repetition_penalty"}


class AskError(Exception):
    """One try of a prompt that brought no answer: a short reason, and what the server said."""

    def __init__(self, reason: str, detail: str | None, server: str, retried: bool, lost: bool = False) -> None:
        super().__init__(f"{reason} at {server}")
        self.reason = reason
        self.detail = detail
        self.server = server
        self.retried = retried
        self.lost = lost


@dataclass(frozen=True)
class Reply:
    """How asking ended; `answer` or the last try's error, after `attempts` tries."""

    answer: Answer | AskError
    attempts: int
    seconds: float


def sampling(settings: GenerateSettings) -> dict[str, Any]:
    """The run's sampling parameters as SGLang names them."""
    return settings.model_dump(include=SAMPLING)


async def ask(
    servers: Servers,
    input_ids: list[int],
    settings: GenerateSettings,
    priority: int = 0,
    lost: int = 0,
    note_lost: Callable[[str], None] = lambda _server: None,
) -> Reply:
    """One prompt's answer, or the error of its last try; never more than `generate.attempts` tries.

    Args:
        lost: connections that this prompt has lost already. At `generate.lost_connections` it is quarantined: it
            may be what kills the servers.
        note_lost: called with the server's address when one more is lost, before the prompt is asked again.

    Raises:
        StoppedError, ServersUnavailableError, UserError: see `Servers`.
    """
    body = json.dumps({"input_ids": input_ids, "sampling_params": sampling(settings)}).encode()
    began = time.monotonic()
    attempts = 0
    while True:
        attempts += 1
        outcome = await _try_once(servers, body, settings, priority, suspect=lost > 0)
        _count(outcome, len(input_ids))
        if isinstance(outcome, AskError) and outcome.lost:
            lost += 1
            note_lost(outcome.server)
            if lost >= settings.lost_connections:
                detail = f"{lost} servers lost the connection while they had it; last: {outcome.detail}"
                outcome = AskError("quarantined", detail, outcome.server, False)
        retried = outcome.retried if isinstance(outcome, AskError) else is_aborted(outcome)
        if not retried or attempts >= settings.attempts:
            return Reply(outcome, attempts, time.monotonic() - began)
        error = str(outcome) if isinstance(outcome, AskError) else f"aborted at {outcome.server}"
        structlog.get_logger().warning("request_retried", attempt=attempts, error=error)
        longest = min(servers.pace.longest_backoff, servers.pace.first_backoff * 2**attempts)
        await asyncio.sleep(random.uniform(0, longest))


async def _try_once(
    servers: Servers, body: bytes, settings: GenerateSettings, priority: int, suspect: bool
) -> Answer | AskError:
    while True:
        async with servers.reserve(priority, suspect) as server:
            request = asyncio.ensure_future(_post(servers.http, server.url, body, settings.request_timeout))
            server.requests.add(request)
            try:
                with metrics.REQUEST_SECONDS.time():
                    status, text = await request
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                # The prompt was never sent, so this try does not count against it.
                servers.leave_out(server, describe(error))
                continue
            except TimeoutError:
                detail = f"no answer in {settings.request_timeout:g} s"
                return AskError("timed out", detail, server.url, retried=True)
            except aiohttp.ClientError as error:
                servers.leave_out(server, describe(error))
                return AskError("connection lost", describe(error), server.url, retried=True, lost=True)
            except asyncio.CancelledError:
                if not _is_stalled(server):
                    raise
                return AskError("server stalled", server.trouble, server.url, retried=True)
            finally:
                request.cancel()
                server.requests.discard(request)
            if status in UNAVAILABLE_STATUS:
                servers.leave_out(server, f"HTTP {status}")
            return _read_answer(status, text, server)


def _count(outcome: Answer | AskError, prompt_tokens: int) -> None:
    if isinstance(outcome, AskError):
        metrics.REQUESTS.labels(outcome.reason).inc()
        return
    metrics.REQUESTS.labels("aborted" if is_aborted(outcome) else "answered").inc()
    metrics.PROMPT_TOKENS.inc(prompt_tokens)
    metrics.OUTPUT_TOKENS.inc(len(outcome.output_ids))


async def _post(http: aiohttp.ClientSession, url: str, body: bytes, timeout: float) -> tuple[int, bytes]:
    headers = {"Content-Type": "application/json"}
    async with (
        asyncio.timeout(timeout),
        http.post(f"{url}/generate", data=body, headers=headers) as response,
    ):
        return response.status, await response.read()


def _is_stalled(server: Server) -> bool:
    """Whether the request was given up with its server, and not the one who awaits it with the process."""
    task = asyncio.current_task()
    return server.stalled and task is not None and not task.cancelling()


def _read_answer(status: int, text: bytes, server: Server) -> Answer | AskError:
    if status != 200:
        retried = status in RETRIED_STATUS or status >= 500
        return AskError(f"http {status}", shorten(text.decode(errors="replace")), server.url, retried)
    try:
        content: dict[str, Any] = json.loads(text)
        answer = Answer(
            list(content["output_ids"]),
            dict(content["meta_info"]["finish_reason"]),
            server.url,
            str(content.get("text", "")),
        )
    except (ValueError, KeyError, TypeError):
        return AskError("unreadable answer", shorten(text.decode(errors="replace")), server.url, False)
    server.note_answer(len(answer.output_ids))
    return answer
