"""A session obeys its run's budget, whatever the disk and the operator do meanwhile."""

import asyncio
import errno

import pytest

from services.control import go_on, pause, read_control
from services.ledger import GenerateCounter, GenerateCounts
from services.producer import session as session_module
from services.producer.session import Session, open_session
from services.runs import Run
from services.settings import Settings
from tests.making_runs import MakeRun

NOBODY = ["http://127.0.0.1:1"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "CONTROL_SECONDS", 0.01)


async def stopped_within(seconds: float, run: Run, settings: Settings) -> str | None:
    """Why a session of the run was stopped; None when it was not, in that time."""

    async def stopped(session: Session) -> None:
        while session.stopped is None:
            await asyncio.sleep(0.01)

    async with open_session(run, settings, NOBODY) as session:
        await asyncio.wait([asyncio.create_task(stopped(session))], timeout=seconds)
        return session.stopped


def test_a_budget_is_obeyed_after_the_disk_was_full(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _, settings = make_run([[10, 11]])
    go_on(run, hours=0)
    full = iter([True] * 3)

    def pause_or_fail(of_run: Run, reason: str) -> None:
        if next(full, False):
            raise OSError(errno.ENOSPC, "No space left on device", str(of_run.control))
        pause(of_run, reason)

    monkeypatch.setattr(session_module, "pause", pause_or_fail)
    reason = asyncio.run(stopped_within(10, run, settings))
    assert reason == read_control(run).paused
    assert reason is not None
    assert reason.startswith("its time was up at ")


def test_a_budget_that_is_raised_while_answers_are_counted_holds(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _, settings = make_run([[10, 11]])
    go_on(run, max_tokens=30)

    def count(_counter: GenerateCounter) -> dict[str, GenerateCounts]:
        go_on(run, max_tokens=1000)
        return {"s": GenerateCounts(output_tokens=50)}

    monkeypatch.setattr(GenerateCounter, "count", count)
    assert asyncio.run(stopped_within(0.3, run, settings)) is None
    assert read_control(run).max_tokens == 1000
