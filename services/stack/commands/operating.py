"""What containers run, and what brings them up: workers, their health checks, metrics, compose files."""

import sys
from pathlib import Path
from typing import Annotated, cast

import typer

from services.errors import UserError
from services.queue_names import JOB_MODULES, Stage

Queues = Annotated[
    list[str], typer.Argument(metavar="QUEUE...", help=f"one or more of {', '.join(JOB_MODULES)}; a process each")
]


def register(app: typer.Typer) -> None:
    app.command("render")(render_compose)
    for command in (worker, healthcheck, metrics):
        app.command()(command)


def render_compose(
    gpus: Annotated[int, typer.Option(min=1, help="cards 0 to GPUS - 1 serve, one server a card")],
    compose: Annotated[Path, typer.Option(help="compose.yaml of any number of cards")] = Path("compose.yaml"),
    output: Annotated[Path | None, typer.Option(help="file to write; default: the terminal")] = None,
) -> None:
    """Write compose.yaml for another number of cards."""
    from services.files import replace_text
    from services.stack.render import render

    try:
        text = render(compose.read_text(encoding="utf-8"), gpus)
        if output is None:
            sys.stdout.write(text)
        else:
            replace_text(output, text)
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}; name another file") from error


def worker(queues: Queues) -> None:
    """Take jobs of one or more queues until SIGTERM."""
    from services.logs import configure_logs
    from services.settings import Addresses
    from services.workers import run_worker, run_workers, worker_command

    configure_logs()
    chosen = _stages(queues)
    if len(chosen) == 1:
        run_worker(chosen[0], Addresses())
    else:
        sys.exit(run_workers(chosen, worker_command()))


def healthcheck(queues: Queues) -> None:
    """Exit 0 when the workers of these queues showed a sign of life within the last minute."""
    from services.heartbeats import check_heartbeats
    from services.settings import Addresses

    check_heartbeats(_stages(queues), Addresses())


def metrics(port: Annotated[int, typer.Option(min=1, max=65535, help="port to serve /metrics on")] = 9460) -> None:
    """Serve the metrics of all runs and queues for Prometheus."""
    from services.logs import configure_logs
    from services.metrics.exporter import serve_metrics
    from services.settings import Addresses

    configure_logs()
    serve_metrics(Addresses(), port)


def _stages(queues: list[str]) -> list[Stage]:
    for name in queues:
        if name not in JOB_MODULES:
            raise UserError(f"there is no queue {name!r}; queues are {', '.join(JOB_MODULES)}")
    return [cast(Stage, name) for name in queues]
