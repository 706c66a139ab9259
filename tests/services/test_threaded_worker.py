"""The producer's own worker: several chunks at once, and an orderly end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer

from services.control import go_on, pause, read_control
from services.ledger import count_generated
from services.live import read_live
from services.producer.journal import journaled
from services.queues import enqueue, enqueue_missing, job_id, job_state, job_states, queue
from services.records import read_completions
from services.stack.reconcile import reconcile
from tests.making_runs import MakeRun
from tests.services.fake_sglang import FakeSglang

PROMPTS = [[first, 10] for first in range(10, 90)]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts the producer's worker as its container does."""
    workers: list[subprocess.Popen[bytes]] = []

    def start(**environment: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "services.stack", "worker", "generate"]
        workers.append(subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}))
        return workers[-1]

    yield start
    for worker in workers:
        worker.kill()
        worker.wait()


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def enqueue_chunks(redis: Redis, *chunks: str) -> None:
    enqueue_missing("generate", redis, "generate", [("r", chunk) for chunk in chunks], job_timeout=60)


def test_it_takes_as_many_chunks_as_fill_its_slots_and_no_more(
    redis: Redis,
    make_run: MakeRun,
    start_worker: Callable[..., subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, _, _ = make_run(PROMPTS, chunks=8, concurrency=25)
    with FakeSglang(seconds=1.5) as server:
        monkeypatch.setenv("DFLASH_SERVERS", server.url)
        enqueue_chunks(redis, *(f"s-{number}" for number in range(8)))
        start_worker()
        wait_until(lambda: server.most_in_flight == 25)
        # Two chunks and a half are in flight; what is in no slot yet has to be in the queue, for other workers.
        assert queue("generate", redis).count >= 4
        first, last = (job_id("generate", "generate", "r", chunk) for chunk in ("s-0", "s-7"))
        assert job_states("generate", [first, last], redis) == {first: "running", last: "waiting"}
        wait_until(lambda: bool(read_live(redis, "r")), 10)
        seen = read_live(redis, "r")[0]["servers"][server.url]
        wait_until(lambda: all(run.summary(f"s-{number}").is_file() for number in range(8)))
    assert (seen["state"], seen["version"]) == ("ready", "fake")
    assert server.most_in_flight == 25
    assert set(server.asked.values()) == {1}
    wait_until(lambda: queue("assemble", redis).count == 8)


def test_told_to_stop_it_keeps_what_is_in_flight_and_hands_the_rest_back(
    redis: Redis,
    make_run: MakeRun,
    start_worker: Callable[..., subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, _, _ = make_run(PROMPTS, concurrency=8)
    with FakeSglang(seconds=0.5) as server:
        monkeypatch.setenv("DFLASH_SERVERS", server.url)
        enqueue_chunks(redis, "s-0")
        first = start_worker()
        wait_until(lambda: len(journaled(run.journal("s-0"))) >= 8)
        first.send_signal(signal.SIGTERM)
        assert first.wait(20) == 0
        asked = sum(server.asked.values())
        assert len(journaled(run.journal("s-0"))) == asked
        assert job_state(job_id("generate", "generate", "r", "s-0"), redis).state == "waiting"
        start_worker()
        wait_until(run.summary("s-0").is_file)
    assert set(server.asked.values()) == {1}
    assert len(read_completions(run.completions("s-0"))) == len(PROMPTS)


def test_answers_that_outlast_the_grace_period_are_given_up_and_asked_again(
    redis: Redis,
    make_run: MakeRun,
    start_worker: Callable[..., subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, _, _ = make_run(PROMPTS[:4], concurrency=4)
    with FakeSglang() as server:
        server.hanging = True
        monkeypatch.setenv("DFLASH_SERVERS", server.url)
        enqueue_chunks(redis, "s-0")
        first = start_worker(DFLASH_GRACE="0.5")
        wait_until(lambda: server.in_flight == 4)
        first.send_signal(signal.SIGTERM)
        assert first.wait(20) == 0
        server.hanging = False
        start_worker()
        wait_until(run.summary("s-0").is_file)
    assert set(server.asked.values()) == {2}


def test_a_paused_run_sends_nothing_and_goes_on_where_it_was(
    redis: Redis,
    make_run: MakeRun,
    start_worker: Callable[..., subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, _, settings = make_run(PROMPTS, chunks=2, concurrency=4)
    with FakeSglang(seconds=0.5) as server:
        monkeypatch.setenv("DFLASH_SERVERS", server.url)
        enqueue_chunks(redis, "s-0", "s-1")
        start_worker()
        wait_until(lambda: len(journaled(run.journal("s-0"))) >= 4)
        pause(run, "for lunch")
        wait_until(lambda: job_state(job_id("generate", "generate", "r", "s-1"), redis).state == "finished")
        asked = sum(server.asked.values())
        assert asked < len(PROMPTS)
        go_on(run)
        assert reconcile(run, settings, redis).enqueued["generate"] == 2
        wait_until(lambda: run.summary("s-0").is_file() and run.summary("s-1").is_file())
    assert set(server.asked.values()) == {1}


def test_a_run_stops_by_itself_when_its_budget_is_used_up(
    redis: Redis,
    make_run: MakeRun,
    start_worker: Callable[..., subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, _, _ = make_run(PROMPTS, concurrency=2)
    go_on(run, max_tokens=30)
    with FakeSglang(seconds=0.4) as server:
        monkeypatch.setenv("DFLASH_SERVERS", server.url)
        enqueue_chunks(redis, "s-0")
        start_worker()
        wait_until(lambda: read_control(run).paused is not None)
        wait_until(lambda: job_state(job_id("generate", "generate", "r", "s-0"), redis).state == "finished")
    assert read_control(run).paused == "its budget of 30 tokens is used up"
    counts = count_generated(run)["s"]
    assert 30 <= counts.output_tokens < 90
    assert counts.finished == 0


def test_a_job_of_another_layout_fails_with_one_line_and_the_others_go_on(
    redis: Redis,
    make_run: MakeRun,
    start_worker: Callable[..., subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, _, _ = make_run(PROMPTS[:4])
    pickled = Queue("generate", connection=redis).enqueue_call("services.producer.jobs.generate", ("r", "s-0"))
    old = Queue("generate", connection=redis, serializer=JSONSerializer)
    renamed = old.enqueue_call("services.producer.jobs.generate_chunk", ("r", "s-0"), job_id="generate--renamed")
    longer = old.enqueue_call("services.producer.jobs.generate", ("r", "s-0", 64), job_id="generate--longer")
    with FakeSglang() as server:
        monkeypatch.setenv("DFLASH_SERVERS", server.url)
        enqueue("generate", redis, "generate", "r", "s-0", job_timeout=60)
        start_worker()
        wait_until(run.summary("s-0").is_file)
        for job in (renamed, longer):
            wait_until(lambda job=job: job_state(job.id, redis).state == "failed")  # type: ignore[misc]
            assert "of another version's layout; `dflash-stack reconcile RUN`" in str(job_state(job.id, redis).error)
        assert pickled.id not in queue("generate", redis).get_job_ids()
