"""Work on many tasks in several processes, with the results in the order of the tasks."""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from services.errors import UserError

Context = TypeVar("Context")
Task = TypeVar("Task")
Result = TypeVar("Result")

# More than this gains little: one process reads the files and decides.
MOST_PROCESSES = 16
TASKS_AHEAD = 3

_context: Any = None


def available_processes() -> int:
    return min(len(os.sched_getaffinity(0)), MOST_PROCESSES)


class Processes(Generic[Context]):
    """Processes that share what they need to know (`context`); with a count of 1 everything is done here.

    They are forked, so the context is neither copied nor serialized.
    """

    def __init__(self, context: Context, count: int) -> None:
        self._context = context
        self._count = count
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        if self._count > 1:
            fork = multiprocessing.get_context("fork")
            self._executor = ProcessPoolExecutor(self._count, fork, initializer=_begin, initargs=(self._context,))
            # All are forked with the first task: before any file is open that they would keep open.
            self._executor.submit(int).result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def map(self, function: Callable[[Context, Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """`function(context, task)` of every task, in order; only a few tasks and results are held at once.

        Raises:
            UserError: a process was killed.
        """
        if self._executor is None:
            for task in tasks:
                yield function(self._context, task)
            return
        ahead: deque[Future[Result]] = deque()
        try:
            for task in tasks:
                ahead.append(self._executor.submit(_call, function, task))
                if len(ahead) >= TASKS_AHEAD * self._count:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        except BrokenProcessPool as error:
            raise UserError(
                "a process that prepares prompts was killed, as by the system when memory runs out; free some and "
                "prepare again, what is prepared stays"
            ) from error
        finally:
            for future in ahead:
                future.cancel()


def _begin(context: Any) -> None:
    global _context
    _context = context
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker that is killed cannot end its processes: they see it themselves."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _call(function: Callable[[Any, Task], Result], task: Task) -> Result:
    return function(_context, task)
