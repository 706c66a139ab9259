"""A producer worker that dies by SIGKILL at a chosen moment: `worker.py [MOMENT [TIMES]]`.

Without a moment it is the worker of production. `TIMES` lets it pass the moment so often before.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from services.logs import configure_logs
from services.producer import generate, jobs
from services.producer.journal import Journal
from services.settings import Addresses
from services.threaded_worker import ThreadedWorker
from services.workers import run_worker

MOMENTS = ("in the pop", "in a journal's line", "while publishing", "before the summary", "before handing on")


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_after(times: int, passing: Callable[..., Any], dying: Callable[..., Any] = die) -> Callable[..., Any]:
    left = [times]

    def run(*arguments: Any, **keywords: Any) -> Any:
        left[0] -= 1
        return passing(*arguments, **keywords) if left[0] >= 0 else dying(*arguments, **keywords)

    return run


def half_a_line(journal: Journal, content: dict[str, Any]) -> None:
    os.write(journal.descriptor, repr(content).encode()[:40])
    die()


def arm(moment: str, times: int) -> None:
    if moment == "in the pop":
        ThreadedWorker.execute_job = die_after(times, ThreadedWorker.execute_job)  # type: ignore[method-assign]
    elif moment == "in a journal's line":
        Journal._write = die_after(times, Journal._write, half_a_line)  # type: ignore[method-assign]
    elif moment == "while publishing":
        # Called to fill the temporary file that is not linked yet.
        passing = generate.write_completions

        def half_written(path: Any, completions: list[Any], origin: Any) -> None:
            passing(path, completions[: len(completions) // 2], origin)
            die()

        generate.write_completions = die_after(times, passing, half_written)
    elif moment == "before the summary":
        generate._publish_summary = die_after(times, generate._publish_summary)
    elif moment == "before handing on":
        jobs._hand_on = die_after(times, jobs._hand_on)


if __name__ == "__main__":
    configure_logs()
    if len(sys.argv) > 1:
        arm(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    run_worker("generate", Addresses())
