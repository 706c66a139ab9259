"""The command line, `dflash-stack`: each stage of a run is a subcommand."""

import sys
import time
from pathlib import Path
from typing import Annotated, NoReturn, cast

import typer
from rich.console import Console
from rich.live import Live

from services.errors import UserError
from services.logs import configure_logs
from services.queues import JOB_MODULES, Stage, connect
from services.runs import Run, create_run, open_run, read_json, read_settings
from services.settings import Addresses, Settings, load_settings
from services.stack import stages
from services.stack.prepared import print_prepared, print_preview
from services.stack.status import status_table
from services.stack.wait import Operator
from services.workers import check_heartbeats, run_worker, run_workers, worker_command

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
# Where there is no terminal to fit, tables and paths get room instead of being cut.
console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)

RunName = Annotated[str, typer.Argument(metavar="RUN", help="name of the run, a folder under $DFLASH_RUNS (var/runs)")]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", envvar="DFLASH_CONFIG", help="YAML file; without it, the run's own copy is used"),
]
NoWait = Annotated[bool, typer.Option("--no-wait", help="enqueue, and return at once")]
Queues = Annotated[
    list[str], typer.Argument(metavar="QUEUE...", help=f"one or more of {', '.join(JOB_MODULES)}; a process each")
]
DemoFolder = Annotated[Path, typer.Option(help="where data, runs, logs and the report go")]
DemoConfig = Annotated[Path, typer.Option("--config", "-c", help="the demo's configuration")]


@app.command()
def prepare(
    run_name: RunName,
    config: ConfigFile = None,
    no_wait: NoWait = False,
    preview: Annotated[int, typer.Option(min=0, help="print this many rendered prompts of every source")] = 0,
) -> None:
    """Turn the sources into prompts: select, render with the target's template, tokenize. Begins the run.

    Ends with what became of every row, the mix by domain and the lengths; the same is in the run's
    prompts/prepare.json and prepare.png.
    """
    from services.stack.plots import plot_prompts

    run, settings, operator = _open(run_name, config)
    stages.prepare(run, settings, operator, wait=not no_wait)
    if not run.prepared.is_file():
        console.print("enqueued; give the command again to see how far it is")
        return
    content = read_json(run.prepared)
    if preview:
        print_preview(stages.preview(run, preview, operator), console)
    print_prepared(content, console)
    plot_prompts(content, run.prepared.with_suffix(".png"))


@app.command()
def submit(run_name: RunName, no_wait: NoWait = False) -> None:
    """Generate the target's answers and assemble samples from them; enqueues whatever the run's files lack."""
    run, settings, operator = _open(run_name)
    stages.submit(run, settings, operator, wait=not no_wait)
    console.print(status_table(run))


@app.command()
def status(
    run_name: RunName,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="refresh until Ctrl-C")] = False,
) -> None:
    """What became of every prompt so far, counted from the run's files."""
    run = open_run(Addresses().runs, run_name)
    if not watch:
        console.print(status_table(run))
        return
    with Live(status_table(run), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(2)
            live.update(status_table(run), refresh=True)


@app.command()
def merge(run_name: RunName, no_wait: NoWait = False) -> None:
    """Merge the run's samples with the existing corpus into one dataset, without copying the corpus."""
    run, _, operator = _open(run_name)
    stages.merge(run, operator, wait=not no_wait)
    console.print(status_table(run))


@app.command()
def train(run_name: RunName, config: ConfigFile = None, no_wait: NoWait = False) -> None:
    """Train the drafter on the merged dataset; goes on from the newest checkpoint."""
    run, settings, operator = _open(run_name, config)
    stages.train(run, settings, operator, wait=not no_wait)


@app.command()
def evaluate(run_name: RunName, config: ConfigFile = None, no_wait: NoWait = False) -> None:
    """Measure the acceptance length on held-out prompts, before and after training."""
    run, settings, operator = _open(run_name, config)
    for which in stages.EVALUATED:
        stages.evaluate(run, settings, which, operator, wait=not no_wait)


@app.command()
def export(run_name: RunName, no_wait: NoWait = False) -> None:
    """Publish the trained drafter in the layout that SGLang loads."""
    run, _, operator = _open(run_name)
    stages.export(run, operator, wait=not no_wait)
    console.print(f"drafter: {run.export}")


@app.command()
def report(
    run_name: RunName,
    output: Annotated[Path | None, typer.Option(help="folder for report.json and plots; default: the run's")] = None,
) -> None:
    """One report of a run: prompts, tokens, merge, training and acceptance, with plots."""
    from services.stack.report import collect_report, print_report, write_report

    run = open_run(Addresses().runs, run_name)
    content = collect_report(run)
    print_report(content, console)
    write_report(content, run, output or run.root)


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="where data, runs, logs and the report go")] = Path("var/demo"),
    config: Annotated[Path, typer.Option("--config", "-c", help="the demo's configuration")] = Path("config/demo.yaml"),
    port: Annotated[int, typer.Option(help="port of the SGLang server")] = 30000,
) -> None:
    """Run the main job from end to end on this machine's CPU, with a small real model; see `make demo`."""
    from services.stack.demo.run import run_demo

    run_demo(folder, config, port, console)


@app.command()
def materials(folder: DemoFolder = Path("var/demo"), config: DemoConfig = Path("config/demo.yaml")) -> None:
    """Put the demo's prompts, target model and existing corpus in place, as the demo itself would."""
    from services.stack.demo.containers import put_materials_in_place

    put_materials_in_place(load_settings(config), folder)


@app.command("stack-files")
def stack_files(
    folder: DemoFolder = Path("var/demo"),
    config: DemoConfig = Path("config/demo.yaml"),
    env_file: Annotated[Path, typer.Option(help="file to write, unless it is there")] = Path(".env"),
) -> None:
    """Write .env and a configuration with which compose.cpu.yaml runs the demo in containers."""
    from services.stack.demo.containers import write_stack_files

    write_stack_files(load_settings(config), folder, env_file)


@app.command()
def worker(queues: Queues) -> None:
    """Take jobs of one or more queues until SIGTERM."""
    configure_logs()
    chosen = _stages(queues)
    if len(chosen) == 1:
        run_worker(chosen[0], Addresses())
    else:
        sys.exit(run_workers(chosen, worker_command()))


@app.command()
def healthcheck(queues: Queues) -> None:
    """Exit 0 when the workers of these queues showed a sign of life within the last minute."""
    check_heartbeats(_stages(queues), Addresses())


@app.command()
def metrics(port: Annotated[int, typer.Option(help="port to serve /metrics on")] = 9460) -> None:
    """Serve the metrics of all runs and queues for Prometheus."""
    from services.metrics import serve_metrics

    serve_metrics(Addresses(), port)


def _open(run_name: str, config: Path | None = None) -> tuple[Run, Settings, Operator]:
    addresses = Addresses()
    if config is None:
        run = open_run(addresses.runs, run_name)
        settings = read_settings(run)
    else:
        settings = load_settings(config)
    connection = connect(addresses)
    if config is not None:
        run = create_run(addresses.runs, run_name, settings)
    return run, settings, Operator(connection, console)


def _stages(queues: list[str]) -> list[Stage]:
    for name in queues:
        if name not in JOB_MODULES:
            raise UserError(f"there is no queue {name!r}; queues are {', '.join(JOB_MODULES)}")
    return [cast(Stage, name) for name in queues]


def _fail(message: str) -> NoReturn:
    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(f"error: {message}")
    sys.exit(1)


def main() -> None:
    """Entry point: a user's mistake is one line on standard error and exit status 1."""
    try:
        app()
    except UserError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
