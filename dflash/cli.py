"""The `dflash` command line: train, evaluate, export and verify a drafter, and plan its memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from dflash.config import EvaluationConfig, TrainingConfig, describe, load_config
from dflash.errors import DflashError
from dflash.files import set_aside
from dflash.launch import INTERRUPTED, StoppedAtOnceError, launch
from dflash.plan_command import plan

# torch is imported by the commands that need it here: the launcher of a training run holds neither torch nor a device.

app = typer.Typer(
    help="Train, evaluate, export and verify DFlash drafters: small models that guess a block of tokens at once, "
    "which a large target model then verifies in one pass.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def train(
    config: Annotated[
        Path, typer.Option(help="JSON or YAML file; the keys are those of dflash.config.TrainingConfig.")
    ],
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Begin anew; what the folder has of an earlier run is set aside.")
    ] = False,
) -> None:
    """Train a drafter, or go on from the newest checkpoint in the run's output folder.

    Progress is in OUTPUT/metrics.jsonl, checkpoints in OUTPUT/checkpoints. Ctrl-C or SIGTERM saves a
    checkpoint and ends with exit code 143; the same command goes on from it. A second one ends the run at once.
    """
    settings = load_config(config, TrainingConfig)
    if from_scratch and (aside := set_aside(settings.output)):
        typer.echo(f"the earlier run is in {aside}")
    with _bar("training", settings.steps) as bar:
        try:
            result = launch(settings, _training_progress(bar))
        except StoppedAtOnceError as error:
            typer.echo("ended at once; the same command goes on from the last checkpoint, if there is one", err=True)
            raise typer.Exit(INTERRUPTED) from error
    typer.echo(f"step {result.steps} of {settings.steps}: {result.checkpoint}")
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)


@app.command()
def evaluate(
    target: Annotated[Path, typer.Option(help="Hugging Face folder of the target model.")],
    draft: Annotated[Path, typer.Option(help="A training run, a checkpoint or an exported drafter.")],
    prompts: Annotated[Path, typer.Option(help="JSONL: prompt_id, source and input_ids on each line.")],
    report: Annotated[Path, typer.Option(help="JSON report to write.")],
    rollouts: Annotated[
        Path,
        typer.Option(help="File for the target's own answers; share it between evaluations on the same target."),
    ],
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to produce for a prompt.")] = 256,
    batch_size: Annotated[int, typer.Option(help="Prompts decoded at once.")] = 8,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, for target and drafter.")] = "float32",
    device: Annotated[str, typer.Option(help="A torch device, for example cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch.")] = None,
) -> None:
    """Measure acceptance length on held-out prompts and check every token against the target alone."""
    values = {name: value for name, value in locals().items() if value is not None}
    from dflash.evaluate import evaluate as evaluate_draft

    try:
        settings = EvaluationConfig.model_validate(values)
    except ValidationError as error:
        raise DflashError(describe(error)) from error
    with _bar("evaluating", None) as bar:
        task = bar.task_ids[0]
        result = evaluate_draft(settings, lambda line: bar.update(task, completed=line["done"], total=line["prompts"]))
    overall, lossless = result["overall"], result["lossless"]
    typer.echo(
        f"acceptance length {overall['acceptance_length'] or 0:.3f} on {overall['prompts']} prompts, "
        f"{len(lossless['mismatches'])} mismatches with the target alone, "
        f"{len(lossless['numeric_ties'])} numeric ties: "
        f"{report}"
    )


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="A training run (its best checkpoint), a checkpoint or a drafter.")],
    output: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    target: Annotated[Path, typer.Option(help="Hugging Face folder of the target the drafter was trained for.")],
    dtype: Annotated[str, typer.Option(help="bfloat16 (as servers want it) or float32.")] = "bfloat16",
) -> None:
    """Write a drafter in the layout that SGLang loads, checked against its target."""
    import torch

    from dflash.export import export_draft
    from dflash.target import load_target

    if dtype not in ("bfloat16", "float32"):
        raise DflashError(f"--dtype {dtype}: must be bfloat16 or float32")
    typer.echo(str(export_draft(source, output, load_target(target, torch.float32), getattr(torch, dtype))))


@app.command()
def verify(
    draft: Annotated[Path, typer.Argument(help="A training run, a checkpoint or an exported drafter.")],
    target: Annotated[Path, typer.Argument(help="Hugging Face folder of the target model.")],
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL: prompt_id, source and input_ids on each line; default: a few questions.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 32,
    device: Annotated[str, typer.Option(help="A torch device, for example cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch.")] = None,
) -> None:
    """Check that a drafter and its target agree, link by link, from features to acceptance; exit code 1 if not.

    Do it with an untrained drafter before a long run, and with the exported one before serving.
    """
    import torch

    from dflash.verify import prompts_to_verify
    from dflash.verify import verify as verify_pair

    if max_new_tokens < 2:
        raise DflashError(f"--max-new-tokens {max_new_tokens}: must be at least 2")
    if threads is not None:
        torch.set_num_threads(threads)
    holds = True
    for link in verify_pair(draft, target, prompts_to_verify(target, prompts), max_new_tokens, device):
        holds = holds and link.holds is not False
        word = {True: "ok", False: "FAILED", None: "left out"}[link.holds]
        typer.echo(f"{word:8}  {link.name}: {link.detail}")
    if not holds:
        raise typer.Exit(1)


app.command()(plan)


def main() -> None:
    """Run the command line; a user's mistake ends in one line and exit code 1."""
    try:
        app()
    except DflashError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)


def _bar(title: str, total: int | None) -> Progress:
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )
    bar.add_task(title, total=total, note="")
    return bar


def _training_progress(bar: Progress) -> Callable[[dict[str, Any]], None]:
    task = bar.task_ids[0]

    def show(line: dict[str, Any]) -> None:
        if "note" in line:
            typer.echo(line["note"], err=True)
            return
        bar.update(task, completed=line["step"])
        if "loss" in line:
            bar.update(task, note=f"loss {line['loss']:.3f}  {line['tokens_per_second']:.0f} tokens/s")
        elif line.get("acceptance_length") is not None:
            bar.console.print(f"step {line['step']}: acceptance length {line['acceptance_length']:.3f}")

    return show
