"""What an operator looks at."""

import time
from collections import deque
from typing import TYPE_CHECKING, Annotated

import typer

from services.stack.commands.common import console

if TYPE_CHECKING:
    from services.stack.top import Snapshot

REFRESH_SECONDS = 2.0
# Rates are over the last minute: answers end in bursts.
RATE_SECONDS = 60.0


def register(app: typer.Typer) -> None:
    app.command()(top)


def top(
    once: Annotated[bool, typer.Option("--once", help="print once, with the rates of one refresh")] = False,
) -> None:
    """All runs, training, queues and the disk at a glance, until Ctrl-C: the overview dashboard in the terminal."""
    from rich.live import Live

    from services.metrics.collector import StackCollector
    from services.settings import Addresses
    from services.stack.top import oldest_within, render, take

    collector = StackCollector(Addresses())
    history: deque[Snapshot] = deque([take(collector)], maxlen=int(RATE_SECONDS / REFRESH_SECONDS))
    if once:
        time.sleep(REFRESH_SECONDS)
        console.print(render(take(collector), history[0]))
        return
    with Live(render(history[0], None), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(REFRESH_SECONDS)
            now = take(collector)
            live.update(render(now, oldest_within(history, RATE_SECONDS, now)), refresh=True)
            history.append(now)
