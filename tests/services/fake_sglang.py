"""An HTTP server that answers as SGLang does: slots, a token rate, long-tailed lengths, and faults when told to.

In a test, `with FakeSglang() as server`; as a process of its own, to be killed:

    python -m tests.services.fake_sglang --port PORT [options]
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from aiohttp import web

Fault = (
    Literal["503", "500", "429", "400", "drop", "slow", "hang", "empty", "abort", "loop", "no end token", "cut"] | None
)
END = 2
SLOW_SECONDS = 5.0
LASTING_FAULT_EVERY = 499
ID_POOL = ",".join(str(10 + (7919 * number) % 80) for number in range(1 << 16))


@dataclass
class Load:
    """Answers as a loaded GPU gives them: `mean_tokens` long-tailed (log-normal), at `tokens_per_second` a slot."""

    slots: int = 72
    tokens_per_second: float = 1000.0
    mean_tokens: float = 170.0
    sigma: float = 0.8
    longest: int = 4096
    seed: int = 0

    def length(self, input_ids: list[int]) -> int:
        """The same for a prompt whenever and wherever it is asked."""
        drawn = random.Random(f"{self.seed} {input_ids}").gauss(0, 1)
        length = self.mean_tokens * math.exp(self.sigma * drawn - self.sigma**2 / 2)
        return max(1, min(self.longest, round(length)))


def no_fault(_first: int, _asked: int) -> Fault:
    return None


class FakeSglang:
    """Serves `model` on a free port while its `with` block lasts.

    `fault` is asked before each answer with the prompt's first id and how often that was asked before, from 0.
    Without a `load`, the answer to a prompt is its ids reversed and the end token, after `seconds`.
    """

    def __init__(
        self,
        model: str = "target",
        fault: Callable[[int, int], Fault] = no_fault,
        context: int = 1024,
        seconds: float = 0.0,
        load: Load | None = None,
        text: str = "",
        reads_as: str | None = "",
        port: int = 0,
        asked_log: Path | None = None,
        poison: int | None = None,
        keep_requests: bool = True,
        gateway: bool = False,
        host: str = "127.0.0.1",
    ) -> None:
        self.model = model
        self.fault = fault
        self.context = context
        self.seconds = seconds
        self.load = load
        self.text = text
        self.reads_as = reads_as
        self.port = port
        self.poison = poison
        self.keep_requests = keep_requests
        self.gateway = gateway
        self.host = host
        self.asked: Counter[int] = Counter()
        self.requests: list[dict[str, Any]] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.hanging = False
        self.working = 0
        self.hung = 0
        self.progress = 0.0
        self.busy_seconds = 0.0
        self.tokens = 0
        self._changed_at = time.monotonic()
        self._asked_log = asked_log and os.open(asked_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        started = threading.Event()
        self._loop = asyncio.new_event_loop()

        async def serve() -> None:
            async with self.serving():
                started.set()
                await self._ended.wait()

        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(serve(),), daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        self._slots = asyncio.Semaphore(self.load.slots if self.load else 1 << 30)
        app = web.Application(client_max_size=1 << 26)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.post("/generate", self._generate),
                web.get("/fake/state", self._state),
                web.post("/fake/hang", self._hang),
            ]
        )
        if not self.gateway:
            app.add_routes(
                [
                    web.get("/server_info", self._server_info),
                    web.get("/metrics", self._metrics),
                    web.post("/detokenize", self._detokenize),
                ]
            )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, self.host, self.port, backlog=2048, reuse_address=True)
        await site.start()
        self.port = self.port or runner.addresses[0][1]
        try:
            yield
        finally:
            await runner.cleanup()

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({})

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.model, "max_model_len": self.context}]})

    async def _server_info(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": "fake"})

    async def _metrics(self, request: web.Request) -> web.Response:
        self._account()
        rate = self.load.tokens_per_second if self.load else 100.0
        lines = [
            f'sglang:realtime_tokens_total{{mode="decode"}} {int(self.progress * rate)}',
            f"sglang:generation_tokens_total {self.tokens}",
            f"sglang:num_running_reqs {self.working}",
            f"sglang:num_queue_reqs {self.in_flight - self.working}",
            f"sglang:token_usage {self.working / (self.load.slots if self.load else 100)}",
            "sglang:weight_memory_usage_gb 0.5",
            "sglang:kv_cache_memory_usage_gb 0.25",
        ]
        text = "\n".join(lines) + "\n"
        if "openmetrics" in request.headers.get("Accept", ""):
            # There the real one's client library knows no colons.
            text = text.replace("sglang:", "sglang_") + "# EOF\n"
            return web.Response(text=text, headers={"Content-Type": "application/openmetrics-text; version=1.0.0"})
        return web.Response(text=text)

    async def _state(self, _request: web.Request) -> web.Response:
        self._account()
        asked = sum(self.asked.values())
        return web.json_response({"busy_seconds": self.busy_seconds, "tokens": self.tokens, "requests": asked})

    async def _hang(self, request: web.Request) -> web.Response:
        hanging = bool((await request.json())["hanging"])
        self._account()
        self.hanging = hanging
        return web.json_response({})

    async def _detokenize(self, _request: web.Request) -> web.Response:
        return web.json_response({"text": self.reads_as}) if self.reads_as is not None else web.Response(status=404)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        first = body["input_ids"][0]
        asked = self.asked[first]
        self.asked[first] += 1
        if self.keep_requests:
            self.requests.append(body)
        if self._asked_log is not None:
            os.write(self._asked_log, f"{time.time()} {first}\n".encode())
        if first == self.poison:
            os.kill(os.getpid(), signal.SIGKILL)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            fault = self.fault(first, asked)
            async with self._slots, self._at_work():
                length = self.load.length(body["input_ids"]) if self.load else 0
                await asyncio.sleep(self._seconds(fault, length))
                async with self._hung():
                    while self.hanging or fault == "hang":
                        await asyncio.sleep(0.05)
        finally:
            self.in_flight -= 1
        return self._answer(request, body["input_ids"], fault, body["sampling_params"]["max_new_tokens"], length)

    def _seconds(self, fault: Fault, length: int) -> float:
        if fault == "slow":
            return SLOW_SECONDS
        return length / self.load.tokens_per_second if self.load else self.seconds

    @contextlib.asynccontextmanager
    async def _at_work(self) -> AsyncIterator[None]:
        self._account()
        self.working += 1
        try:
            yield
        finally:
            self._account()
            self.working -= 1

    @contextlib.asynccontextmanager
    async def _hung(self) -> AsyncIterator[None]:
        self._account()
        self.hung += 1
        try:
            yield
        finally:
            self._account()
            self.hung -= 1

    def _account(self) -> None:
        now = time.monotonic()
        self.busy_seconds += self.working * (now - self._changed_at)
        if not self.hanging:
            self.progress += (self.working - self.hung) * (now - self._changed_at)
        self._changed_at = now

    def _answer(
        self, request: web.Request, input_ids: list[int], fault: Fault, max_new_tokens: int, length: int
    ) -> web.StreamResponse:
        if fault == "drop":
            assert request.transport
            request.transport.abort()
            return web.Response(status=500)
        if fault in {"503", "500", "429", "400"}:
            return web.json_response({"error": {"message": f"the fake says {fault}"}}, status=int(fault))
        answers: dict[str | None, tuple[list[int], dict[str, Any]]] = {
            "empty": ([END], {"type": "stop", "matched": END}),
            "abort": ([], {"type": "abort", "message": "Aborted"}),
            "loop": ([7] * max_new_tokens, {"type": "length", "length": max_new_tokens}),
            "cut": ([5] * (max_new_tokens // 2), {"type": "length", "length": max_new_tokens // 2}),
            "no end token": ([5], {"type": "stop", "matched": "NaN happened"}),
        }
        if fault is None and self.load is not None:
            self.tokens += length
            return self._long_answer(length, max_new_tokens)
        stopped = ([*reversed(input_ids), END], {"type": "stop", "matched": END})
        output_ids, finish_reason = answers.get(fault, stopped)
        return web.json_response(
            {"text": self.text, "output_ids": output_ids, "meta_info": {"finish_reason": finish_reason}}
        )

    def _long_answer(self, length: int, max_new_tokens: int) -> web.Response:
        # Two digits and a comma an id: a slice of the pool is a list of ids.
        begin = 3 * random.randrange(1 << 15)
        if length >= max_new_tokens:
            ids = ID_POOL[begin : begin + 3 * max_new_tokens - 1]
            finish = {"type": "length", "length": max_new_tokens}
        else:
            ids = f"{ID_POOL[begin : begin + 3 * (length - 1)]}{END}"
            finish = {"type": "stop", "matched": END}
        text = f'{{"text":"","output_ids":[{ids}],"meta_info":{{"finish_reason":{json.dumps(finish)}}}}}'
        return web.Response(text=text, content_type="application/json")


def random_faults(rate: float, seed: int) -> Callable[[int, int], Fault]:
    """Passing faults of every kind: of a prompt's first two tries, `rate` fail; and some that last."""
    kinds: list[Fault] = ["drop", "429", "500", "503", "abort", "empty", "cut"]

    def fault(first: int, asked: int) -> Fault:
        if first % LASTING_FAULT_EVERY == 0:
            return "empty" if first % 2 else "400"
        drawn = random.Random(f"{seed} {first} {asked}")
        return drawn.choice(kinds) if asked < 2 and drawn.random() < rate else None

    return fault


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--model", default="target")
    parser.add_argument("--context", type=int, default=1 << 20)
    parser.add_argument("--fault-rate", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--poison", type=int)
    parser.add_argument("--asked-log", type=Path)
    for name, default in vars(Load()).items():
        if name != "seed":
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    options = parser.parse_args()
    load = Load(**{name: getattr(options, name) for name in vars(Load())})
    fake = FakeSglang(
        options.model,
        host=options.host,
        fault=random_faults(options.fault_rate, options.port) if options.fault_rate else no_fault,
        context=options.context,
        load=load,
        reads_as=None,  # it has no tokenizer to read prompts of real text with
        port=options.port,
        asked_log=options.asked_log,
        poison=options.poison,
        keep_requests=False,
    )

    async def serve() -> None:
        async with fake.serving():
            await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
