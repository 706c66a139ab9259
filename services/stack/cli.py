"""The command line, `dflash-stack`: each stage of a run is a subcommand, see `services.stack.commands`."""

import errno
import sys
from typing import NoReturn

import typer
from rich.console import Console

from services.errors import UserError
from services.stack.commands import datasets, demonstrating, generating, hosting, monitoring, operating, training

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="""From too narrow data to a better DFlash drafter.

    A run goes through [b]prepare[/], [b]submit[/], [b]merge[/], [b]train[/], [b]evaluate[/] and [b]export[/];
    [b]status[/] and [b]report[/] tell where it is. Any command may be given again: what is there is kept, what is
    missing is done. To see the whole way on a small model: [b]dflash-stack demo[/].
    """,
)
for topic in (generating, datasets, training, monitoring, demonstrating, operating, hosting):
    topic.register(app)


def main() -> None:
    """Entry point: a user's mistake is one line on standard error and exit status 1."""
    try:
        app()
    except UserError as error:
        _fail(str(error))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}the disk is full; free some of it, then give the command again")
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(message: str) -> NoReturn:
    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(f"error: {message}")
    sys.exit(1)
