"""The records that the stages hand on, with their Arrow schemas."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

TOKEN_IDS = pa.list_(pa.int32())
NAME = pa.dictionary(pa.int32(), pa.string())

# A chunk's prompts are read by row groups, so that a source is not read as often as it has chunks.
ROW_GROUP_SIZE = 512
ORIGIN = "dflash.origin"

# Conversations and tools differ in their fields from row to row, which no Arrow struct holds without loss
# (datasets#7869), so they are kept as JSON text.
PROMPT_SCHEMA = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("messages", pa.string(), nullable=False),
        pa.field("tools", pa.string()),
        pa.field("input_ids", TOKEN_IDS, nullable=False),
    ]
)

COMPLETION_SCHEMA = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("reason", pa.string()),
        pa.field("finish_reason", pa.string()),
        pa.field("output_ids", TOKEN_IDS, nullable=False),
        pa.field("attempts", pa.int32(), nullable=False),
        pa.field("seconds", pa.float32(), nullable=False),
        pa.field("server", pa.string()),
        pa.field("detail", pa.string()),
    ]
)

SAMPLE_SCHEMA = pa.schema(
    [
        pa.field("input_ids", TOKEN_IDS),
        pa.field("loss_mask", pa.list_(pa.int8())),
        pa.field("seq_len", pa.int32()),
    ]
)

# One row a sample. `supervised_tokens` are the generated ones; `model` and `template` are fingerprints.
PROVENANCE_SCHEMA = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("source", NAME, nullable=False),
        pa.field("domain", NAME, nullable=False),
        pa.field("thinking", pa.bool_()),
        pa.field("finish_reason", NAME),
        pa.field("tokens", pa.int32(), nullable=False),
        pa.field("supervised_tokens", pa.int32(), nullable=False),
        pa.field("model", NAME, nullable=False),
        pa.field("template", NAME, nullable=False),
    ]
)


@dataclass(frozen=True)
class Prompt:
    """A conversation that awaits an answer, rendered and tokenized once with the target's own template."""

    prompt_id: str
    source: str
    messages: str
    tools: str | None
    input_ids: list[int]


@dataclass(frozen=True)
class Completion:
    """What became of one prompt: an answer, a rejection with its reason, or a failure with its error.

    `output_ids` holds the generated ids as the target emitted them, the end-of-turn token included.
    `reason` is one of few words, to be counted by; `detail` is what the server said, shortened.
    """

    prompt_id: str
    status: Literal["completed", "rejected", "failed"]
    reason: str | None
    finish_reason: str | None
    output_ids: list[int]
    attempts: int
    seconds: float
    server: str | None
    detail: str | None = None


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> None:
    """Write prompts as they come, a row group at a time."""
    coming = iter(prompts)
    with pq.ParquetWriter(path, PROMPT_SCHEMA, compression="zstd") as writer:
        while group := list(islice(coming, ROW_GROUP_SIZE)):
            columns = {name: [getattr(prompt, name) for prompt in group] for name in PROMPT_SCHEMA.names}
            writer.write_table(pa.Table.from_pydict(columns, schema=PROMPT_SCHEMA))


def read_prompts(path: Path, first: int = 0, count: int | None = None) -> list[Prompt]:
    """`count` prompts from row `first` on (all of the rest by default)."""
    return [Prompt(**row) for row in read_prompt_rows(path, first, count, PROMPT_SCHEMA.names).to_pylist()]


def read_prompt_rows(path: Path, first: int, count: int | None, columns: Sequence[str]) -> pa.Table:
    """The same as a table of some columns; only the row groups that hold those rows are read."""
    with pq.ParquetFile(path) as file:
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        begins = [0, *accumulate(sizes)]
        last = begins[-1] if count is None else first + count
        groups = [group for group, size in enumerate(sizes) if begins[group] < last and begins[group] + size > first]
        table = file.read_row_groups(groups, columns=list(columns))
    return table.slice(first - (begins[groups[0]] if groups else 0), count)


def read_prompt_texts(path: Path) -> Iterator[list[str]]:
    """The JSON texts of all prompts' messages, some at a time."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=ROW_GROUP_SIZE, columns=["messages"]):
            yield batch["messages"].to_pylist()


def write_completions(path: Path, completions: list[Completion], origin: dict[str, Any] | None = None) -> None:
    """`origin` says how they came about (sampling, model, servers); it is kept in the file's metadata."""
    _write(path, [vars(completion) for completion in completions], COMPLETION_SCHEMA, {ORIGIN: json.dumps(origin)})


def read_completions(path: Path) -> list[Completion]:
    return [Completion(**row) for row in pq.read_table(path, schema=COMPLETION_SCHEMA).to_pylist()]


def read_origin(path: Path) -> dict[str, Any] | None:
    """What `write_completions` was told of how the completions came about."""
    metadata = pq.read_schema(path).metadata or {}
    origin: dict[str, Any] | None = json.loads(metadata.get(ORIGIN.encode(), b"null"))
    return origin


def summarize(path: Path) -> dict[str, Any]:
    """Counts, size, checksum and origin of a chunk's published completions, read from the file itself."""
    table = pq.read_table(path, columns=["status", "reason", "output_ids", "attempts"])
    lengths = pc.list_value_length(table["output_ids"]).to_pylist()
    rows = list(zip(table["status"].to_pylist(), table["reason"].to_pylist(), lengths, strict=True))
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "completed": sum(status == "completed" for status, _, _ in rows),
        "rejected": Counter(reason for status, reason, _ in rows if status == "rejected"),
        "failed": Counter(reason for status, reason, _ in rows if status == "failed"),
        "output_tokens": sum(length for status, _, length in rows if status == "completed"),
        "attempts": sum(table["attempts"].to_pylist()),
        "bytes": path.stat().st_size,
        "sha256": checksum,
        "origin": read_origin(path),
    }


def _write(path: Path, rows: list[dict[str, Any]], schema: pa.Schema, metadata: dict[str, str] | None = None) -> None:
    table = pa.Table.from_pylist(rows, schema=schema.with_metadata(metadata))
    pq.write_table(table, path, compression="zstd", row_group_size=ROW_GROUP_SIZE)
