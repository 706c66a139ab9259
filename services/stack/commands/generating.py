"""From sources to answers: prepare, submit, and what an operator does meanwhile."""

from typing import TYPE_CHECKING, Annotated

import typer

from services.errors import UserError
from services.stack.commands.common import ConfigFile, NoWait, RunName, console, keep_showing, named_run, open_stage

if TYPE_CHECKING:
    from services.settings import Settings
    from services.stack.estimate import Estimate

LONGEST_HOURS = 24 * 365

MaxTokens = Annotated[int | None, typer.Option(min=1, help="pause when the run has so many answer tokens")]
MaxHours = Annotated[float | None, typer.Option(min=0, max=LONGEST_HOURS, help="pause after so many hours from now")]


def register(app: typer.Typer) -> None:
    for command in (prepare, submit, status, reconcile, pause, resume):
        app.command()(command)


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
    from services.files import read_json
    from services.stack import stages
    from services.stack.plots import plot_prompts
    from services.stack.prepared import print_prepared, print_preview

    run, settings, operator = open_stage(run_name, config)
    stages.prepare(run, settings, operator, wait=not no_wait)
    if not run.prepared.is_file():
        console.print("enqueued; give the command again to see how far it is")
        return
    content = read_json(run.prepared)
    if preview:
        print_preview(stages.preview(run, preview, operator), console)
    print_prepared(content, console)
    plot_prompts(content, run.prepared.with_suffix(".png"))


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
    from services.chunks import choose, plan_chunks
    from services.control import go_on, narrow
    from services.runs import read_settings
    from services.stack import stages
    from services.stack.estimate import estimate
    from services.stack.reconcile import check_not_paused
    from services.stack.status import StatusView

    run = named_run(run_name)
    settings = read_settings(run)
    chosen = _sources(sources, settings)
    if dry_run:
        plan_chunks(run, settings)
        console.print(_cost(estimate(run, settings, choose(run, chosen, limit), answer_tokens, tokens_per_second)))
        return
    _, _, operator = open_stage(run_name)
    check_not_paused(run)
    narrow(run, chosen, limit)
    if max_tokens is not None or max_hours is not None:
        go_on(run, max_tokens, max_hours)
    stages.submit(run, settings, operator, wait=not no_wait)
    console.print(StatusView(run, operator.connection).render())


def status(
    run_name: RunName,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="refresh until Ctrl-C")] = False,
) -> None:
    """What became of every prompt so far, and what the workers and servers do now."""
    from services.queues import connect
    from services.settings import Addresses
    from services.stack.status import StatusView

    run = named_run(run_name)
    try:
        connection = connect(Addresses())
    except UserError as error:
        console.print(f"[yellow]{error}: only the run's files are shown[/]")
        connection = None
    view = StatusView(run, connection)
    if watch:
        keep_showing(view.render)
    console.print(view.render())


def reconcile(
    run_name: RunName,
    verify: Annotated[bool, typer.Option("--verify", help="compare each chunk with its checksum and prompts")] = False,
) -> None:
    """Enqueue whatever a run lacks that no queue holds: after a loss of Redis, or for chunks whose jobs failed."""
    from services.stack.reconcile import reconcile as reconcile_run

    run, settings, operator = open_stage(run_name)
    found = reconcile_run(run, settings, operator.connection, verify)
    console.print(
        f"run {run.name}: {found.submitted:,} chunks submitted; {found.assembled:,} assembled, "
        f"{found.to_assemble:,} generated, {found.begun:,} begun, {found.untouched:,} not begun; "
        f"enqueued {found.enqueued['generate']:,} to generate and {found.enqueued['assemble']:,} to assemble; "
        f"{found.removed} abandoned files removed",
        soft_wrap=True,
    )
    if found.damaged:
        raise UserError(
            f"{len(found.damaged)} damaged chunks: {'; '.join(found.damaged[:5])}; "
            "remove their files in completions/ and samples/, then reconcile again"
        )


def pause(run_name: RunName) -> None:
    """Stop generating for a run: answers in flight are finished and kept, and no prompt is sent any more."""
    from services.control import pause as pause_run

    pause_run(named_run(run_name), "by its operator")


def resume(run_name: RunName, max_tokens: MaxTokens = None, max_hours: MaxHours = None) -> None:
    """Go on with a paused run. Its budgets are replaced by those given here, if any."""
    from services.control import go_on
    from services.stack.reconcile import reconcile as reconcile_run

    run, settings, operator = open_stage(run_name)
    go_on(run, max_tokens, max_hours)
    found = reconcile_run(run, settings, operator.connection)
    console.print(f"run {run.name} goes on: {found.enqueued['generate']:,} chunks enqueued")


def _sources(names: str | None, settings: "Settings") -> list[str] | None:
    if names is None:
        return None
    known = [source.name for source in settings.sources]
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    if not chosen:
        raise UserError(f"--sources names none; the run's sources are {', '.join(known)}")
    for name in chosen:
        if name not in known:
            raise UserError(f"--sources: the run has no source {name!r}; its sources are {', '.join(known)}")
    return chosen


def _cost(cost: "Estimate") -> str:
    hours = "give --tokens-per-second for hours" if cost.hours is None else f"{cost.hours:,.1f} h"
    return (
        f"{cost.prompts:,} prompts in {cost.chunks - cost.done_chunks:,} chunks ({cost.done_chunks:,} more are done): "
        f"{cost.prompt_tokens:,} prompt tokens, {cost.answer_tokens:,} answer tokens ({cost.basis}); {hours}"
    )
