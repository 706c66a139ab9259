"""What each stage's command does: enqueue what is missing, and wait until its files are there."""

import json
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from services.control import submitted_chunks
from services.errors import UserError
from services.files import read_json
from services.ledger import GenerateCounter, count_assembled, total
from services.queue_names import Stage
from services.queues import enqueue, job_id, job_state
from services.runs import Run
from services.settings import Settings
from services.stack.reconcile import check_not_paused, reconcile
from services.stack.wait import Operator, Standing, Standings, Work, carry_out, wait_for

Evaluated = Literal["before", "after"]
EVALUATED: tuple[Evaluated, ...] = ("before", "after")

PREPARE_TIMEOUT = 12 * 3600
PREVIEW_TIMEOUT = 600
MERGE_TIMEOUT = 6 * 3600
EXPORT_TIMEOUT = 3600
RATE_WINDOW_SECONDS = 20.0
TAIL_BYTES = 65_536


def prepare(run: Run, settings: Settings, operator: Operator, wait: bool = True) -> None:
    """Prompts from every source."""
    work = _single(
        "prepare",
        "prepare",
        "prepare",
        run,
        run.prepared,
        PREPARE_TIMEOUT,
        lambda: prepare_standing(run, settings),
    )
    carry_out(work, operator, wait)


def preview(run: Run, count: int, operator: Operator) -> dict[str, list[str]]:
    """The first `count` prompts of every source, as text."""
    result = run.preview(count)
    names = (str(count),)
    carry_out(
        _single("preview", "prepare", "preview", run, result, PREVIEW_TIMEOUT, names=names, unit="preview"), operator
    )
    return read_json(result)


def submit(run: Run, settings: Settings, operator: Operator, wait: bool = True) -> None:
    """Answers to every prompt that was submitted, and samples from them; enqueues what the files lack.

    Raises:
        UserError: the run is not prepared, or paused.
    """
    if not run.prepared.is_file():
        raise UserError(f"run {run.name} is not prepared; begin with `dflash-stack prepare {run.name}`")
    reconcile(run, settings, operator.connection)
    if not wait:
        return
    chunks = [chunk.chunk for chunk in submitted_chunks(run)]
    wait_for(
        Work(
            "generate",
            "generate",
            "generate",
            lambda: [(run.name, chunk) for chunk in chunks if not run.summary(chunk).is_file()],
            settings.generate.job_timeout,
            generate_standing(run),
            lambda: check_not_paused(run),
        ),
        operator,
    )
    wait_for(
        Work(
            "assemble",
            "assemble",
            "assemble",
            lambda: [(run.name, chunk) for chunk in chunks if not run.assembled(chunk).is_file()],
            settings.assemble.job_timeout,
            assemble_standing(run),
        ),
        operator,
    )


def merge(run: Run, operator: Operator, wait: bool = True) -> None:
    """One dataset of the existing corpus and the run's samples."""
    carry_out(_single("merge", "merge", "merge", run, run.merged, MERGE_TIMEOUT, unit="dataset"), operator, wait)


def merge_into(
    dataset: Path, base: Path | None, runs: list[Run], operator: Operator, verify: bool, wait: bool = True
) -> None:
    """A dataset of its own, of a base and of what runs add to it."""
    inputs = (str(base.absolute()) if base else "", "verify" if verify else "")
    names = (str(dataset.absolute()), *inputs, *(run.name for run in runs))
    enqueue("merge", operator.connection, "merge_into", *names, job_timeout=MERGE_TIMEOUT)
    job = job_id("merge", "merge_into", *names)

    def missing() -> list[tuple[str, ...]]:
        # Its folder may have been there before: only the job knows whether it is of these inputs.
        return [] if job_state(job, operator.connection).state == "finished" else [names]

    def standing() -> Standing:
        return Standing(int((dataset / "merge.json").is_file()), 1, "dataset")

    if wait:
        wait_for(Work("merge", "merge", "merge_into", missing, MERGE_TIMEOUT, standing), operator)


def train(run: Run, settings: Settings, operator: Operator, wait: bool = True) -> None:
    """A drafter, trained to the configured step; goes on from the newest checkpoint.

    Raises:
        UserError: there is no dataset.
    """
    chosen = settings.train.dataset
    if chosen is not None and not (chosen / "state.json").is_file():
        raise UserError(f"train.dataset {chosen}: no dataset here; make it with `dflash-stack merge ... --to {chosen}`")
    if chosen is None and not run.merged.is_file():
        raise UserError(f"run {run.name} has no merged dataset; first `dflash-stack merge {run.name}`")
    last = run.checkpoint(settings.train.steps)
    timeout = settings.train.job_timeout
    work = _single("train", "train", "train", run, last, timeout, lambda: _train_standing(run, settings))
    carry_out(work, operator, wait)


def evaluate(run: Run, settings: Settings, which: Evaluated, operator: Operator, wait: bool = True) -> None:
    """Acceptance on held-out prompts, of the untrained drafter (before) or of the trained one (after)."""
    result, timeout = run.evaluation(which), settings.evaluate.job_timeout
    standing = partial(_evaluate_standing, run, which)
    carry_out(_single(which, "train", "evaluate", run, result, timeout, standing, names=(which,)), operator, wait)


def export(run: Run, operator: Operator, wait: bool = True) -> None:
    """The trained drafter in the layout that SGLang loads."""
    carry_out(_single("export", "train", "export", run, run.export, EXPORT_TIMEOUT, unit="drafter"), operator, wait)


def _single(
    what: str,
    stage: Stage,
    job: str,
    run: Run,
    result: Path,
    job_timeout: int,
    standing: Callable[[], Standings] | None = None,
    names: tuple[str, ...] = (),
    unit: str = "",
) -> Work:
    """A stage of one job, whose result is a file or folder of the run."""

    def missing() -> list[tuple[str, ...]]:
        return [] if result.exists() else [(run.name, *names)]

    return Work(what, stage, job, missing, job_timeout, standing or (lambda: Standing(int(result.exists()), 1, unit)))


def prepare_standing(run: Run, settings: Settings) -> dict[str, Standing]:
    """By source that is begun, percent of the work: half is reading all rows, half is rendering the prompts wanted."""
    if not run.prepare_progress.is_file():
        return {}
    progress = read_json(run.prepare_progress)
    begun = [source.name for source in settings.sources if progress[source.name]["read"]]
    return {name: _source_standing(progress[name]) for name in begun}


def _source_standing(progress: dict[str, float]) -> Standing:
    done = int(50 * (progress["scanned"] + progress["drawn"]))
    return Standing(done, 100, f"% {progress['read']:,} rows, {progress['kept']:,} prompts")


def generate_standing(run: Run) -> Callable[[], Standing]:
    """Prompts finished of those that are submitted now, with the token rate of the last seconds."""
    seen: deque[tuple[float, int]] = deque()
    counter = GenerateCounter(run)
    submitted = {chunk.chunk for chunk in submitted_chunks(run)}

    def standing() -> Standing:
        counts = total(counter.count(submitted).values())
        now = time.monotonic()
        seen.append((now, counts.output_tokens))
        while now - seen[0][0] > RATE_WINDOW_SECONDS:
            seen.popleft()
        span = now - seen[0][0]
        rate = f"  {(counts.output_tokens - seen[0][1]) / span:,.0f} tok/s" if span > 0 else ""
        done = counts.finished + counts.in_journal
        return Standing(done, counts.prompts, f"prompts  {counts.output_tokens:,} tokens{rate}")

    return standing


def assemble_standing(run: Run) -> Callable[[], Standing]:
    """Chunks assembled of those that are submitted now."""
    known: dict[str, dict[str, Any]] = {}
    submitted = {chunk.chunk for chunk in submitted_chunks(run)}

    def standing() -> Standing:
        counts = [count for chunk, count in count_assembled(run, known).items() if chunk in submitted]
        samples = sum(count["samples"] for count in counts)
        return Standing(len(counts), len(submitted), f"chunks  {samples:,} samples")

    return standing


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
