"""From samples to a dataset, and looking into one."""

from pathlib import Path
from typing import Annotated

import typer

from services.errors import UserError
from services.stack.commands.common import NoWait, console, named_run


def register(app: typer.Typer) -> None:
    for command in (merge, inspect):
        app.command()(command)


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
    from services.files import read_json
    from services.queues import connect
    from services.runs import read_settings
    from services.settings import Addresses
    from services.stack import stages
    from services.stack.merge_table import merge_tables
    from services.stack.wait import Operator

    operator = Operator(connect(Addresses()), console)
    if to is None:
        if len(names) > 1:
            raise UserError("several names: say with --to which dataset to make of base and runs")
        run = named_run(names[0])
        dataset = run.dataset
        if verify:
            stages.merge_into(dataset, read_settings(run).merge.base, [run], operator, verify, wait=not no_wait)
        else:
            stages.merge(run, operator, wait=not no_wait)
    else:
        if len(names) < 2:
            raise UserError("name a base and at least one run, as in `merge BASE RUN --to DATASET`; - is no base")
        dataset = to
        runs = [named_run(name) for name in names[1:]]
        base = None if names[0] == "-" else Path(names[0])
        stages.merge_into(dataset, base, runs, operator, verify, wait=not no_wait)
    if (dataset / "merge.json").is_file():
        for table in merge_tables(read_json(dataset / "merge.json")):
            console.print(table)


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
