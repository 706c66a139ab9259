"""A chunk against servers that fail: nothing lost, nothing doubled, totals that add up."""

import asyncio
import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable

import pytest

from services.chunks import Chunk
from services.errors import UserError
from services.files import read_json
from services.ledger import count_generated
from services.producer.generate import NoSpaceError
from services.producer.journal import journaled
from services.producer.servers import Pace, ServersUnavailableError
from services.records import Completion, read_completions
from services.runs import Run
from services.settings import Settings
from tests.services.fake_sglang import END, FakeSglang, Fault
from tests.services.generating import QUICK, append_to_journal, generate_once

MakeRun = Callable[..., tuple[Run, Chunk, Settings]]
PROMPTS = [[first, first + 1, 10] for first in range(20, 44)]


def _generate(made: tuple[Run, Chunk, Settings], *servers: FakeSglang, pace: Pace = QUICK) -> list[Completion]:
    run, chunk, settings = made
    asyncio.run(generate_once(run, chunk, settings, [server.url for server in servers], pace))
    return read_completions(run.completions(chunk.chunk))


def test_every_prompt_is_answered_in_the_order_of_the_prompts(make_run: MakeRun) -> None:
    made = make_run(PROMPTS, temperature=0.6, top_k=20, top_p=0.9, repetition_penalty=1.1)
    with FakeSglang() as server:
        completions = _generate(made, server)
    assert [completion.prompt_id for completion in completions] == [f"p{n}" for n in range(len(PROMPTS))]
    assert [completion.output_ids for completion in completions] == [[*reversed(ids), END] for ids in PROMPTS]
    assert sorted(request["input_ids"] for request in server.requests) == PROMPTS
    assert server.requests[0]["sampling_params"] == {
        "max_new_tokens": 64,
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "repetition_penalty": 1.1,
    }
    assert not made[0].journal("s-0").exists()


def test_every_kind_of_fault_is_accounted_for(make_run: MakeRun) -> None:
    lasting: dict[int, Fault] = {20: "400", 21: "drop", 22: "empty", 23: "loop", 24: "abort", 25: "no end token"}
    passing: dict[int, Fault] = {26: "503", 27: "drop", 28: "429", 29: "abort"}

    def fault(first: int, asked: int) -> Fault:
        return lasting.get(first) or (passing.get(first) if asked == 0 else None)

    made = make_run(PROMPTS, attempts=3, max_repetition=0.5)
    with FakeSglang(fault=fault) as server:
        completions = _generate(made, server)

    assert Counter((completion.status, completion.reason) for completion in completions) == {
        ("completed", None): len(PROMPTS) - len(lasting),
        ("failed", "http 400"): 1,
        ("failed", "quarantined"): 1,
        ("rejected", "empty answer"): 1,
        ("rejected", "repetition"): 1,
        ("rejected", "aborted"): 1,
        ("rejected", "no end token"): 1,
    }
    bad_request = completions[0]
    assert bad_request.attempts == 1
    assert bad_request.detail is not None
    assert "the fake says 400" in bad_request.detail
    asked = {first: count for first, count in server.asked.items() if count > 1}
    # Rejected samples are asked for once more, what the server gave up as often as `attempts` says.
    assert asked == {21: 2, 22: 2, 23: 2, 24: 3, 25: 2, 26: 2, 27: 2, 28: 2, 29: 2}
    counts = count_generated(made[0])["s"]
    assert (counts.prompts, counts.finished, counts.waiting) == (len(PROMPTS), len(PROMPTS), 0)
    assert counts.output_tokens == 4 * counts.completed


def test_ids_outside_the_vocabulary_are_never_sent(make_run: MakeRun) -> None:
    with FakeSglang() as server:
        completions = _generate(make_run([[5, 100], [5, -1], [], [5, 99]]), server)
    assert [completion.status for completion in completions] == ["failed"] * 3 + ["completed"]
    assert {completion.reason for completion in completions[:3]} == {"ids outside the vocabulary"}
    assert len(server.requests) == 1


def test_a_slow_answer_is_given_up_and_the_prompt_asked_again(make_run: MakeRun) -> None:
    def slow_at_first(first: int, asked: int) -> Fault:
        return "slow" if first == 20 and asked == 0 else None

    with FakeSglang(fault=slow_at_first) as server:
        completions = _generate(make_run(PROMPTS[:3], request_timeout=1.5), server)
    assert [completion.status for completion in completions] == ["completed"] * 3
    assert completions[0].attempts > 1


def test_requests_in_flight_stay_within_concurrency_and_go_to_the_least_busy(make_run: MakeRun) -> None:
    with FakeSglang(seconds=0.02) as quick, FakeSglang(seconds=0.5) as slow:
        _generate(make_run(PROMPTS, concurrency=4), quick, slow)
    assert quick.most_in_flight <= 4
    assert slow.most_in_flight <= 2
    assert len(quick.requests) > 2 * len(slow.requests)
    assert len(quick.requests) + len(slow.requests) == len(PROMPTS)


def test_a_server_that_dies_is_left_out(make_run: MakeRun) -> None:
    with FakeSglang(fault=lambda _first, _asked: "drop") as breaking, FakeSglang(seconds=0.01) as good:
        completions = _generate(make_run(PROMPTS, attempts=20), breaking, good, pace=Pace(probe_interval=60))
    assert {completion.server for completion in completions} == {good.url}
    assert len(breaking.requests) <= 8


def test_a_server_that_is_not_up_yet_does_not_hold_up_the_others(make_run: MakeRun) -> None:
    with FakeSglang() as gone:
        pass
    with FakeSglang() as server:
        completions = _generate(make_run(PROMPTS), gone, server)
    assert {completion.server for completion in completions} == {server.url}


def test_no_server_at_all_ends_the_job_and_keeps_the_prompts(make_run: MakeRun) -> None:
    made = make_run(PROMPTS)
    with FakeSglang() as gone:
        pass
    with pytest.raises(ServersUnavailableError, match=rf"no SGLang server was healthy for 0.1 s \({gone.url}"):
        _generate(made, gone, pace=Pace(patience=0.1, probe_interval=0.02))
    assert count_generated(made[0])["s"].waiting == len(PROMPTS)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (FakeSglang(model="other"), "serves other, not target; correct target.served_name"),
        (FakeSglang(context=256), r"context of 256 tokens, but .* = 320"),
        (FakeSglang(reads_as="completely other words"), "has another tokenizer than the run: .* prompt p0"),
    ],
    ids=["another model", "a shorter context", "another tokenizer"],
)
def test_a_server_that_is_not_the_target_is_refused(make_run: MakeRun, server: FakeSglang, message: str) -> None:
    made = make_run(PROMPTS, messages=[{"role": "user", "content": "What is the answer to it all?"}])
    with server, pytest.raises(UserError, match=message):
        _generate(made, server)
    assert not made[0].completions("s-0").exists()
    assert server.requests == []


def test_a_run_goes_on_without_the_server_that_is_refused(make_run: MakeRun) -> None:
    with FakeSglang(model="other") as other, FakeSglang() as good:
        completions = _generate(make_run(PROMPTS), other, good)
    assert {completion.server for completion in completions} == {good.url}
    assert other.requests == []


@pytest.mark.parametrize("servers", [[], ["127.0.0.1:30000"]])
def test_addresses_that_are_none_are_named(make_run: MakeRun, servers: list[str]) -> None:
    run, chunk, settings = make_run(PROMPTS)
    with pytest.raises(UserError, match="DFLASH_SERVERS"):
        asyncio.run(generate_once(run, chunk, settings, servers, QUICK))


def test_what_the_journal_holds_is_not_asked_again(make_run: MakeRun) -> None:
    made = make_run(PROMPTS)
    kept = Completion("p3", "rejected", "empty answer", "stop", [END], 1, 0.5, "http://s")
    append_to_journal(made[0].journal("s-0"), kept)
    with FakeSglang() as server:
        completions = _generate(made, server)
    assert completions[3] == kept
    assert len(server.requests) == len(PROMPTS) - 1


def test_a_published_chunk_is_left_as_it_is(make_run: MakeRun) -> None:
    made = make_run(PROMPTS)
    with FakeSglang() as server:
        first = _generate(made, server)
        again = _generate(made, server)
    assert again == first
    assert len(server.requests) == len(PROMPTS)


def test_two_workers_on_one_chunk_publish_one_file(make_run: MakeRun) -> None:
    run, chunk, settings = make_run(PROMPTS)

    async def race(urls: list[str]) -> None:
        await asyncio.gather(*(generate_once(run, chunk, settings, urls, QUICK) for _ in range(2)))

    with FakeSglang(seconds=0.01) as server:
        asyncio.run(race([server.url]))
    assert [completion.prompt_id for completion in read_completions(run.completions("s-0"))] == [
        f"p{n}" for n in range(len(PROMPTS))
    ]
    assert sorted(path.name for path in run.completions("s-0").parent.iterdir()) == ["s-0.json", "s-0.parquet"]
    assert set(server.asked.values()) == {1}
    assert not run.journal("s-0").exists()


def test_a_prompt_that_is_missing_from_the_prompts_is_noticed(make_run: MakeRun) -> None:
    run, chunk, settings = make_run(PROMPTS)
    longer = Chunk(chunk.chunk, chunk.source, chunk.first, chunk.count + 1)
    with pytest.raises(UserError, match="but 25 entered"):
        asyncio.run(generate_once(run, longer, settings, ["http://127.0.0.1:1"], QUICK))


def test_a_killed_worker_has_paid_for_nothing_twice(make_run: MakeRun) -> None:
    run, _, _ = made = make_run(PROMPTS, concurrency=2)
    with FakeSglang(seconds=0.1) as server:
        environment = {**os.environ, "DFLASH_SERVERS": server.url, "DFLASH_RUNS": str(run.root.parent)}
        job = "from services.producer.jobs import generate; generate('r', 's-0')"
        worker = subprocess.Popen([sys.executable, "-c", job], env=environment, start_new_session=True)
        deadline = time.monotonic() + 30
        while len(journaled(run.journal("s-0"))) < 6 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
        finished = journaled(run.journal("s-0"))
        assert 6 <= len(finished) < len(PROMPTS)
        assert not run.completions("s-0").exists()
        completions = _generate(made, server)

    assert [completion.prompt_id for completion in completions] == [f"p{n}" for n in range(len(PROMPTS))]
    for completion, ids in zip(completions, PROMPTS, strict=True):
        if completion.prompt_id in finished:
            assert completion.output_ids == finished[completion.prompt_id].output_ids
            assert server.asked[ids[0]] == 1


def test_on_a_full_disk_answers_wait_for_space(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    full = iter([True] * 60)
    write = os.write

    def write_or_fail(descriptor: int, line: bytes) -> int:
        if line.startswith(b'{"prompt_id"') and next(full, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, line)

    monkeypatch.setattr(os, "write", write_or_fail)
    with FakeSglang() as server:
        completions = _generate(make_run(PROMPTS), server)
    assert {completion.status for completion in completions} == {"completed"}
    # What waited was not asked for again.
    assert set(server.asked.values()) == {1}


def test_a_disk_that_stays_full_ends_the_job_to_be_retried(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with FakeSglang() as server, monkeypatch.context() as patched:
        patched.setattr("services.producer.journal.Journal._write", fail)
        with pytest.raises(NoSpaceError, match="No space left on device; free space or rights there"):
            _generate(make_run(PROMPTS), server, pace=Pace(patience=0.2, probe_interval=0.02))


def test_a_folder_that_may_not_be_written_is_named(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_run(PROMPTS)
    journal = made[0].journal("s-0")

    def refuse(path: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("services.producer.generate.hold", refuse)
    message = f"{journal}: Permission denied; free space or rights there, then `dflash-stack reconcile r`"
    with FakeSglang() as server, pytest.raises(UserError, match=re.escape(message)):
        _generate(made, server)


def test_a_chunk_says_how_it_came_about(make_run: MakeRun) -> None:
    run, _, _ = made = make_run(PROMPTS, temperature=0.6)
    with FakeSglang() as server:
        _generate(made, server)
    origin = read_json(run.summary("s-0"))["origin"]
    assert origin["model"] == "target"
    assert origin["sampling"]["temperature"] == 0.6
    assert origin["servers"] == {server.url: "fake"}
    assert len(origin["revision"]) == 64
