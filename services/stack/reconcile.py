"""What a run's files lack is put into the queues again, whatever Redis has lost or still believes."""

import time
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq
from redis import Redis

from services.chunks import Chunk, plan_chunks
from services.control import read_control, submitted_chunks
from services.errors import UserError
from services.files import read_json, remove_unlocked
from services.ledger import check_balance
from services.queue_names import Stage
from services.queues import enqueue_missing
from services.records import summarize
from services.runs import Run
from services.settings import Settings

# A writer that was killed leaves its unfinished file. A live one has locked it, or (the trainer) needs seconds.
ABANDONED_SECONDS = 3600


@dataclass(frozen=True)
class Reconciled:
    """What was found and done, in chunks; `submitted` = `assembled` + `to_assemble` + `begun` + `untouched`."""

    submitted: int
    assembled: int
    to_assemble: int
    begun: int
    untouched: int
    enqueued: dict[Stage, int]
    removed: int
    damaged: list[str] = field(default_factory=list)


def check_not_paused(run: Run) -> None:
    """Raises UserError for a paused run."""
    if reason := read_control(run).paused:
        raise UserError(f"run {run.name} is paused: {reason}; go on with `dflash-stack resume {run.name}`")


def reconcile(run: Run, settings: Settings, connection: Redis, verify: bool = False) -> Reconciled:
    """Compare prompts, journals, chunks and queues, and enqueue whatever has neither a result nor a job.

    Args:
        verify: also compare each published chunk with its checksum and its prompts, which reads them all.

    Raises:
        UserError: the run is not prepared or paused, or its chunks do not cover its prompts.
    """
    check_not_paused(run)
    planned = plan_chunks(run, settings)
    for source in {chunk.source for chunk in planned}:
        prompts = pq.read_metadata(run.prompts(source)).num_rows
        in_chunks = sum(chunk.count for chunk in planned if chunk.source == source)
        check_balance(f"prompts of {source}", prompts, {f"in {run.chunks}": in_chunks})
    chunks = submitted_chunks(run)
    open_chunks = [chunk for chunk in chunks if not run.summary(chunk.chunk).is_file()]
    done = [chunk for chunk in chunks if run.summary(chunk.chunk).is_file()]
    to_assemble = [chunk for chunk in done if not run.assembled(chunk.chunk).is_file()]
    begun = sum(run.journal(chunk.chunk).is_file() for chunk in open_chunks)
    work: tuple[tuple[Stage, list[Chunk], int], ...] = (
        ("generate", open_chunks, settings.generate.job_timeout),
        ("assemble", to_assemble, settings.assemble.job_timeout),
    )
    enqueued = {
        stage: len(
            enqueue_missing(
                stage, connection, stage, [(run.name, chunk.chunk) for chunk in of_stage], job_timeout=timeout
            )
        )
        for stage, of_stage, timeout in work
    }
    return Reconciled(
        submitted=len(chunks),
        assembled=len(done) - len(to_assemble),
        to_assemble=len(to_assemble),
        begun=begun,
        untouched=len(open_chunks) - begun,
        enqueued=enqueued,
        removed=_remove_abandoned(run),
        damaged=[fault for chunk in done if verify for fault in _faults(run, chunk)],
    )


def _remove_abandoned(run: Run) -> int:
    found = [path for pattern in (".*.tmp", "*/.*.tmp") for path in run.root.glob(pattern)]
    return sum(remove_unlocked(path) for path in found if _age(path) > ABANDONED_SECONDS)


def _age(path: Path) -> float:
    """Seconds; 0 for a file that is gone, as one is when its writer publishes it meanwhile."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _faults(run: Run, chunk: Chunk) -> list[str]:
    """What is wrong with a published chunk, in one line each."""
    path = run.completions(chunk.chunk)
    if not path.is_file():
        return [f"{path} is gone, though its summary is there"]
    if summarize(path)["sha256"] != read_json(run.summary(chunk.chunk))["sha256"]:
        return [f"{path} is not what was published: its checksum differs"]
    answered = pq.read_table(path, columns=["prompt_id"])["prompt_id"].to_pylist()
    prompts = _prompt_ids(run.prompts(chunk.source), chunk)
    return [] if answered == prompts else [f"{path} does not hold the chunk's prompts, in their order"]


def _prompt_ids(path: Path, chunk: Chunk) -> list[str]:
    table = pq.read_table(path, columns=["prompt_id"]).slice(chunk.first, chunk.count)
    ids: list[str] = table["prompt_id"].to_pylist()
    return ids
