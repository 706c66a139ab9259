"""The samples that runs bring into a merge: read chunk by chunk, checked, and those that are not new left out."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from services.chunks import Chunk, read_chunks
from services.dataset_folder import END_OF_STREAM, describe
from services.errors import UserError
from services.files import read_json
from services.ledger import check_balance
from services.records import PROVENANCE_SCHEMA, SAMPLE_SCHEMA
from services.runs import Run
from services.sample_rows import RowFaultError, SampleRows, Totals, examine
from services.settings import MergeSettings
from services.tokenizer.content_index import Digests, SeenDigests, ShardIndex, are_known, digest_rows

# Chunks are small; they are handled in groups of about this size.
ROWS_A_GROUP = 2**14
TOKENS_A_GROUP = 2**20


class AssembledChunk(NamedTuple):
    """A chunk with what `assemble` counted of it."""

    chunk: Chunk
    samples: int
    tokens: int


class Group(NamedTuple):
    """Samples of one source of a run, with their provenance, row by row."""

    samples: pa.RecordBatch
    provenance: pa.Table


class NewRows(NamedTuple):
    """What of a group is new: samples in the dataset's own types, their provenance and digests."""

    samples: pa.Table
    provenance: pa.Table
    digests: Digests
    totals: Totals


@dataclass
class Added:
    """What one source of one run adds: `assembled` = `totals.samples` + `dropped`."""

    run: str
    source: str
    domain: str
    totals: Totals = field(default_factory=Totals)
    assembled: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass
class Selection:
    """Decides which samples are new, and keeps the account.

    A sample is dropped, for the first of these reasons that holds, as `near_empty`, `over_long`, `in_base` or
    `duplicate` (of another new one).
    """

    schema: pa.Schema
    indexes: Sequence[ShardIndex]
    settings: MergeSettings
    vocabulary: int | None
    seen: SeenDigests = field(default_factory=SeenDigests)
    added: dict[tuple[str, str], Added] = field(default_factory=dict)

    def take(self, run: Run, source: str, group: Group) -> NewRows | None:
        """The new rows of a group; None when there is none."""
        rows = self._examined(run, group)
        digests = digest_rows(rows)
        domain = group.provenance["domain"][0].as_py()
        added = self.added.setdefault((run.name, source), Added(run.name, source, domain))
        kept = self._kept(rows, digests, added)
        added.assembled += len(digests)
        if not len(kept):
            return None
        totals = Totals()
        totals.add(rows.tokens[kept], rows.supervised[kept])
        added.totals.include(totals)
        samples, provenance = group
        if len(kept) < len(digests):
            taken = pa.array(kept)
            samples, provenance = samples.take(taken), provenance.take(taken)
        return NewRows(self._cast(run, samples), provenance, digests[kept], totals)

    def _examined(self, run: Run, group: Group) -> SampleRows:
        try:
            return examine(group.samples, self.vocabulary)
        except RowFaultError as fault:
            prompt = group.provenance["prompt_id"][fault.row].as_py()
            raise UserError(
                f"run {run.name}: the sample of prompt {prompt}: {fault}; remove the samples of its chunk and assemble "
                f"them again with `dflash-stack submit {run.name}`"
            ) from fault

    def _kept(self, rows: SampleRows, digests: Digests, added: Added) -> npt.NDArray[np.int64]:
        near_empty = rows.supervised < self.settings.min_supervised_tokens
        longest = self.settings.max_length
        over_long = (rows.tokens > longest if longest else np.zeros_like(near_empty)) & ~near_empty
        in_base = are_known(digests, self.indexes) & ~near_empty & ~over_long
        reasons = {"near_empty": near_empty, "over_long": over_long, "in_base": in_base}
        added.dropped.update({reason: int(rows.sum()) for reason, rows in reasons.items() if rows.any()})
        candidates = np.flatnonzero(~(near_empty | over_long | in_base))
        kept = candidates[self.seen.add(digests[candidates])]
        if len(kept) < len(candidates):
            added.dropped["duplicate"] += len(candidates) - len(kept)
        return kept

    def _cast(self, run: Run, samples: pa.RecordBatch) -> pa.Table:
        try:
            columns = [samples.column(field.name).cast(field.type) for field in self.schema]
        except pa.ArrowInvalid as error:
            raise UserError(
                f"run {run.name}: its samples do not fit the corpus' columns {describe(self.schema)} ({error}); "
                "save the corpus anew with wider integers"
            ) from error
        return pa.Table.from_arrays(columns, schema=self.schema)


def assembled_chunks(run: Run) -> list[AssembledChunk]:
    """All of a run's chunks.

    Raises:
        UserError: the run has none, some are not assembled, or all of them together have no sample.
    """
    chunks = read_chunks(run)
    if not chunks:
        raise UserError(f"run {run.name} has no chunks; enqueue with `dflash-stack submit`")
    assembled, missing = [], []
    for chunk in chunks:
        try:
            counts = read_json(run.assembled(chunk.chunk))
            assembled.append(AssembledChunk(chunk, counts["samples"], counts["tokens"]))
        except FileNotFoundError:
            missing.append(chunk.chunk)
    if missing:
        raise UserError(
            f"run {run.name}: {len(missing)} of {len(chunks)} chunks are not assembled ({missing[0]} is the first); "
            "wait for them (`dflash-stack status`), or enqueue them again with `dflash-stack submit`"
        )
    if not any(chunk.samples for chunk in assembled):
        raise UserError(f"run {run.name} has not one sample to merge; `dflash-stack status` tells what became of them")
    return assembled


def read_groups(run: Run, chunks: Iterable[AssembledChunk]) -> Iterator[tuple[str, Group]]:
    """The samples of a run with the name of their source, in the order of its chunks."""
    for source, of_source in groupby(chunks, key=lambda assembled: assembled.chunk.source):
        some: list[AssembledChunk] = []
        rows = tokens = 0
        for assembled in of_source:
            some.append(assembled)
            rows += assembled.samples
            tokens += assembled.tokens
            if rows >= ROWS_A_GROUP or tokens >= TOKENS_A_GROUP:
                yield source, _group(run, some)
                some, rows, tokens = [], 0, 0
        if rows:
            yield source, _group(run, some)


def _group(run: Run, chunks: Sequence[AssembledChunk]) -> Group:
    samples = _read(run, [(run.samples(chunk.chunk.chunk), chunk.samples) for chunk in chunks], SAMPLE_SCHEMA)
    provenance = _read(run, [(run.provenance(chunk.chunk.chunk), chunk.samples) for chunk in chunks], PROVENANCE_SCHEMA)
    return Group(samples.combine_chunks().to_batches()[0], provenance.unify_dictionaries())


def _read(run: Run, files: Sequence[tuple[Path, int]], schema: pa.Schema) -> pa.Table:
    """The rows of many small files, each with the rows that were counted in it, copied into memory.

    Files that begin with the same schema message are read as one stream: opening a stream costs more than a
    chunk's rows do.

    Raises:
        UserError: a file is damaged, of another schema, or has not the rows that were counted.
    """
    beginning = _beginning(schema)
    contents = [_content(path) for path, _ in files]
    if all(content.startswith(beginning) and content.endswith(END_OF_STREAM) for content in contents):
        bodies = (content[len(beginning) : -len(END_OF_STREAM)] for content in contents)
        joined = b"".join([beginning, *bodies, END_OF_STREAM])
        with suppress(pa.ArrowInvalid, OSError), pa.ipc.open_stream(joined) as reader:
            table: pa.Table = reader.read_all()
            if table.num_rows == sum(expected for _, expected in files):
                return table
    # One of them is damaged, or was written by another version of Arrow: one after another, so that it is named.
    parts = [_read_one(run, path, content, schema, n) for (path, n), content in zip(files, contents, strict=True)]
    return pa.Table.from_batches([batch for part in parts for batch in part], schema=schema)


@cache
def _beginning(schema: pa.Schema) -> bytes:
    """What every stream of this schema begins with."""
    sink = pa.BufferOutputStream()
    pa.ipc.new_stream(sink, schema).close()
    content: bytes = sink.getvalue().to_pybytes()
    return content.removesuffix(END_OF_STREAM)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from error


def _read_one(run: Run, path: Path, content: bytes, schema: pa.Schema, expected: int) -> list[pa.RecordBatch]:
    try:
        with pa.ipc.open_stream(content) as reader:
            batches = list(reader)
            found = reader.schema
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not found.equals(schema):
        raise UserError(
            f"{path}: columns {describe(found)}, expected {describe(schema)}; remove {path.parent} and assemble the "
            f"run again with `dflash-stack submit {run.name}`"
        )
    check_balance(f"{path}", expected, {"rows": sum(batch.num_rows for batch in batches)})
    return batches
