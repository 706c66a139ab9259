"""One chunk of answers becomes samples: prompt ids and generated ids, as they were, with a mask of 0s and 1s."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from services import chat
from services.errors import UserError
from services.ledger import check_balance, find_chunk
from services.records import (
    PROVENANCE_SCHEMA,
    SAMPLE_SCHEMA,
    Chunk,
    Completion,
    Prompt,
    read_completions,
    read_prompts,
)
from services.runs import Run, publish, publish_json, read_json
from services.settings import Settings
from services.target import vocabulary_size

log = structlog.get_logger()


@dataclass
class ChunkCounts:
    """What became of a chunk's completions.

    `completions` = `completed` + `rejected` + `failed`, and `completed` = `samples` + `dropped`. `truncated` are the
    samples whose answer reached the token limit, so that they end without an end-of-turn token.
    """

    chunk: str
    source: str
    completions: int = 0
    completed: int = 0
    rejected: int = 0
    failed: int = 0
    samples: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    truncated: int = 0
    tokens: int = 0
    supervised_tokens: int = 0


@dataclass(frozen=True)
class Sample:
    """`input_ids` are the prompt's ids, then `supervised` generated ones."""

    prompt_id: str
    input_ids: list[int]
    supervised: int


def assemble_chunk(run: Run, settings: Settings, chunk_name: str) -> None:
    """Publish samples and provenance of one chunk, and its counts last.

    Raises:
        UserError: the chunk has no completions, they do not belong to its prompts, an id is outside the target's
            vocabulary, or the target's tokenizer is not the one that the prompts were made with.
    """
    if run.assembled(chunk_name).is_file():
        return
    chunk = find_chunk(run, chunk_name)
    path = run.completions(chunk_name)
    if not path.is_file():
        raise UserError(f"chunk {chunk_name} of run {run.name} has no {path}; it is not generated yet")
    vocabulary = _checked_vocabulary(run, settings.target.path)
    prompts = read_prompts(run.prompts(chunk.source), chunk.first, chunk.count)
    completions = read_completions(path)
    _check_prompts(path, prompts, completions)
    samples, counts = make_samples(chunk, prompts, completions, settings.assemble.max_length)
    _check_ids(path, samples, vocabulary)
    publish(run.samples(chunk_name), lambda temporary: _write_samples(temporary, samples))
    publish(run.provenance(chunk_name), lambda temporary: _write_provenance(temporary, samples, chunk.source))
    if publish_json(run.assembled(chunk_name), vars(counts)):
        log.info("assembled", run=run.name, chunk=chunk_name, samples=counts.samples, tokens=counts.tokens)


def make_samples(
    chunk: Chunk, prompts: Sequence[Prompt], completions: Sequence[Completion], max_length: int
) -> tuple[list[Sample], ChunkCounts]:
    """Samples in the order of the prompts, and the account of all completions."""
    by_prompt = {completion.prompt_id: completion for completion in completions}
    counts = ChunkCounts(chunk.chunk, chunk.source, completions=len(completions))
    samples = []
    for prompt in prompts:
        completion = by_prompt[prompt.prompt_id]
        if completion.status == "rejected":
            counts.rejected += 1
            continue
        if completion.status == "failed":
            counts.failed += 1
            continue
        counts.completed += 1
        input_ids = prompt.input_ids + completion.output_ids
        if not completion.output_ids:
            counts.dropped["no_supervised_token"] += 1
        elif len(input_ids) > max_length:
            counts.dropped["over_length"] += 1
        else:
            samples.append(Sample(prompt.prompt_id, input_ids, len(completion.output_ids)))
            counts.truncated += completion.finish_reason == "length"
    counts.samples = len(samples)
    counts.tokens = sum(len(sample.input_ids) for sample in samples)
    counts.supervised_tokens = sum(sample.supervised for sample in samples)
    statuses = {"completed": counts.completed, "rejected": counts.rejected, "failed": counts.failed}
    check_balance(f"chunk {chunk.chunk}", counts.completions, statuses)
    check_balance(f"chunk {chunk.chunk}", counts.completed, {"samples": counts.samples, **counts.dropped})
    return samples, counts


def _checked_vocabulary(run: Run, target: Path) -> int:
    prepared = read_json(run.prepared)
    if chat.tokenizer_fingerprint(target) != prepared["tokenizer"]:
        raise UserError(
            f"target model {target}: its tokenizer is not the one that run {run.name} was prepared with; "
            "put that model back, or begin a new run"
        )
    return vocabulary_size(target)


def _check_prompts(path: Path, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> None:
    asked = {prompt.prompt_id for prompt in prompts}
    answered = Counter(completion.prompt_id for completion in completions)
    if strange := answered.keys() - asked:
        raise UserError(f"{path}: prompt {min(strange)} is not of this chunk; the run's files disagree")
    if missing := asked - answered.keys():
        raise UserError(f"{path}: {len(missing)} prompts of the chunk have no answer; the run's files disagree")
    if answered.total() > len(asked):
        raise UserError(f"{path}: prompt {answered.most_common(1)[0][0]} is answered twice; the run's files disagree")


def _check_ids(path: Path, samples: Sequence[Sample], vocabulary: int) -> None:
    for sample in samples:
        if min(sample.input_ids) < 0 or max(sample.input_ids) >= vocabulary:
            raise UserError(
                f"{path}: the sample of prompt {sample.prompt_id} has an id outside the vocabulary of {vocabulary}; "
                "the answers come from another model than target.path"
            )


def _write_samples(path: Path, samples: Sequence[Sample]) -> None:
    rows = [
        {
            "input_ids": sample.input_ids,
            "loss_mask": [0] * (len(sample.input_ids) - sample.supervised) + [1] * sample.supervised,
            "seq_len": len(sample.input_ids),
        }
        for sample in samples
    ]
    with pa.ipc.new_stream(str(path), SAMPLE_SCHEMA) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA))


def _write_provenance(path: Path, samples: Sequence[Sample], source: str) -> None:
    rows = [
        {
            "prompt_id": sample.prompt_id,
            "source": source,
            "tokens": len(sample.input_ids),
            "supervised_tokens": sample.supervised,
        }
        for sample in samples
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=PROVENANCE_SCHEMA), path, compression="zstd")
