"""What many commands share: the terminal, their arguments, and how a run is opened."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from rich.console import RenderableType

    from services.runs import Run
    from services.settings import Settings
    from services.stack.wait import Operator

# Where there is no terminal to fit, tables and paths get room instead of being cut.
console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)

REFRESH_SECONDS = 2.0
# In a file or a pipe every view stays.
PLAIN_REFRESH_SECONDS = 30.0

RunName = Annotated[str, typer.Argument(metavar="RUN", help="name of the run, a folder under $DFLASH_RUNS (var/runs)")]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", envvar="DFLASH_CONFIG", help="YAML file; without it, the run's own copy is used"),
]
NoWait = Annotated[bool, typer.Option("--no-wait", help="enqueue, and return at once")]


def named_run(name: str) -> "Run":
    """Raises UserError when there is no such run."""
    from services.runs import open_run
    from services.settings import Addresses

    return open_run(Addresses().runs, name)


def open_stage(run_name: str, config: Path | None = None) -> "tuple[Run, Settings, Operator]":
    """The run, its settings (those of `config`, with which it may begin), and who waits for its jobs."""
    from services.queues import connect
    from services.runs import create_run, read_settings
    from services.settings import Addresses, load_settings
    from services.stack.wait import Operator

    addresses = Addresses()
    if config is None:
        run = named_run(run_name)
        return run, read_settings(run), Operator(connect(addresses), console)
    settings = load_settings(config)
    operator = Operator(connect(addresses), console)
    return create_run(addresses.runs, run_name, settings), settings, operator


def keep_showing(look: "Callable[[], RenderableType]") -> None:
    """Show what `look` returns until Ctrl-C: in place on a terminal, one view after the other elsewhere."""
    if not console.is_terminal:
        while True:
            console.print(look())
            time.sleep(PLAIN_REFRESH_SECONDS)
    from rich.live import Live

    with Live(look(), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(REFRESH_SECONDS)
            live.update(look(), refresh=True)
