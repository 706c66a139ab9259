"""The job `generate` on a real queue: dotted names in, JSON, files out, and the next stage's job enqueued."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from redis import Redis

from services.chunks import Chunk
from services.queues import enqueue, job_id, job_state, queue
from services.records import read_completions
from services.runs import Run
from services.settings import Settings
from services.workers import HeartbeatWorker
from tests.services.fake_sglang import FakeSglang

MakeRun = Callable[..., tuple[Run, Chunk, Settings]]
PROMPTS = [[first, 10] for first in range(20, 28)]
JOB = job_id("generate", "generate", "r", "s-0")


def _work(redis: Redis, tmp_path: Path) -> None:
    HeartbeatWorker("generate", redis, tmp_path / "heartbeat-generate").work(burst=True)


def test_a_worker_publishes_the_chunk_and_hands_it_on(
    redis: Redis, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _, _ = make_run(PROMPTS)
    with FakeSglang() as server:
        monkeypatch.setenv("DFLASH_SERVERS", server.url)
        assert enqueue("generate", redis, "generate", "r", "s-0", job_timeout=60)
        assert not enqueue("generate", redis, "generate", "r", "s-0", job_timeout=60)
        _work(redis, tmp_path)
    assert job_state(JOB, redis).state == "finished"
    assert len(read_completions(run.completions("s-0"))) == len(PROMPTS)
    (assemble,) = queue("assemble", redis).jobs
    assert assemble.func_name == "services.tokenizer.jobs.assemble"
    assert list(assemble.args) == ["r", "s-0"]
    assert (tmp_path / "heartbeat-generate").exists()


def test_a_chunk_published_before_its_next_job_was_enqueued_is_only_handed_on(
    redis: Redis, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(PROMPTS)
    with FakeSglang() as server:
        monkeypatch.setenv("DFLASH_SERVERS", server.url)
        for _ in range(2):
            redis.flushall()
            enqueue("generate", redis, "generate", "r", "s-0", job_timeout=60)
            _work(redis, tmp_path)
    assert len(server.requests) == len(PROMPTS)
    assert queue("assemble", redis).count == 1


def test_what_a_user_has_to_put_right_is_not_retried(
    redis: Redis, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(PROMPTS)
    with FakeSglang(model="other") as server:
        monkeypatch.setenv("DFLASH_SERVERS", server.url)
        enqueue("generate", redis, "generate", "r", "s-0", job_timeout=60)
        _work(redis, tmp_path)
    state = job_state(JOB, redis)
    assert state.state == "failed"
    assert state.error == (
        f"server {server.url} serves other, not target; "
        "correct target.served_name, or start the server with that --served-model-name"
    )
    assert queue("assemble", redis).count == 0


def test_trouble_of_the_moment_is_retried(
    redis: Redis, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _, _ = make_run(PROMPTS)
    run.completions("s-0").parent.write_text("in the way of the folder")
    with FakeSglang() as server:
        monkeypatch.setenv("DFLASH_SERVERS", server.url)
        enqueue("generate", redis, "generate", "r", "s-0", job_timeout=60)
        _work(redis, tmp_path)
    assert job_state(JOB, redis).state == "waiting"


def test_an_impossible_redis_address_ends_a_worker_with_one_line(tmp_path: Path) -> None:
    environment = {**os.environ, "DFLASH_REDIS_URL": "redis://[::1", "DFLASH_HEARTBEAT": str(tmp_path / "heartbeat")}
    command = [sys.executable, "-m", "services.stack", "worker", "generate"]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    told = "error: DFLASH_REDIS_URL is no address of Redis; write it as redis://HOST:PORT/0\n"
    assert (finished.returncode, finished.stderr) == (1, told)
