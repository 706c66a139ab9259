"""What the terminal shows of the stack."""

import asyncio
import io
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, write_to_textfile
from redis import Redis
from rich.console import Console
from typer.testing import CliRunner

from services.metrics.collector import StackCollector
from services.queues import enqueue
from services.runs import Run
from services.settings import Addresses
from services.stack.cli import app
from services.stack.top import Snapshot, render, take
from tests.making_runs import MakeRun
from tests.services.fake_sglang import FakeSglang
from tests.services.generating import generate_once

PROMPTS = [[first, 10] for first in range(10, 18)]


def shown(now: Snapshot, before: Snapshot | None = None) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=80)
    console.print(render(now, before))
    return [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def write_rank(run: Run, step: int, tokens: int) -> None:
    registry = CollectorRegistry()
    labels = {"rank": "0", "role": "colocated"}
    for name, value in {"steps_planned": 200, "loss": 2.5, "last_step_timestamp_seconds": 1000}.items():
        Gauge(f"dflash_training_{name}", "Written.", list(labels), registry=registry).labels(**labels).set(value)
    for name, value in {"steps": step, "tokens": tokens}.items():
        Counter(f"dflash_training_{name}", "Written.", list(labels), registry=registry).labels(**labels).inc(value)
    run.rank_metrics.mkdir(parents=True, exist_ok=True)
    write_to_textfile(str(run.rank_metrics / "rank-0.prom"), registry)


def test_runs_training_and_queues_are_shown_with_their_pace(redis: Redis, make_run: MakeRun) -> None:
    run, chunk, settings = make_run(PROMPTS, chunks=2)
    collector = StackCollector(Addresses())
    write_rank(run, step=10, tokens=1000)
    before = take(collector)
    with FakeSglang() as server:
        asyncio.run(generate_once(run, chunk, settings, [server.url]))
    write_rank(run, step=20, tokens=3000)
    enqueue("generate", redis, "generate", "r", "s-1", job_timeout=60)
    now = take(collector)
    # Four prompts and twelve tokens in two seconds; the other four take two more.
    lines = shown(Snapshot(1002.0, now.series), Snapshot(1000.0, before.series))
    assert ["r", "8", "4", "50.0", "0", "0", "6", "2s", "0", "-"] in lines
    assert ["r", "20", "200", "1,000", "2.500", "-", "2s", "-"] in lines
    waits = next(line for line in lines if line[:1] == ["generate"])
    assert waits[1:7] == ["1", "0", "0", "0", "0", "0"]


def test_the_first_look_has_no_pace_yet(redis: Redis, make_run: MakeRun) -> None:
    make_run(PROMPTS)
    line = next(line for line in shown(take(StackCollector(Addresses()))) if line[:1] == ["r"])
    assert line == ["r", "8", "0", "0.0", "0", "0", "-", "-", "0", "-"]


def test_a_run_that_begins_again_under_its_name_has_no_negative_pace(redis: Redis, make_run: MakeRun) -> None:
    make_run(PROMPTS)
    now = take(StackCollector(Addresses()))
    tokens = "dflash_output_tokens_total"
    before = Snapshot(now.at - 1, {tokens: [({"run": "r", "source": "s"}, 500.0)]})
    assert next(line for line in shown(now, before) if line[:1] == ["r"])[6] == "0"


def test_a_long_run_fits_into_eighty_columns(redis: Redis) -> None:
    run = {"run": "qwen-diver"}
    series = {
        "dflash_run_unreadable": [(run, 0.0)],
        "dflash_prompts": [(run, 193_010.0)],
        "dflash_completions_total": [({**run, "status": "completed"}, 96_505.0), ({**run, "status": "rejected"}, 10.0)],
        "dflash_output_tokens_total": [(run, 261_500_000.0)],
        "dflash_samples_total": [(run, 96_000.0)],
        "dflash_merge_samples": [({**run, "part": "after"}, 988_234.0)],
    }
    before = {
        "dflash_completions_total": [({**run, "status": "completed"}, 96_505.0), ({**run, "status": "rejected"}, 0.0)],
        "dflash_output_tokens_total": [(run, 260_300_000.0)],
    }
    header, _, line, *_ = (" ".join(words) for words in shown(Snapshot(60.0, series), Snapshot(0.0, before)))
    assert header == "run prompts done % rejected failed tok/s left samples dataset"
    assert line == "qwen-diver 193,010 96,515 50.0 10 0 20,000 6.7d 96,000 988,234"


def test_without_redis_the_files_are_shown(redis: Redis, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(PROMPTS)
    monkeypatch.setenv("DFLASH_REDIS_URL", "redis://127.0.0.1:1/0")
    result = CliRunner().invoke(app, ["top", "--once"])
    assert result.exit_code == 0
    assert "Redis does not answer: queues and workers are not known" in result.output
    assert "redis_unreadable" not in result.output
    assert ["r", "8"] in [line.split()[:2] for line in result.output.splitlines()]


def test_without_runs_it_says_how_to_begin_one(redis: Redis, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["top", "--once"])
    assert result.exit_code == 0
    assert "no run yet; begin with `dflash-stack prepare`" in result.output


@pytest.mark.parametrize("command", [["top"], ["status", "r", "--watch"]])
def test_in_a_pipe_each_view_is_printed(redis: Redis, make_run: MakeRun, command: list[str]) -> None:
    make_run(PROMPTS)
    arguments = [sys.executable, "-m", "services.stack", *command]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        assert process.stdout is not None
        assert any("prompts" in line for line in process.stdout)
        process.terminate()
    assert process.returncode == -signal.SIGTERM
