"""Waiting for a stage, with a bar (or several) on a terminal and a line now and then elsewhere."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from redis import Redis
from redis.exceptions import RedisError
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rq import Worker

from services.errors import UserError
from services.queue_names import Stage
from services.queues import enqueue_missing, job_error, job_id, job_states, queue

POLL_SECONDS = 0.5
LINE_SECONDS = 15.0
NO_WORKER_SECONDS = 15.0
REDIS_SECONDS = 60.0
# A job may be enqueued a moment after the result that it follows was published.
SETTLED_SECONDS = 10.0


class Standing(NamedTuple):
    """How far a stage is: `done` of `total` units (None: not known yet), and what else is worth saying."""

    done: int
    total: int | None
    note: str = ""


# One bar, or several by name.
Standings = Standing | Mapping[str, Standing]


@dataclass(frozen=True)
class Operator:
    """Who waits: over which Redis, and where progress is shown.

    `check` raises when there is no use in waiting any longer, such as for a server that has died.
    """

    connection: Redis
    console: Console
    check: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Work:
    """A stage's jobs: `job(*names)` for each of the names whose result `missing` does not find.

    `check` raises when the results will not come, such as for a paused run.
    """

    what: str
    stage: Stage
    job: str
    missing: Callable[[], list[tuple[str, ...]]]
    job_timeout: int
    standing: Callable[[], Standings]
    check: Callable[[], None] = lambda: None


def carry_out(work: Work, operator: Operator, wait: bool = True) -> None:
    """Enqueue the jobs that are missing, and wait for their results."""
    enqueued, patience = False, Patience(work.what, operator)
    while not enqueued:
        with patience.asking():
            enqueue_missing(work.stage, operator.connection, work.job, work.missing(), job_timeout=work.job_timeout)
            enqueued = True
    if wait:
        wait_for(work, operator)


def wait_for(work: Work, operator: Operator) -> None:
    """Show the work's progress until its results are there.

    Raises:
        UserError: one of its jobs failed for good, or is gone from Redis though its result is not there.
    """
    warned = False
    begun = unsettled = time.monotonic()
    patience = Patience(work.what, operator)
    with _display(work.what, operator.console) as show:
        while True:
            with patience.asking():
                if not (missing := work.missing()):
                    break
                operator.check()
                work.check()
                show(work.standing())
                states = job_states(
                    work.stage, [job_id(work.stage, work.job, *of_job) for of_job in missing], operator.connection
                )
                # While Redis was away no worker could show there that it lives.
                unsettled = max(unsettled, patience.away_until)
                if any(state in {"waiting", "running"} for state in states.values()):
                    unsettled = time.monotonic()
                elif failed := [name for name, state in states.items() if state == "failed"]:
                    more = f" (and {len(failed) - 1} more jobs)" if len(failed) > 1 else ""
                    told = job_error(failed[0], operator.connection)
                    raise UserError(f"{work.what}: {told}{more} [job {failed[0]}]")
                elif time.monotonic() - unsettled > SETTLED_SECONDS:
                    raise UserError(f"{work.what}: no job is left and the result is not there; run the command again")
                if not warned and time.monotonic() - begun > NO_WORKER_SECONDS:
                    _warn_without_worker(work.stage, operator)
                    warned = True
            time.sleep(POLL_SECONDS)
        show(work.standing())


@dataclass
class Patience:
    """With a Redis that is away for a while, as when it is started again: what is asked of it is asked once more."""

    what: str
    operator: Operator
    answered: float = field(default_factory=time.monotonic)
    away_until: float = float("-inf")

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Around what asks Redis, which is left at its first error.

        Raises:
            UserError: Redis has not answered for too long.
        """
        try:
            yield
            self.answered = time.monotonic()
        except RedisError as error:
            self.away_until = time.monotonic()
            if self.away_until - self.answered > REDIS_SECONDS:
                raise UserError(f"{self.what}: Redis does not answer ({error}); start it again") from error
            self.operator.check()
            time.sleep(POLL_SECONDS)


def _warn_without_worker(stage: Stage, operator: Operator) -> None:
    if not Worker.count(queue=queue(stage, operator.connection)):
        operator.console.print(f"[yellow]no worker takes jobs of {stage}; start one: dflash-stack worker {stage}[/]")


@contextmanager
def _display(what: str, console: Console) -> Iterator[Callable[[Standings], None]]:
    if not console.is_terminal:
        lines = defaultdict[str, _Shown](_Shown)

        def show_lines(standings: Standings) -> None:
            for name, one in _named(what, standings):
                _show_line(name, one, lines[name], console)

        yield show_lines
        return
    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as progress:
        bars: dict[str, TaskID] = {}

        def show(standings: Standings) -> None:
            for name, one in _named(what, standings):
                if name not in bars:
                    bars[name] = progress.add_task(name, total=None, note="")
                progress.update(bars[name], completed=one.done, total=one.total, note=one.note)

        yield show


def _named(what: str, standings: Standings) -> list[tuple[str, Standing]]:
    return [(what, standings)] if isinstance(standings, Standing) else list(standings.items())


@dataclass
class _Shown:
    """What was last printed of one bar, and when."""

    at: float = 0.0
    done: int = -1


def _show_line(name: str, standing: Standing, shown: _Shown, console: Console) -> None:
    whole = standing.total is not None and standing.done == standing.total
    due = time.monotonic() - shown.at > LINE_SECONDS
    if standing.done != shown.done and (due or whole):
        shown.at, shown.done = time.monotonic(), standing.done
        total = "?" if standing.total is None else standing.total
        console.print(f"{name:<10} {standing.done}/{total}  {standing.note}".rstrip(), highlight=False)
