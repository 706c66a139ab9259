"""The command line, `dflash-stack`: each stage of a run is a subcommand, see `services.stack.commands`."""

import errno
import sys
from typing import NoReturn

import typer
from rich.console import Console

from services.errors import UserError
from services.stack.commands import datasets, demonstrating, generating, hosting, monitoring, operating, training

FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}

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
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        told = _told(error)
        if told is None:
            raise
        _fail(told)


def _told(error: Exception) -> str | None:
    """What a user can do something about, in one line; None for a fault of the program."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        if error.errno == errno.ENOSPC:
            return f"{where}the disk is full; free some of it, then give the command again"
        if error.errno in FORBIDDEN:
            return f"{where}{error.strerror}; give this user the right to it, then give the command again"
        return None
    # Most commands need neither of them, and end without an error.
    from pydantic import ValidationError
    from redis.exceptions import RedisError

    if isinstance(error, RedisError):
        return f"Redis: {error}; see that it runs, then give the command again"
    if isinstance(error, ValidationError) and error.title == "Addresses":
        faults = (f"DFLASH_{str(fault['loc'][0]).upper()}: {fault['msg']}" for fault in error.errors())
        return f"environment: {'; '.join(faults)}"
    return None


def _fail(message: str) -> NoReturn:
    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(f"error: {message}")
    sys.exit(1)
