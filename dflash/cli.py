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

from dflash.config import EvaluationConfig, TrainingConfig
from dflash.config_file import describe, load_config
from dflash.errors import DflashError, LostRankError
from dflash.files import set_aside
from dflash.launch import INTERRUPTED, LOST_PEER, StoppedAtOnceError, launch
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
    checkpoint and ends with exit code 143; the same command goes on from it. A second one ends the run at once. A
    process that dies or hangs ends it with exit code 70; the same command goes on here too.
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
def probe(
    config: Annotated[
        Path, typer.Option(help="JSON or YAML file; the keys are those of dflash.config.TrainingConfig.")
    ],
    devices: Annotated[int, typer.Option(help="Devices of the machine.", min=1)],
    seconds: Annotated[float, typer.Option(help="How long to measure, beside loading.", min=1)] = 120,
) -> None:
    """Measure one target and one drafter; print the best split of the machine and the hours it needs."""
    from dflash.probe import probe as measure
    from dflash.probe import splits

    settings = load_config(config, TrainingConfig)
    rates, work = measure(settings, devices, seconds)
    tokens, of_target = work.pack_tokens, settings.topology.cards_per_target
    cards = "one device" if of_target == 1 else f"{of_target} devices"
    typer.echo(f"target    {rates.target:9.3f} s a pack, {tokens / rates.target:9.0f} tokens/s on {cards}")
    drafter = rates.gradient + rates.optimizer
    typer.echo(f"drafter   {drafter:9.3f} s a pack, {tokens / drafter:9.0f} tokens/s on one device")
    typer.echo(f"packs of {tokens:.0f} tokens: {work.epoch_packs} an epoch, {work.run_packs} in the configured steps")
    found = splits(rates, devices, of_target)
    for split in [*[split for split in found if split.targets][:2], *[split for split in found if not split.targets]]:
        name = f"{split.targets} + {split.drafters}" if split.targets else f"{split.drafters} colocated"
        hours = [packs / split.packs_per_second / 3600 for packs in (work.epoch_packs, work.run_packs)]
        typer.echo(
            f"{name}: {split.packs_per_second * tokens:.0f} tokens/s, "
            f"{hours[0]:.2f} h an epoch, {hours[1]:.2f} h the run; {split.waits}"
        )


@app.command()
def evaluate(
    target: Annotated[Path, typer.Option(help="Hugging Face folder of the target model.")],
    draft: Annotated[Path, typer.Option(help="A training run, a checkpoint or an exported drafter.")],
    prompts: Annotated[
        Path, typer.Option(help="JSONL: prompt_id, source, input_ids and maybe thinking (true or false) on each line.")
    ],
    report: Annotated[Path, typer.Option(help="JSON report to write.")],
    rollouts: Annotated[
        Path,
        typer.Option(help="File for the target's own answers; share it between evaluations on the same target."),
    ],
    dataset: Annotated[
        Path | None, typer.Option(help="The training data: prompts that it has an answer to are refused.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to produce for a prompt.")] = 256,
    batch_size: Annotated[int, typer.Option(help="Prompts decoded at once.")] = 8,
    temperature: Annotated[float, typer.Option(help="0: greedily; above: sampled tokens.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Of sampling: the likeliest tokens of this mass.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Of sampling: so many of the likeliest tokens; -1: all.")] = -1,
    guessing: Annotated[
        str, typer.Option(help="Of sampling: greedy (guesses are the likeliest tokens, as SGLang's) or sampled.")
    ] = "greedy",
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    tree_budget: Annotated[
        int | None, typer.Option(help="Also decode with draft trees of so many nodes, greedily.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, for target and drafter.")] = "float32",
    device: Annotated[str, typer.Option(help="A torch device, for example cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch.")] = None,
) -> None:
    """Measure acceptance on held-out prompts, by source and by thinking mode.

    Greedily every token is checked against the target alone. Sampling keeps the target's distribution; give the
    temperature, top_p and top_k that the server will sample with.
    """
    values = {name: value for name, value in locals().items() if value is not None}
    from dflash.evaluate import evaluate as evaluate_draft
    from dflash.evaluation_table import print_evaluation

    try:
        settings = EvaluationConfig.model_validate(values)
    except ValidationError as error:
        raise DflashError(describe(error)) from error
    with _bar("evaluating", None) as bar:
        task = bar.task_ids[0]
        result = evaluate_draft(settings, lambda line: bar.update(task, completed=line["done"], total=line["prompts"]))
    print_evaluation(result, Console())
    typer.echo(str(report))


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="A training run (its best checkpoint), a checkpoint or a drafter.")],
    output: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    target: Annotated[Path, typer.Option(help="Hugging Face folder of the target the drafter was trained for.")],
    dtype: Annotated[str, typer.Option(help="bfloat16 (as servers want it) or float32.")] = "bfloat16",
) -> None:
    """Write a drafter in the layout that SGLang loads, checked against its target, whose embedding alone is read."""
    import torch

    from dflash.export import export_draft
    from dflash.target_files import read_fit

    if dtype not in ("bfloat16", "float32"):
        raise DflashError(f"--dtype {dtype}: must be bfloat16 or float32")
    typer.echo(str(export_draft(source, output, read_fit(target), getattr(torch, dtype))))


@app.command()
def verify(
    draft: Annotated[Path, typer.Argument(help="A training run, a checkpoint or an exported drafter.")],
    target: Annotated[Path, typer.Argument(help="Hugging Face folder of the target model.")],
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL: prompt_id, source and input_ids on each line; default: a few questions.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 32,
    server: Annotated[
        str | None, typer.Option(help="Address of an SGLang server that decodes with this drafter, to compare with.")
    ] = None,
    device: Annotated[str, typer.Option(help="A torch device, for example cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch.")] = None,
) -> None:
    """Check that a drafter and its target agree, link by link, from features to acceptance; exit code 1 if not.

    Do it with an untrained drafter before a long run, and with the exported one before serving. The links hold in
    float32 only, so the target is loaded in it: 4 bytes a parameter on the device.
    """
    import torch

    from dflash.verify import prompts_to_verify
    from dflash.verify import verify as verify_pair

    if max_new_tokens < 2:
        raise DflashError(f"--max-new-tokens {max_new_tokens}: must be at least 2")
    if threads is not None:
        torch.set_num_threads(threads)
    holds = True
    for link in verify_pair(draft, target, prompts_to_verify(target, prompts), max_new_tokens, device, server):
        holds = holds and link.holds is not False
        word = {True: "ok", False: "FAILED", None: "left out"}[link.holds]
        typer.echo(f"{word:8}  {link.name}: {link.detail}")
    if not holds:
        raise typer.Exit(1)


app.command()(plan)


def main() -> None:
    """Run the command line; a user's mistake ends in one line and exit code 1, a process that died or hung in 70."""
    try:
        app()
    except DflashError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(LOST_PEER if isinstance(error, LostRankError) else 1)


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
