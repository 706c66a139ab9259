"""Waiting for a stage ends with its files, with the error of its job, or with what to do when there is no job."""

import io
from pathlib import Path

import pytest
from redis import Redis
from rich.console import Console

from services.errors import UserError
from services.queues import enqueue, job_id
from services.stack import wait
from services.stack.wait import Operator, Standing, wait_for
from services.workers import HeartbeatWorker

JOB = job_id("generate", "generate", "r", "s-0")


@pytest.fixture
def output() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def operator(redis: Redis, output: io.StringIO) -> Operator:
    return Operator(redis, Console(file=output, width=120))


def test_it_ends_when_the_files_are_there(operator: Operator, output: io.StringIO) -> None:
    looked = iter([False, False, True])
    enqueue("generate", operator.connection, "generate", "r", "s-0", job_timeout=60)
    wait_for("generate", "generate", [JOB], operator, lambda: Standing(3, 3, "prompts"), lambda: next(looked))
    assert "generate   3/3  prompts" in output.getvalue()


def test_several_bars_are_shown_by_name(operator: Operator, output: io.StringIO) -> None:
    looked = iter([False, True])
    enqueue("generate", operator.connection, "generate", "r", "s-0", job_timeout=60)
    standings = {"a": Standing(100, 100, "%"), "b": Standing(100, 100, "% more")}
    wait_for("prepare", "generate", [JOB], operator, lambda: standings, lambda: next(looked))
    assert output.getvalue().splitlines() == ["a          100/100  %", "b          100/100  % more"]


def test_a_failed_job_is_told_in_its_own_words(operator: Operator, redis: Redis, tmp_path: Path) -> None:
    enqueue("generate", redis, "generate", "r", "s-0", job_timeout=60)
    HeartbeatWorker("generate", redis, tmp_path / "heartbeat").work(burst=True)
    with pytest.raises(UserError, match=r"^generate: no run 'r' in .*; there is none yet.* \[job generate--"):
        wait_for("generate", "generate", [JOB], operator, lambda: Standing(0, 3), lambda: False)


def test_jobs_that_are_gone_with_their_results_missing_are_told(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait, "SETTLED_SECONDS", 0.1)
    with pytest.raises(UserError, match="no job is left and the result is not there; run the command again"):
        wait_for("generate", "generate", [JOB], operator, lambda: Standing(0, 3), lambda: False)


def test_a_queue_without_a_worker_is_told(
    operator: Operator, output: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait, "NO_WORKER_SECONDS", 0)
    looked = iter([False, False, False, True])
    enqueue("generate", operator.connection, "generate", "r", "s-0", job_timeout=60)
    wait_for("generate", "generate", [JOB], operator, lambda: Standing(0, 3), lambda: next(looked))
    assert "no worker takes jobs of generate; start one: dflash-stack worker generate" in output.getvalue()
    assert output.getvalue().count("no worker") == 1


def test_waiting_ends_when_a_server_that_it_needs_has_died(operator: Operator) -> None:
    def check() -> None:
        raise UserError("sglang ended with status 1")

    dead = Operator(operator.connection, operator.console, check)
    with pytest.raises(UserError, match="sglang ended"):
        wait_for("generate", "generate", [JOB], dead, lambda: Standing(0, 3), lambda: False)
