"""The command line, `dflash-stack`: each stage of a run is a subcommand."""

import sys
import time
from pathlib import Path
from typing import Annotated, NoReturn, cast

import typer
from rich.console import Console
from rich.live import Live

from services.control import go_on, narrow
from services.control import pause as pause_run
from services.errors import UserError
from services.ledger import plan_chunks
from services.logs import configure_logs
from services.queues import JOB_MODULES, Stage, connect
from services.runs import Run, create_run, open_run, read_json, read_settings, replace_text
from services.settings import Addresses, Settings, load_settings
from services.stack import stages
from services.stack.estimate import Estimate, estimate
from services.stack.merge_table import merge_tables
from services.stack.operate_commands import register
from services.stack.prepared import print_prepared, print_preview
from services.stack.reconcile import check_not_paused, choose
from services.stack.reconcile import reconcile as reconcile_run
from services.stack.status import StatusView
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
MaxTokens = Annotated[int | None, typer.Option(min=1, help="pause when the run has so many answer tokens")]
MaxHours = Annotated[float | None, typer.Option(min=0, help="pause after so many hours from now")]
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
def submit(
    run_name: RunName,
    no_wait: NoWait = False,
    sources: Annotated[str | None, typer.Option(help="only these sources, separated by commas")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="about so many prompts: whole chunks of all sources")] = None,
    max_tokens: MaxTokens = None,
    max_hours: MaxHours = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="enqueue nothing; tell what it would cost")] = False,
    answer_tokens: Annotated[float | None, typer.Option(help="with --dry-run: mean tokens of an answer")] = None,
    tokens_per_second: Annotated[float | None, typer.Option(help="with --dry-run: rate of all servers")] = None,
) -> None:
    """Generate the target's answers and assemble samples from them; enqueues whatever the run's files lack."""
    addresses = Addresses()
    run = open_run(addresses.runs, run_name)
    settings = read_settings(run)
    chosen = _sources(sources, settings)
    if dry_run:
        plan_chunks(run, settings)
        console.print(_cost(estimate(run, settings, choose(run, chosen, limit), answer_tokens, tokens_per_second)))
        return
    operator = Operator(connect(addresses), console)
    check_not_paused(run)
    narrow(run, chosen, limit)
    if max_tokens is not None or max_hours is not None:
        go_on(run, max_tokens, max_hours)
    stages.submit(run, settings, operator, wait=not no_wait)
    console.print(StatusView(run, operator.connection).render())


@app.command()
def status(
    run_name: RunName,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="refresh until Ctrl-C")] = False,
) -> None:
    """What became of every prompt so far, and what the workers and servers do now."""
    addresses = Addresses()
    run = open_run(addresses.runs, run_name)
    try:
        connection = connect(addresses)
    except UserError as error:
        console.print(f"[yellow]{error}: only the run's files are shown[/]")
        connection = None
    view = StatusView(run, connection)
    if not watch:
        console.print(view.render())
        return
    with Live(view.render(), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(2)
            live.update(view.render(), refresh=True)


@app.command()
def reconcile(
    run_name: RunName,
    verify: Annotated[bool, typer.Option("--verify", help="compare each chunk with its checksum and prompts")] = False,
) -> None:
    """Enqueue whatever a run lacks that no queue holds: after a loss of Redis, or for chunks whose jobs failed."""
    run, settings, operator = _open(run_name)
    found = reconcile_run(run, settings, operator.connection, verify)
    console.print(
        f"run {run.name}: {found.submitted:,} chunks submitted; {found.assembled:,} assembled, "
        f"{found.to_assemble:,} generated, {found.begun:,} begun, {found.untouched:,} not begun; "
        f"enqueued {found.enqueued['generate']:,} to generate and {found.enqueued['assemble']:,} to assemble; "
        f"{found.removed} abandoned files removed"
    )
    if found.damaged:
        raise UserError(
            f"{len(found.damaged)} damaged chunks: {'; '.join(found.damaged[:5])}; "
            "remove their files in completions/ and samples/, then reconcile again"
        )


@app.command()
def pause(run_name: RunName) -> None:
    """Stop generating for a run: answers in flight are finished and kept, and no prompt is sent any more."""
    pause_run(open_run(Addresses().runs, run_name), "by its operator")


@app.command()
def resume(run_name: RunName, max_tokens: MaxTokens = None, max_hours: MaxHours = None) -> None:
    """Go on with a paused run. Its budgets are replaced by those given here, if any."""
    run, settings, operator = _open(run_name)
    go_on(run, max_tokens, max_hours)
    found = reconcile_run(run, settings, operator.connection)
    console.print(f"run {run.name} goes on: {found.enqueued['generate']:,} chunks enqueued")


@app.command()
def merge(
    names: Annotated[list[str], typer.Argument(metavar="[BASE] RUN...", help="a run; with --to, a base and runs")],
    to: Annotated[Path | None, typer.Option(metavar="DATASET", help="folder to make, of BASE and all RUNs")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="read the whole dataset and compare the numbers")] = False,
    no_wait: NoWait = False,
) -> None:
    """Merge samples with an existing corpus into one dataset, without copying the corpus.

    `merge RUN` makes the run's own dataset, with the base that its settings name. `merge BASE RUN... --to DATASET`
    makes another; BASE is the folder of a dataset, or - for none. Remove the folder to undo it.
    """
    operator = Operator(connect(Addresses()), console)
    if to is None:
        if len(names) > 1:
            raise UserError("several names: say with --to which dataset to make of base and runs")
        run = open_run(Addresses().runs, names[0])
        dataset = run.dataset
        if verify:
            stages.merge_into(dataset, read_settings(run).merge.base, [run], operator, verify, wait=not no_wait)
        else:
            stages.merge(run, operator, wait=not no_wait)
    else:
        if len(names) < 2:
            raise UserError("name a base and at least one run, as in `merge BASE RUN --to DATASET`; - is no base")
        dataset = to
        runs = [open_run(Addresses().runs, name) for name in names[1:]]
        base = None if names[0] == "-" else Path(names[0])
        stages.merge_into(dataset, base, runs, operator, verify, wait=not no_wait)
    if (dataset / "merge.json").is_file():
        for table in merge_tables(read_json(dataset / "merge.json")):
            console.print(table)


@app.command()
def inspect(
    dataset: Annotated[Path, typer.Argument(metavar="DATASET", help="folder of samples")],
    row: Annotated[int | None, typer.Argument(metavar="[ROW]", help="a sample, from 0; without it: all")] = None,
    target: Annotated[Path | None, typer.Option(help="model whose tokenizer it is, if no merge noted it")] = None,
) -> None:
    """Show a sample with its mask token by token, or read a whole dataset and tell what is in it."""
    from services.stack.inspection import show_dataset, show_sample

    if row is None:
        show_dataset(dataset, console)
    else:
        show_sample(dataset, row, target, console)


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


@app.command("render")
def render_compose(
    gpus: Annotated[int, typer.Option(min=1, help="cards 0 to GPUS - 1 serve, one server a card")],
    compose: Annotated[Path, typer.Option(help="compose.yaml of any number of cards")] = Path("compose.yaml"),
    output: Annotated[Path | None, typer.Option(help="file to write; default: the terminal")] = None,
) -> None:
    """Write compose.yaml for another number of cards."""
    from services.stack.render import render

    try:
        text = render(compose.read_text(encoding="utf-8"), gpus)
        if output is None:
            sys.stdout.write(text)
        else:
            replace_text(output, text)
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}; name another file") from error


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


register(app)


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


def _sources(names: str | None, settings: Settings) -> list[str] | None:
    if names is None:
        return None
    known = [source.name for source in settings.sources]
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name not in known:
            raise UserError(f"--sources: the run has no source {name!r}; its sources are {', '.join(known)}")
    return chosen


def _cost(cost: Estimate) -> str:
    hours = "give --tokens-per-second for hours" if cost.hours is None else f"{cost.hours:,.1f} h"
    return (
        f"{cost.prompts:,} prompts in {cost.chunks - cost.done_chunks:,} chunks ({cost.done_chunks:,} more are done): "
        f"{cost.prompt_tokens:,} prompt tokens, {cost.answer_tokens:,} answer tokens ({cost.basis}); {hours}"
    )


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
