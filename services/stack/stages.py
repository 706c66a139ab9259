"""What each stage's command does: enqueue what is missing, and wait until its files are there."""

import json
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from services.errors import UserError
from services.ledger import count_assembled, count_generated, plan_chunks, read_chunks
from services.queues import enqueue, job_id, job_state
from services.runs import Run, read_json
from services.settings import Settings
from services.stack.wait import Operator, Standing, wait_for

Evaluated = Literal["before", "after"]
EVALUATED: tuple[Evaluated, ...] = ("before", "after")

PREPARE_TIMEOUT = 12 * 3600
MERGE_TIMEOUT = 6 * 3600
EXPORT_TIMEOUT = 3600
RATE_WINDOW_SECONDS = 20.0
TAIL_BYTES = 65_536


def prepare(run: Run, settings: Settings, operator: Operator, wait: bool = True) -> None:
    """Prompts from every source."""
    if run.prepared.is_file():
        return
    enqueue("prepare", operator.connection, "prepare", run.name, job_timeout=PREPARE_TIMEOUT)
    if not wait:
        return
    sources = [source.name for source in settings.sources]
    wait_for(
        "prepare",
        "prepare",
        [job_id("prepare", "prepare", run.name)],
        operator,
        lambda: Standing(sum(run.prompts(source).is_file() for source in sources), len(sources), "sources"),
        run.prepared.is_file,
    )


def submit(run: Run, settings: Settings, operator: Operator, wait: bool = True) -> None:
    """Answers to every prompt, and samples from them: enqueues what the files lack, so it rebuilds lost queues.

    Raises:
        UserError: the run is not prepared.
    """
    if not run.prepared.is_file():
        raise UserError(f"run {run.name} is not prepared; begin with `dflash-stack prepare {run.name}`")
    chunks = [chunk.chunk for chunk in plan_chunks(run, settings)]
    for chunk in chunks:
        if not run.completions(chunk).is_file():
            timeout = settings.generate.job_timeout
            enqueue("generate", operator.connection, "generate", run.name, chunk, job_timeout=timeout)
        elif not run.assembled(chunk).is_file():
            enqueue(
                "assemble", operator.connection, "assemble", run.name, chunk, job_timeout=settings.assemble.job_timeout
            )
    if not wait:
        return
    wait_for(
        "generate",
        "generate",
        [job_id("generate", "generate", run.name, chunk) for chunk in chunks],
        operator,
        _generate_standing(run),
        lambda: all(run.completions(chunk).is_file() for chunk in chunks),
    )
    wait_for(
        "assemble",
        "assemble",
        [job_id("assemble", "assemble", run.name, chunk) for chunk in chunks],
        operator,
        lambda: _assemble_standing(run),
        lambda: all(run.assembled(chunk).is_file() for chunk in chunks),
    )


def merge(run: Run, operator: Operator, wait: bool = True) -> None:
    """One dataset of the existing corpus and the run's samples."""
    if run.merged.is_file():
        return
    enqueue("merge", operator.connection, "merge", run.name, job_timeout=MERGE_TIMEOUT)
    if wait:
        wait_for(
            "merge",
            "merge",
            [job_id("merge", "merge", run.name)],
            operator,
            lambda: Standing(int(run.merged.is_file()), 1, "dataset"),
            run.merged.is_file,
        )


def merge_into(
    dataset: Path, base: Path | None, runs: list[Run], operator: Operator, verify: bool, wait: bool = True
) -> None:
    """A dataset of its own, of a base and of what runs add to it."""
    inputs = (str(base.absolute()) if base else "", "verify" if verify else "")
    names = (str(dataset.absolute()), *inputs, *(run.name for run in runs))
    enqueue("merge", operator.connection, "merge_into", *names, job_timeout=MERGE_TIMEOUT)
    job = job_id("merge", "merge_into", *names)
    if wait:
        # Its folder may have been there before: only the job knows whether it is of these inputs.
        wait_for(
            "merge",
            "merge",
            [job],
            operator,
            lambda: Standing(int((dataset / "merge.json").is_file()), 1, "dataset"),
            lambda: job_state(job, operator.connection).state == "finished",
        )


def train(run: Run, settings: Settings, operator: Operator, wait: bool = True) -> None:
    """A drafter, trained to the configured step; goes on from the newest checkpoint.

    Raises:
        UserError: the run has no merged dataset.
    """
    if not run.merged.is_file():
        raise UserError(f"run {run.name} has no merged dataset; first `dflash-stack merge {run.name}`")
    last = run.checkpoint(settings.train.steps)
    if last.is_dir():
        return
    enqueue("train", operator.connection, "train", run.name, job_timeout=settings.train.job_timeout)
    if wait:
        wait_for(
            "train",
            "train",
            [job_id("train", "train", run.name)],
            operator,
            lambda: _train_standing(run, settings),
            last.is_dir,
        )


def evaluate(run: Run, settings: Settings, which: Evaluated, operator: Operator, wait: bool = True) -> None:
    """Acceptance on held-out prompts, of the untrained drafter (before) or of the newest checkpoint (after)."""
    result = run.evaluation(which)
    if result.is_file():
        return
    enqueue("train", operator.connection, "evaluate", run.name, which, job_timeout=settings.evaluate.job_timeout)
    if wait:
        wait_for(
            f"{which}",
            "train",
            [job_id("train", "evaluate", run.name, which)],
            operator,
            lambda: _evaluate_standing(run, which),
            result.is_file,
        )


def export(run: Run, operator: Operator, wait: bool = True) -> None:
    """The newest checkpoint in the layout that SGLang loads."""
    if run.export.is_dir():
        return
    enqueue("train", operator.connection, "export", run.name, job_timeout=EXPORT_TIMEOUT)
    if wait:
        wait_for(
            "export",
            "train",
            [job_id("train", "export", run.name)],
            operator,
            lambda: Standing(int(run.export.is_dir()), 1, "drafter"),
            run.export.is_dir,
        )


def _generate_standing(run: Run) -> Callable[[], Standing]:
    """Prompts finished of all, with the token rate of the last seconds."""
    seen: deque[tuple[float, int]] = deque()

    def standing() -> Standing:
        counts = count_generated(run).values()
        tokens = sum(count.output_tokens for count in counts)
        now = time.monotonic()
        seen.append((now, tokens))
        while now - seen[0][0] > RATE_WINDOW_SECONDS:
            seen.popleft()
        span = now - seen[0][0]
        rate = f"  {(tokens - seen[0][1]) / span:,.0f} tok/s" if span > 0 else ""
        done = sum(count.finished + count.in_journal for count in counts)
        return Standing(done, sum(count.prompts for count in counts), f"prompts  {tokens:,} tokens{rate}")

    return standing


def _assemble_standing(run: Run) -> Standing:
    assembled = count_assembled(run)
    samples = sum(count["samples"] for count in assembled.values())
    return Standing(len(assembled), len(read_chunks(run)), f"chunks  {samples:,} samples")


def _train_standing(run: Run, settings: Settings) -> Standing:
    last = _last_line(run.training_metrics)
    if last is None:
        return Standing(0, settings.train.steps, "steps")
    note = f"steps  loss {last['loss']:.3f}  {last['tokens_per_second']:,.0f} tok/s"
    return Standing(last["step"], settings.train.steps, note)


def _evaluate_standing(run: Run, name: str) -> Standing:
    journal = run.evaluation_journal(name)
    # The first line says what the others belong to.
    done = max(0, journal.read_bytes().count(b"\n") - 1) if journal.is_file() else 0
    return Standing(done, read_json(run.prepared)["total"]["held_out"], "held-out prompts")


def _last_line(path: Path) -> dict[str, Any] | None:
    """The last whole line of a JSONL file that another process appends to."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().split(b"\n")
    for line in reversed(lines):
        try:
            content: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        return content
    return None
