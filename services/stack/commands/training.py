"""From the dataset to a measured drafter, and the report of it all."""

from pathlib import Path
from typing import Annotated

import typer

from services.stack.commands.common import ConfigFile, NoWait, RunName, console, named_run, open_stage


def register(app: typer.Typer) -> None:
    for command in (train, evaluate, export, report):
        app.command()(command)


def train(run_name: RunName, config: ConfigFile = None, no_wait: NoWait = False) -> None:
    """Train the drafter on the merged dataset; goes on from the newest checkpoint."""
    from services.stack import stages

    run, settings, operator = open_stage(run_name, config)
    stages.train(run, settings, operator, wait=not no_wait)


def evaluate(run_name: RunName, config: ConfigFile = None, no_wait: NoWait = False) -> None:
    """Measure the acceptance length on held-out prompts, before and after training."""
    from services.stack import stages

    run, settings, operator = open_stage(run_name, config)
    for which in stages.EVALUATED:
        stages.evaluate(run, settings, which, operator, wait=not no_wait)


def export(run_name: RunName, no_wait: NoWait = False) -> None:
    """Publish the trained drafter in the layout that SGLang loads."""
    from services.stack import stages

    run, _, operator = open_stage(run_name)
    stages.export(run, operator, wait=not no_wait)
    console.print(f"drafter: {run.export}")


def report(
    run_name: RunName,
    output: Annotated[Path | None, typer.Option(help="folder for report.json and plots; default: the run's")] = None,
) -> None:
    """One report of a run: prompts, tokens, merge, training and acceptance, with plots."""
    from services.stack.report import collect_report, print_report, write_report

    run = named_run(run_name)
    content = collect_report(run)
    print_report(content, console)
    write_report(content, run, output or run.root)
