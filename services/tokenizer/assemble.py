"""One chunk of answers becomes samples: prompt ids and generated ids, as they were, with a mask of 0s and 1s.

What the template supplied before the reply, such as Qwen3.6's `<think>\\n`, is part of the prompt's ids and so never
supervised; the end-of-turn token is the last generated id and so is.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from services.chunks import find_chunk
from services.errors import UserError
from services.files import publish, publish_json, read_json
from services.ledger import check_balance
from services.records import PROVENANCE_SCHEMA, SAMPLE_SCHEMA, read_prompt_rows
from services.runs import Run, check_same_tokenizer
from services.sample_rows import RowFaultError, examine
from services.settings import AssembleSettings, Settings
from services.target import model_fingerprint, vocabulary_size

# Rows are written in batches that 32-bit list offsets hold with ease.
TOKENS_A_BATCH = 2**24

log = structlog.get_logger()

TokenIds = npt.NDArray[np.int32]


@dataclass
class ChunkCounts:
    """What became of a chunk's completions.

    `completions` = `completed` + `rejected` + `failed`, and `completed` = `samples` + `dropped`. `truncated` are the
    samples whose answer reached the token limit, so that they end without an end-of-turn token; `shortened` those
    whose prompt lost its beginning.
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
    shortened: int = 0
    tokens: int = 0
    supervised_tokens: int = 0


class TokenLists(NamedTuple):
    """Lists of token ids, end to end: list i is `values[ends[i] - lengths[i] : ends[i]]`."""

    values: TokenIds
    lengths: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    def last(self, row: int, count: int) -> TokenIds:
        """The last `count` ids of a row."""
        end = int(self.ends[row])
        return self.values[end - count : end]


class Kept(NamedTuple):
    """A sample to be: a row of the prompts and one of the completions, and how many ids of each it takes."""

    prompt: int
    completion: int
    prompt_tokens: int
    generated_tokens: int


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
    prepared = read_json(run.prepared)
    check_same_tokenizer(run, settings.target.path, prepared["tokenizer"])
    prompts = read_prompt_rows(run.prompts(chunk.source), chunk.first, chunk.count, ["prompt_id", "input_ids"])
    completions = pq.read_table(path, columns=["prompt_id", "status", "finish_reason", "output_ids"])
    _check_prompts(path, prompts, completions)
    counts = ChunkCounts(chunk.chunk, chunk.source)
    kept = choose(prompts, completions, settings.assemble, counts)
    samples = join(prompts, completions, kept)
    _check_samples(path, samples, prompts, kept, vocabulary_size(settings.target.path))
    domain = next(source.domain for source in settings.sources if source.name == chunk.source)
    origin = {
        "source": chunk.source,
        "domain": domain,
        "thinking": prepared.get("thinking"),
        "model": model_fingerprint(settings.target.path),
        "template": prepared["template"],
    }
    provenance = _provenance(prompts, completions, kept, origin)
    publish(run.samples(chunk_name), lambda temporary: _write(temporary, SAMPLE_SCHEMA, samples))
    publish(run.provenance(chunk_name), lambda temporary: _write(temporary, PROVENANCE_SCHEMA, [provenance]))
    if publish_json(run.assembled(chunk_name), vars(counts)):
        log.info("assembled", run=run.name, chunk=chunk_name, samples=counts.samples, tokens=counts.tokens)


def choose(prompts: pa.Table, completions: pa.Table, settings: AssembleSettings, counts: ChunkCounts) -> list[Kept]:
    """Which completions become samples, in the order of the prompts; `counts` gets the account of all of them."""
    row_of = {name: row for row, name in enumerate(completions["prompt_id"].to_pylist())}
    statuses, finish_reasons = (completions[name].to_pylist() for name in ("status", "finish_reason"))
    prompt_tokens, generated_tokens = _lengths(prompts["input_ids"]), _lengths(completions["output_ids"])
    counts.completions = len(statuses)
    kept = []
    for prompt, name in enumerate(prompts["prompt_id"].to_pylist()):
        completion = row_of[name]
        if statuses[completion] == "rejected":
            counts.rejected += 1
            continue
        if statuses[completion] == "failed":
            counts.failed += 1
            continue
        counts.completed += 1
        generated = int(generated_tokens[completion])
        room = settings.max_length - generated
        asked = int(prompt_tokens[prompt])
        if not generated:
            counts.dropped["no_supervised_token"] += 1
        elif asked > room and (settings.over_length == "drop" or room < 1):
            counts.dropped["over_length"] += 1
        else:
            kept.append(Kept(prompt, completion, min(asked, room), generated))
            counts.shortened += asked > room
            counts.truncated += finish_reasons[completion] == "length"
    counts.samples = len(kept)
    counts.tokens = sum(sample.prompt_tokens + sample.generated_tokens for sample in kept)
    counts.supervised_tokens = sum(sample.generated_tokens for sample in kept)
    statuses_counted = {"completed": counts.completed, "rejected": counts.rejected, "failed": counts.failed}
    check_balance(f"chunk {counts.chunk}", counts.completions, statuses_counted)
    check_balance(f"chunk {counts.chunk}", counts.completed, {"samples": counts.samples, **counts.dropped})
    return kept


def join(prompts: pa.Table, completions: pa.Table, kept: list[Kept]) -> list[pa.RecordBatch]:
    """Samples of `SAMPLE_SCHEMA`: the prompt's last ids with mask 0, then the generated ids with mask 1."""
    asked, generated = _token_lists(prompts["input_ids"]), _token_lists(completions["output_ids"])
    batches = []
    begin = tokens = 0
    for row, sample in enumerate(kept):
        tokens += sample.prompt_tokens + sample.generated_tokens
        if tokens >= TOKENS_A_BATCH or row + 1 == len(kept):
            batches.append(_join_batch(asked, generated, kept[begin : row + 1]))
            begin, tokens = row + 1, 0
    return batches


def _join_batch(asked: TokenLists, generated: TokenLists, kept: list[Kept]) -> pa.RecordBatch:
    lengths = np.array([sample.prompt_tokens + sample.generated_tokens for sample in kept], dtype=np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids = np.empty(offsets[-1], dtype=np.int32)
    mask = np.zeros(offsets[-1], dtype=np.int8)
    for begin, end, sample in zip(offsets[:-1].tolist(), offsets[1:].tolist(), kept, strict=True):
        reply = begin + sample.prompt_tokens
        ids[begin:reply] = asked.last(sample.prompt, sample.prompt_tokens)
        ids[reply:end] = generated.last(sample.completion, sample.generated_tokens)
        mask[reply:end] = 1
    columns = [pa.ListArray.from_arrays(offsets, values) for values in (ids, mask)]
    return pa.RecordBatch.from_arrays([*columns, pa.array(lengths)], schema=SAMPLE_SCHEMA)


def _token_lists(column: pa.ChunkedArray) -> TokenLists:
    array = column.combine_chunks()
    lengths = _lengths(column)
    return TokenLists(array.flatten().to_numpy(), lengths, np.cumsum(lengths))


def _lengths(column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    lengths: npt.NDArray[np.int64] = column.combine_chunks().value_lengths().to_numpy().astype(np.int64)
    return lengths


def _check_prompts(path: Path, prompts: pa.Table, completions: pa.Table) -> None:
    asked = set(prompts["prompt_id"].to_pylist())
    answered = Counter(completions["prompt_id"].to_pylist())
    if strange := answered.keys() - asked:
        raise UserError(f"{path}: prompt {min(strange)} is not of this chunk; the run's files disagree")
    if missing := asked - answered.keys():
        raise UserError(f"{path}: {len(missing)} prompts of the chunk have no answer; the run's files disagree")
    if answered.total() > len(asked):
        raise UserError(f"{path}: prompt {answered.most_common(1)[0][0]} is answered twice; the run's files disagree")


def _check_samples(
    path: Path, samples: list[pa.RecordBatch], prompts: pa.Table, kept: list[Kept], vocabulary: int
) -> None:
    first = 0
    for batch in samples:
        try:
            examine(batch, vocabulary)
        except RowFaultError as fault:
            prompt = prompts["prompt_id"][kept[first + fault.row].prompt].as_py()
            raise UserError(
                f"{path}: the sample of prompt {prompt}: {fault}; the answers come from another model than target.path"
            ) from fault
        first += batch.num_rows


def _write(path: Path, schema: pa.Schema, batches: list[pa.RecordBatch]) -> None:
    with pa.ipc.new_stream(str(path), schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _provenance(
    prompts: pa.Table, completions: pa.Table, kept: list[Kept], origin: dict[str, str | bool | None]
) -> pa.RecordBatch:
    """One row of `PROVENANCE_SCHEMA` a sample; `origin` is what all samples of the chunk have in common."""
    prompt_rows = pa.array([sample.prompt for sample in kept], pa.int64())
    completion_rows = pa.array([sample.completion for sample in kept], pa.int64())
    columns = {
        **{name: [value] * len(kept) for name, value in origin.items()},
        "prompt_id": prompts["prompt_id"].take(prompt_rows).to_pylist(),
        "finish_reason": completions["finish_reason"].take(completion_rows).to_pylist(),
        "tokens": [sample.prompt_tokens + sample.generated_tokens for sample in kept],
        "supervised_tokens": [sample.generated_tokens for sample in kept],
    }
    arrays = [pa.array(columns[field.name], field.type) for field in PROVENANCE_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=PROVENANCE_SCHEMA)
