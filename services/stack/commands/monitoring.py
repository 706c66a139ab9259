"""What an operator looks at."""

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from services.stack.commands.common import REFRESH_SECONDS, console, keep_showing

if TYPE_CHECKING:
    from rich.console import RenderableType

    from services.stack.top import Snapshot

# Rates are over the last minute: answers end in bursts.
RATE_SECONDS = 60.0


def register(app: typer.Typer) -> None:
    app.command()(top)


def top(
    once: Annotated[bool, typer.Option("--once", help="print once, with the rates of one refresh")] = False,
) -> None:
    """All runs, training, queues and the disk at a glance, until Ctrl-C: the overview dashboard in the terminal."""
    from services.metrics.collector import StackCollector
    from services.settings import Addresses
    from services.stack.top import oldest_within, render, take

    collector = StackCollector(Addresses())
    history: deque[Snapshot] = deque(maxlen=int(RATE_SECONDS / REFRESH_SECONDS))

    def look() -> "RenderableType":
        now = take(collector)
        before = oldest_within(history, RATE_SECONDS, now)
        history.append(now)
        return render(now, before)

    with _without_warnings():
        if once:
            look()
            time.sleep(REFRESH_SECONDS)
            console.print(look())
        else:
            keep_showing(look)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """What the collector warns of is on the screen already."""
    import structlog

    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    try:
        yield
    finally:
        structlog.configure(**before)
