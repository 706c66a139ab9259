"""Stopping on SIGTERM or Ctrl-C: the first asks, the second ends at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether a stop was asked for. For the main thread only."""
    previous = {number: signal.getsignal(number) for number in SIGNALS}
    asked = False

    def ask(number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(number, signal.SIG_DFL)

    for number in SIGNALS:
        signal.signal(number, ask)
    try:
        yield lambda: asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
