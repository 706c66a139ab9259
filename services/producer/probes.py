"""What a server is asked beside prompts: its health, what it serves, and whether it gets on."""

import asyncio
import json
import re
import socket
import unicodedata
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from services.errors import UserError
from services.records import Prompt
from services.settings import Settings

DETAIL_LENGTH = 300
# SGLang's own health check takes up to 20 s before it says no.
HEALTH_TIMEOUT = 25.0
# Counters and gauges that move while a server works, unlike sglang:generation_tokens_total, which waits for an end.
PROGRESS = re.compile(
    r"^(sglang:(?:realtime_tokens_total|generation_tokens_total|num_used_tokens|token_usage)(?:\{[^}]*\})? .*)$", re.M
)
UNKNOWN = "unknown"


class UnhealthyError(Exception):
    """The server answered, but not as one that can be asked."""


async def identify(http: aiohttp.ClientSession, url: str, settings: Settings, sample: Prompt | None) -> str | None:
    """Version of a healthy server of the run's target.

    Raises:
        UserError: it serves another model or tokenizer, or too short a context.
        UnhealthyError, aiohttp.ClientError, TimeoutError: it cannot be asked now.
    """
    timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT, sock_connect=settings.generate.connect_timeout)
    async with http.get(f"{url}/health", timeout=timeout) as response:
        if response.status != 200:
            raise UnhealthyError(f"HTTP {response.status} from /health")
    async with http.get(f"{url}/v1/models", timeout=timeout) as response:
        check_model(url, await response.text(), settings)
    if sample is not None:
        body = {"tokens": sample.input_ids, "skip_special_tokens": False}
        async with http.post(f"{url}/detokenize", json=body, timeout=timeout) as response:
            check_tokenizer(url, response.status, await response.text(), sample)
    async with http.get(f"{url}/server_info", timeout=timeout) as response:
        # A gateway has none, or one of its own.
        return read_version(await response.text()) if response.status == 200 else None


def read_version(text: str) -> str | None:
    """The version that /server_info tells, or None: nothing depends on it."""
    try:
        return str(json.loads(text)["version"])
    except (ValueError, KeyError, TypeError):
        return None


def check_model(url: str, text: str, settings: Settings) -> None:
    """Raises UserError unless /v1/models names the target, with a context that holds prompt and answer.

    SGLang answers any model name with 200, so nothing else would tell.
    """
    try:
        models = {model["id"]: model for model in json.loads(text)["data"]}
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


def check_tokenizer(url: str, status: int, text: str, sample: Prompt) -> None:
    """Raises UserError when the server reads a prompt's ids as another text than they were made from.

    Servers without /detokenize are not checked.
    """
    if status == 404:
        return
    asked = [message["content"] for message in json.loads(sample.messages) if message["role"] == "user"]
    words = _words(str(asked[-1])) if asked else set()
    try:
        seen = _words(json.loads(text)["text"]) if status == 200 else set()
    except (ValueError, KeyError, TypeError):
        seen = set()
    if words and len(words & seen) < len(words) / 2:
        raise UserError(
            f"server {url} has another tokenizer than the run: it does not read prompt {sample.prompt_id} "
            "as its text; start it with the model of target.path"
        )


async def answer_one_token(http: aiohttp.ClientSession, url: str) -> None:
    """Raises unless the server generates: one that hung may have a health check that passes."""
    body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT)
    async with http.post(f"{url}/generate", json=body, timeout=timeout) as response:
        if response.status != 200:
            raise UnhealthyError(f"HTTP {response.status} from /generate")


async def progress(http: aiohttp.ClientSession, url: str, timeout: float) -> object:
    """What moves while the server works; `UNKNOWN` where it shows no metrics, None where it does not answer."""
    try:
        async with http.get(f"{url}/metrics", timeout=aiohttp.ClientTimeout(total=timeout)) as response:
            return tuple(PROGRESS.findall(await response.text())) if response.status == 200 else UNKNOWN
    except (aiohttp.ClientError, TimeoutError):
        return None


def is_address(url: str) -> bool:
    """Whether it is http:// or https:// with a host and, if any, a port that can be one."""
    try:
        parts = urlsplit(url)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


async def addresses(url: str) -> list[str]:
    """The URL itself, or one for each address that its name stands for."""
    parts = urlsplit(url)
    # A certificate is for a name.
    if parts.scheme != "http" or parts.hostname is None:
        return [url]
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
    # A name with an empty or too long part is not even looked up.
    except (OSError, UnicodeError):
        return [url]
    hosts = sorted({address[0] for _, _, _, _, address in found})
    if len(hosts) < 2:
        return [url]
    return [f"http://{f'[{host}]' if ':' in str(host) else host}:{parts.port or 80}{parts.path}" for host in hosts]


def describe(error: Exception) -> str:
    """An error in one line."""
    return shorten(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def shorten(text: str) -> str:
    """One line of at most a few hundred characters."""
    return " ".join(text.split())[:DETAIL_LENGTH]


def _words(text: Any) -> set[str]:
    return set(unicodedata.normalize("NFC", str(text)).split())
