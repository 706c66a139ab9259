"""The operator's commands on a run that was, or is, being generated."""

import asyncio
import io
import os
from pathlib import Path

import pytest
from redis import Redis
from rich.console import Console
from typer.testing import CliRunner

from services.chunks import choose, read_chunks
from services.control import narrow, pause
from services.errors import UserError
from services.files import publish
from services.live import publish_live
from services.queues import enqueue_missing, job_states, queue
from services.stack.cli import app
from services.stack.estimate import estimate
from services.stack.reconcile import reconcile
from services.stack.stages import assemble_standing, generate_standing
from services.stack.status import StatusView
from tests.making_runs import MakeRun
from tests.services.fake_sglang import FakeSglang
from tests.services.generating import generate_once

PROMPTS = [[first, 10] for first in range(10, 50)]


def _jobs(redis: Redis, stage: str) -> list[str]:
    return sorted(job.args[1] for job in queue(stage, redis).jobs)  # type: ignore[arg-type]


def test_reconcile_rebuilds_the_queues_after_redis_lost_everything(redis: Redis, make_run: MakeRun) -> None:
    run, chunk, settings = make_run(PROMPTS, chunks=4)
    with FakeSglang() as server:
        asyncio.run(generate_once(run, chunk, settings, [server.url]))
    redis.flushall()
    found = reconcile(run, settings, redis)
    assert _jobs(redis, "generate") == ["s-1", "s-2", "s-3"]
    assert _jobs(redis, "assemble") == ["s-0"]
    assert (found.submitted, found.assembled, found.to_assemble, found.begun, found.untouched) == (4, 0, 1, 0, 3)
    # Nothing is enqueued twice.
    assert reconcile(run, settings, redis).enqueued == {"generate": 0, "assemble": 0}


def test_reconcile_finds_a_chunk_that_is_not_what_was_published(redis: Redis, make_run: MakeRun) -> None:
    run, chunk, settings = make_run(PROMPTS)
    with FakeSglang() as server:
        asyncio.run(generate_once(run, chunk, settings, [server.url]))
    assert reconcile(run, settings, redis, verify=True).damaged == []
    path = run.completions("s-0")
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    result = CliRunner().invoke(app, ["reconcile", "r", "--verify"])
    assert isinstance(result.exception, UserError)
    assert "checksum differs" in str(result.exception)


def test_reconcile_removes_what_killed_writers_left(redis: Redis, make_run: MakeRun) -> None:
    run, _, settings = make_run(PROMPTS)
    folder = run.completions("s-0").parent
    folder.mkdir()
    for name, age in ((".s-0.parquet.1.tmp", 7200), (".s-0.parquet.2.tmp", 0)):
        (folder / name).write_text("half")
        os.utime(folder / name, (1, (folder / name).stat().st_mtime - age))
    assert reconcile(run, settings, redis).removed == 1
    assert [path.name for path in folder.iterdir()] == [".s-0.parquet.2.tmp"]


def test_reconcile_keeps_what_a_slow_writer_still_writes(redis: Redis, make_run: MakeRun) -> None:
    run, _, settings = make_run(PROMPTS)

    def age(path: Path) -> None:
        os.utime(path, (1, path.stat().st_mtime - 7200))

    def write_and_reconcile(temporary: Path) -> None:
        temporary.write_text("rows")
        age(temporary)
        assert reconcile(run, settings, redis).removed == 0

    assert publish(run.prompts("slow"), write_and_reconcile)
    assert run.prompts("slow").read_text() == "rows"


def test_reconcile_removes_folders_that_killed_writers_left(redis: Redis, make_run: MakeRun) -> None:
    run, _, settings = make_run(PROMPTS)
    left = [run.root / ".dataset.1.tmp", run.prepared.parent / ".s.1.tmp"]
    for folder in left:
        folder.mkdir()
        (folder / "rows").write_text("1")
        os.utime(folder, (1, folder.stat().st_mtime - 7200))
    assert reconcile(run, settings, redis).removed == 2
    assert not any(folder.exists() for folder in left)


def test_reconcile_stands_a_writer_that_publishes_meanwhile(
    redis: Redis, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _, settings = make_run(PROMPTS)
    gone = run.root / ".export.1.tmp"
    there = Path.glob
    monkeypatch.setattr(Path, "glob", lambda path, pattern: [*there(path, pattern), gone])
    assert reconcile(run, settings, redis).removed == 0


def test_a_paused_run_is_not_submitted(redis: Redis, make_run: MakeRun) -> None:
    run, _, _ = make_run(PROMPTS)
    pause(run, "for lunch")
    result = CliRunner().invoke(app, ["submit", "r", "--no-wait"])
    assert str(result.exception) == "run r is paused: for lunch; go on with `dflash-stack resume r`"
    assert queue("generate", redis).count == 0
    assert CliRunner().invoke(app, ["resume", "r"]).exit_code == 0
    assert queue("generate", redis).count == 1


def test_part_of_a_run_is_submitted_and_reconciled(redis: Redis, make_run: MakeRun) -> None:
    run, _, settings = make_run(PROMPTS, chunks=4)
    assert CliRunner().invoke(app, ["submit", "r", "--no-wait", "--limit", "20"]).exit_code == 0
    assert _jobs(redis, "generate") == ["s-0", "s-1"]
    redis.flushall()
    assert reconcile(run, settings, redis).submitted == 2
    assert CliRunner().invoke(app, ["submit", "r", "--no-wait"]).exit_code == 0
    assert _jobs(redis, "generate") == ["s-0", "s-1", "s-2", "s-3"]
    wrong = CliRunner().invoke(app, ["submit", "r", "--sources", "s,t"])
    assert str(wrong.exception) == "--sources: the run has no source 't'; its sources are s"
    none = CliRunner().invoke(app, ["submit", "r", "--no-wait", "--sources", ","])
    assert str(none.exception) == "--sources names none; the run's sources are s"


def test_at_least_one_whole_chunk_is_chosen(make_run: MakeRun) -> None:
    run, _, _ = make_run(PROMPTS, chunks=4)
    assert [chunk.chunk for chunk in choose(run, None, 1)] == ["s-0"]
    assert [chunk.chunk for chunk in choose(run, None, 39)] == ["s-0", "s-1", "s-2"]
    assert choose(run, [], None) == []


def test_a_dry_run_tells_what_it_would_cost(redis: Redis, make_run: MakeRun) -> None:
    run, chunk, settings = make_run(PROMPTS, chunks=4)
    chunks = choose(run, None, None)
    unknown = estimate(run, settings, chunks)
    assert (unknown.prompts, unknown.prompt_tokens, unknown.answer_tokens, unknown.hours) == (40, 80, 40 * 64, None)
    with FakeSglang() as server:
        asyncio.run(generate_once(run, chunk, settings, [server.url]))
    measured = estimate(run, settings, chunks, tokens_per_second=3)
    assert (measured.prompts, measured.done_chunks, measured.answer_tokens) == (30, 1, 30 * 3)
    assert measured.hours == pytest.approx(30 / 3600)
    result = CliRunner().invoke(app, ["submit", "r", "--dry-run", "--answer-tokens", "100"])
    assert "30 prompts in 3 chunks (1 more are done): 60 prompt tokens, 3,000 answer tokens" in " ".join(
        result.output.split()
    )
    assert queue("generate", redis).count == 0


def _shown(view: StatusView) -> str:
    output = io.StringIO()
    Console(file=output, width=200).print(view.render())
    return output.getvalue()


def test_status_adds_up_files_queues_and_servers(redis: Redis, make_run: MakeRun) -> None:
    run, chunk, settings = make_run(PROMPTS, chunks=4)
    with FakeSglang() as server:
        asyncio.run(generate_once(run, chunk, settings, [server.url]))
    enqueue_missing("generate", redis, "generate", [("r", "s-1"), ("r", "s-2")], job_timeout=60)
    seen = {"state": "ready", "trouble": "", "in_flight": 7, "tokens_per_second": 1.5, "version": "0.5"}
    left_out = {**seen, "state": "left out", "trouble": "HTTP 503"}
    publish_live(redis, "r", "one", {"chunks": 1, "servers": {"http://a": seen, "http://b": seen}})
    publish_live(redis, "r", "two", {"chunks": 2, "servers": {"http://a": seen, "http://b": left_out}})
    text = _shown(StatusView(run, redis))
    assert "4 submitted, 1 done, 0 running, 2 waiting, 0 failed, 1 in no queue" in text
    assert "3 chunks open" in text
    assert "`dflash-stack reconcile r`" in text
    a, b = (line.split() for line in text.splitlines() if "http://" in line)
    assert (a[3], a[5], b[3:5]) == ("ready", "14", ["left", "out"])
    assert "6 tok/s in all" in text
    # 30 prompts are left, of 3 tokens each.
    assert "about 0 min left for 30 prompts" in text


def test_what_is_left_is_counted_of_what_was_submitted(redis: Redis, make_run: MakeRun) -> None:
    run, chunk, settings = make_run(PROMPTS, chunks=4)
    with FakeSglang() as server:
        asyncio.run(generate_once(run, read_chunks(run)[1], settings, [server.url]))
        asyncio.run(generate_once(run, read_chunks(run)[2], settings, [server.url]))
    # The two that are done were submitted another time; of this one nothing is.
    narrow(run, None, chunk.count)
    seen = {"state": "ready", "trouble": "", "in_flight": 7, "tokens_per_second": 1.5, "version": "0.5"}
    publish_live(redis, "r", "one", {"chunks": 1, "servers": {"http://a": seen}})
    assert "left for 10 prompts" in _shown(StatusView(run, redis))
    assert generate_standing(run)()[:2] == (0, 10)
    assert assemble_standing(run)()[:2] == (0, 1)


def test_status_without_redis_shows_the_files(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(PROMPTS)
    monkeypatch.setenv("DFLASH_REDIS_URL", "redis://127.0.0.1:1/0")
    monkeypatch.setenv("DFLASH_RUNS", str(tmp_path / "runs"))
    result = CliRunner().invoke(app, ["status", "r"])
    assert result.exit_code == 0
    assert "only the run's files are shown" in " ".join(result.output.split())
    assert "40" in result.output


def test_the_state_of_a_job_is_the_newest_that_redis_knows(redis: Redis, make_run: MakeRun) -> None:
    run, _, _ = make_run(PROMPTS)
    narrow(run, None, None)
    names = enqueue_missing("generate", redis, "generate", [("r", "s-0"), ("r", "s-1")], job_timeout=60)
    of_stage = queue("generate", redis)
    redis.zadd(of_stage.failed_job_registry.key, {names[0]: 1e12})
    redis.zadd(of_stage.started_job_registry.key, {f"{names[1]}:1": 1e12})
    states = job_states("generate", [*names, "generate--other"], redis)
    assert list(states.values()) == ["waiting", "waiting", "missing"]
    of_stage.empty()
    # A dead worker's entry is nobody's job, though by the clock of its host there is time left.
    assert list(job_states("generate", names, redis).values()) == ["failed", "missing"]
