"""Servers that hang, die, come, go, or are killed by what they are asked."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from aiohttp import web

from services.chunks import Chunk
from services.errors import UserError
from services.producer import probes
from services.producer.generate import generate_chunk
from services.producer.session import open_session
from services.records import read_completions
from services.runs import Run
from services.settings import Settings
from tests.services.fake_sglang import FakeSglang, Fault, Load
from tests.services.generating import QUICK, generate_once

MakeRun = Callable[..., tuple[Run, Chunk, Settings]]
PROMPTS = [[first, first + 1, 10] for first in range(20, 44)]


async def generate_while(
    change: Callable[[], Coroutine[Any, Any, None]], run: Run, chunk: Chunk, settings: Settings, urls: list[str]
) -> None:
    """Generate a chunk while `change` runs beside it."""
    await asyncio.gather(generate_once(run, chunk, settings, urls, QUICK), change())


def test_a_server_that_hangs_with_good_health_is_left_out_and_its_prompts_asked_elsewhere(make_run: MakeRun) -> None:
    run, chunk, settings = make_run(PROMPTS, stall_timeout=0.4)
    with FakeSglang(fault=lambda _first, _asked: "hang") as hung, FakeSglang(seconds=0.05) as good:
        asyncio.run(generate_once(run, chunk, settings, [hung.url, good.url], QUICK))
    completions = read_completions(run.completions("s-0"))
    assert {completion.status for completion in completions} == {"completed"}
    assert {completion.server for completion in completions} == {good.url}
    # Its health check passes, but it is not asked again: one token would be an answer, and there is none.
    assert len(hung.requests) <= settings.generate.concurrency + 3


def test_a_server_that_is_slow_but_moves_is_kept(make_run: MakeRun) -> None:
    run, chunk, settings = make_run(PROMPTS[:4], stall_timeout=0.3)
    with FakeSglang(load=Load(tokens_per_second=20, mean_tokens=20, sigma=0)) as slow:
        asyncio.run(generate_once(run, chunk, settings, [slow.url], QUICK))
    assert [completion.attempts for completion in read_completions(run.completions("s-0"))] == [1] * 4


def test_a_hung_server_that_generates_again_is_taken_up(make_run: MakeRun) -> None:
    run, chunk, settings = make_run(PROMPTS, stall_timeout=0.3, attempts=3)
    with FakeSglang(seconds=0.01) as server:
        server.hanging = True

        async def unhang() -> None:
            await asyncio.sleep(1.5)
            server.hanging = False

        asyncio.run(generate_while(unhang, run, chunk, settings, [server.url]))
    assert {completion.status for completion in read_completions(run.completions("s-0"))} == {"completed"}


def test_a_prompt_that_kills_servers_kills_no_more_than_two(make_run: MakeRun) -> None:
    """Each server here dies of the prompt and comes back; the other prompts are answered all the same."""

    def poison(first: int, _asked: int) -> Fault:
        return "drop" if first == 20 else None

    run, chunk, settings = make_run(PROMPTS, concurrency=24)
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(FakeSglang(fault=poison, seconds=0.05)) for _ in range(4)]
        asyncio.run(generate_once(run, chunk, settings, [server.url for server in servers], QUICK))
    completions = read_completions(run.completions("s-0"))
    assert [completion.reason for completion in completions if completion.status != "completed"] == ["quarantined"]
    assert "2 servers lost the connection" in str(completions[0].detail)
    assert sum(server.asked[20] for server in servers) == 2


def test_the_next_worker_knows_what_a_prompt_did_to_the_last_one(make_run: MakeRun) -> None:
    run, chunk, settings = make_run(PROMPTS[:1])
    journal = run.journal("s-0")
    journal.parent.mkdir()
    journal.write_text('{"prompt_id":"p0","lost":"http://before"}\n')
    with FakeSglang(fault=lambda _first, _asked: "drop") as server:
        asyncio.run(generate_once(run, chunk, settings, [server.url], QUICK))
    assert read_completions(run.completions("s-0"))[0].reason == "quarantined"
    assert server.asked[20] == 1


def test_of_suspects_each_server_has_one_at_a_time(make_run: MakeRun) -> None:
    run, chunk, settings = make_run(PROMPTS, concurrency=24)
    journal = run.journal("s-0")
    journal.parent.mkdir()
    journal.write_text("".join(f'{{"prompt_id":"p{n}","lost":"http://before"}}\n' for n in range(len(PROMPTS))))
    with FakeSglang(seconds=0.02) as one, FakeSglang(seconds=0.02) as other:
        asyncio.run(generate_once(run, chunk, settings, [one.url, other.url], QUICK))
    assert (one.most_in_flight, other.most_in_flight) == (1, 1)
    assert {completion.status for completion in read_completions(run.completions("s-0"))} == {"completed"}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Names that the resolver knows, to be changed while a run goes on."""
    known: dict[str, list[str]] = {}

    async def addresses(url: str) -> list[str]:
        return known.get(url, [url])

    monkeypatch.setattr(probes, "addresses", addresses)
    return known


def test_a_server_that_comes_is_taken_up_and_one_that_goes_is_left(
    make_run: MakeRun, names: dict[str, list[str]]
) -> None:
    run, chunk, settings = make_run(PROMPTS, concurrency=2)
    with FakeSglang(seconds=0.1) as first, FakeSglang(seconds=0.1) as second:
        names["http://servers:30000"] = [first.url]

        asked_before = 0

        async def move() -> None:
            nonlocal asked_before
            while len(first.requests) < 4:
                await asyncio.sleep(0.01)
            names["http://servers:30000"] = [second.url]
            while not second.requests:
                await asyncio.sleep(0.01)
            asked_before = len(first.requests)

        asyncio.run(generate_while(move, run, chunk, settings, ["http://servers:30000"]))
    assert len(first.requests) == asked_before, "a server that is gone was asked again while its last answer came"
    assert len(first.requests) + len(second.requests) == len(PROMPTS)
    # What was in flight when it went was awaited.
    assert {completion.attempts for completion in read_completions(run.completions("s-0"))} == {1}


def test_a_server_that_hangs_and_goes_gives_its_prompts_back(make_run: MakeRun, names: dict[str, list[str]]) -> None:
    run, chunk, settings = make_run(PROMPTS, concurrency=2, stall_timeout=0.4)
    with FakeSglang(fault=lambda _first, _asked: "hang") as first, FakeSglang(seconds=0.01) as second:
        names["http://servers:30000"] = [first.url]

        async def move() -> None:
            while not first.requests:
                await asyncio.sleep(0.01)
            names["http://servers:30000"] = [second.url]

        asyncio.run(generate_while(move, run, chunk, settings, ["http://servers:30000"]))
    assert {completion.server for completion in read_completions(run.completions("s-0"))} == {second.url}


def test_a_name_stands_for_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*hosts: str) -> Callable[..., Any]:
        async def getaddrinfo(*_: Any, **__: Any) -> list[Any]:
            return [(socket.AF_INET, 0, 0, "", (host, 30000)) for host in hosts]

        return getaddrinfo

    async def resolve(url: str, *hosts: str) -> list[str]:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", answer(*hosts))
        return await probes.addresses(url)

    one = asyncio.run(resolve("http://sglang:30000", "10.0.0.1"))
    assert one == ["http://sglang:30000"]
    several = asyncio.run(resolve("http://sglang:30000", "10.0.0.2", "10.0.0.1", "10.0.0.2"))
    assert several == ["http://10.0.0.1:30000", "http://10.0.0.2:30000"]
    assert asyncio.run(resolve("https://sglang:30000", "10.0.0.2", "10.0.0.1")) == ["https://sglang:30000"]


def test_chunks_overlap_so_that_a_long_answer_leaves_no_slot_empty(make_run: MakeRun) -> None:
    run, _, settings = make_run(PROMPTS, concurrency=4)
    halves = [Chunk("s-1", "s", 0, 12), Chunk("s-2", "s", 12, 12)]

    def slow(first: int, _asked: int) -> Fault:
        return "slow" if first == 20 else None

    async def go(url: str) -> None:
        async with open_session(run, settings, [url], QUICK) as session:
            begun = asyncio.Event()
            first = asyncio.create_task(generate_chunk(session, halves[0], begun.set))
            await begun.wait()
            await generate_chunk(session, halves[1])
            assert not first.done()
            await first

    with FakeSglang(fault=slow, seconds=0.02) as server:
        asyncio.run(go(server.url))
    # The first chunk was asked for first, and the second in the slots that it left.
    order = [request["input_ids"][0] for request in server.requests]
    assert sorted(order[:12]) == [20 + number for number in range(12)]
    assert server.most_in_flight == 4


def test_a_gateway_without_sglangs_own_pages_can_be_asked(make_run: MakeRun) -> None:
    run, chunk, settings = make_run(PROMPTS)
    with FakeSglang(gateway=True) as gateway:
        asyncio.run(generate_once(run, chunk, settings, [gateway.url], QUICK))
    assert {completion.server for completion in read_completions(run.completions("s-0"))} == {gateway.url}


@pytest.mark.parametrize("url", ["http://sglang:port", "http://sglang:99999", "http://"])
def test_an_address_that_cannot_be_one_is_named(make_run: MakeRun, url: str) -> None:
    run, chunk, settings = make_run(PROMPTS)
    with pytest.raises(UserError, match="DFLASH_SERVERS: write it as http://HOST:PORT"):
        asyncio.run(asyncio.wait_for(generate_once(run, chunk, settings, [url], QUICK), 5))


@pytest.mark.parametrize("page", ["{}", "[]", "no JSON"])
def test_a_server_whose_page_cannot_be_read_does_not_keep_the_others_from_work(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    async def server_info(_server: FakeSglang, _request: web.Request) -> web.Response:
        return web.Response(text=page, content_type="application/json")

    run, chunk, settings = make_run(PROMPTS)
    with FakeSglang() as good:
        monkeypatch.setattr(FakeSglang, "_server_info", server_info)
        with FakeSglang() as odd:
            monkeypatch.undo()
            asyncio.run(asyncio.wait_for(generate_once(run, chunk, settings, [odd.url, good.url], QUICK), 10))
    assert {completion.status for completion in read_completions(run.completions("s-0"))} == {"completed"}


def test_a_fault_in_watching_the_servers_ends_the_chunk_instead_of_hanging_it(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_url: str) -> list[str]:
        raise LookupError("resolver")

    run, chunk, settings = make_run(PROMPTS)
    monkeypatch.setattr(probes, "addresses", broken)

    failures: list[BaseException | None] = []

    async def go() -> None:
        async with open_session(run, settings, ["http://127.0.0.1:1"], QUICK) as session:
            generating = asyncio.create_task(generate_chunk(session, chunk))
            done, _ = await asyncio.wait([generating], timeout=5)
            failures.extend(task.exception() for task in done)
            generating.cancel()

    asyncio.run(go())
    assert [str(failure) for failure in failures] == ["resolver"]
