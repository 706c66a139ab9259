"""What every batch of samples is asked: its columns, its lengths, its supervised tokens, and its faults."""

from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from services.dataset_folder import describe, read_batches
from services.errors import UserError
from services.records import SAMPLE_SCHEMA

# No tokenizer has more; below it, id and mask fit into 32 bits together.
LARGEST_VOCABULARY = 2**30

# numpy works on them at the same time: it lets go of the interpreter's lock.
SHARDS_AT_ONCE = 2

Integers = npt.NDArray[np.integer[Any]]


@dataclass
class Totals:
    """How much a set of samples is. `lengths` counts samples by the power of two that their tokens fit in."""

    samples: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    lengths: Counter[int] = field(default_factory=Counter)

    def add(self, tokens: Integers, supervised: Integers) -> None:
        """Add rows by their counts of tokens and of supervised tokens."""
        self.samples += len(tokens)
        self.tokens += int(tokens.sum(dtype=np.int64))
        self.supervised_tokens += int(supervised.sum(dtype=np.int64))
        exponents = np.bincount(np.frexp(np.maximum(tokens - 1, 0))[1])
        self.lengths.update({1 << int(exponent): int(exponents[exponent]) for exponent in np.flatnonzero(exponents)})

    def include(self, other: "Totals") -> None:
        self.samples += other.samples
        self.tokens += other.tokens
        self.supervised_tokens += other.supervised_tokens
        self.lengths.update(other.lengths)

    def as_json(self) -> dict[str, Any]:
        counts = {"samples": self.samples, "tokens": self.tokens, "supervised_tokens": self.supervised_tokens}
        return {**counts, "lengths": {str(bound): self.lengths[bound] for bound in sorted(self.lengths)}}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        lengths = Counter({int(bound): count for bound, count in content["lengths"].items()})
        return cls(content["samples"], content["tokens"], content["supervised_tokens"], lengths)


class SampleRows(NamedTuple):
    """The rows of one batch: ids and mask end to end, where each row ends in them, and its supervised tokens."""

    ids: Integers
    mask: npt.NDArray[np.uint8]
    ends: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    supervised: npt.NDArray[np.int64]


class RowFaultError(Exception):
    """A row that is no sample: its number in the batch, and why."""

    def __init__(self, row: int, why: str) -> None:
        super().__init__(why)
        self.row = row


def check_columns(schema: pa.Schema, where: str) -> None:
    """Raises UserError when a dataset's columns are not those of a sample; integer widths may differ."""
    fits = set(schema.names) == set(SAMPLE_SCHEMA.names) and all(
        _fits(field.name, schema.field(field.name).type, field.type) for field in SAMPLE_SCHEMA
    )
    if not fits:
        missing = [name for name in SAMPLE_SCHEMA.names if name not in schema.names]
        unknown = [name for name in schema.names if name not in SAMPLE_SCHEMA.names]
        wrong = [
            f"{field.name} is {schema.field(field.name).type}"
            for field in SAMPLE_SCHEMA
            if field.name in schema.names and not _fits(field.name, schema.field(field.name).type, field.type)
        ]
        differences = [
            *(f"no column {name}" for name in missing),
            *(f"unknown column {name}" for name in unknown),
            *wrong,
        ]
        raise UserError(
            f"{where}: {', '.join(differences)}; expected {describe(SAMPLE_SCHEMA)} (integers of any width): "
            "name its columns in merge.base_columns, or save it anew with these"
        )


def examine(batch: pa.RecordBatch, vocabulary: int | None = None) -> SampleRows:
    """Take a batch apart, in time that reading it from memory takes.

    Raises:
        RowFaultError: a row's lengths disagree, it supervises nothing, its mask has another value than 0 and 1, or
            an id is negative or not below `vocabulary`.
    """
    ids_column, mask_column, seq_len = (batch.column(name) for name in SAMPLE_SCHEMA.names)
    for column in (ids_column, mask_column, seq_len):
        if column.null_count:
            raise RowFaultError(int(np.argmin(column.is_valid().to_numpy(zero_copy_only=False))), "a column is null")
    tokens, mask_lengths = _lengths(ids_column), _lengths(mask_column)
    told = integers(seq_len)
    if (differing := (tokens != mask_lengths) | (tokens != told)).any():
        row = int(np.argmax(differing))
        raise RowFaultError(
            row, f"lengths disagree: {tokens[row]} input_ids, {mask_lengths[row]} of loss_mask, seq_len {told[row]}"
        )
    ends = np.cumsum(tokens)
    for values in (ids_values := _values(ids_column), mask_values := _values(mask_column)):
        if values.null_count:
            null = int(np.argmin(values.is_valid().to_numpy(zero_copy_only=False)))
            raise RowFaultError(int(np.searchsorted(ends, null, side="right")), "a token is null")
    ids, mask = integers(ids_values), _mask(mask_values, ends)
    if len(ids):
        _check_ids(ids, ends, vocabulary)
    if not tokens.all():
        raise RowFaultError(int(np.argmin(tokens)), "no token is supervised")
    supervised = _ones_by_row(mask, ends)
    if not supervised.all():
        raise RowFaultError(int(np.argmin(supervised)), "no token is supervised")
    return SampleRows(ids, mask, ends, tokens, supervised)


def examine_shard(shard: Path, vocabulary: int | None = None) -> Iterable[SampleRows]:
    """All of a file, batch by batch.

    Raises:
        UserError: the file is damaged, or a row is no sample; the row is named.
    """
    first = 0
    for batch in read_batches(shard):
        try:
            yield examine(batch, vocabulary)
        except RowFaultError as fault:
            raise UserError(f"{shard} row {first + fault.row}: {fault}; remove or mend such rows") from fault
        first += batch.num_rows


def read_totals(shards: Iterable[Path], vocabulary: int | None = None) -> Totals:
    """Read files whole, some at once, and add them up; raises UserError as `examine_shard`."""
    totals = Totals()
    with ThreadPoolExecutor(SHARDS_AT_ONCE) as pool:
        for of_shard in pool.map(partial(_shard_totals, vocabulary=vocabulary), shards):
            totals.include(of_shard)
    return totals


def _shard_totals(shard: Path, vocabulary: int | None) -> Totals:
    totals = Totals()
    for rows in examine_shard(shard, vocabulary):
        totals.add(rows.tokens, rows.supervised)
    return totals


def _ones_by_row(mask: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many ones each row of the mask has. As bits, they are counted ten times as fast as np.add.reduceat adds."""
    packed = np.packbits(mask, bitorder="little")
    words = np.zeros(len(packed) // 8 + 1, dtype=np.uint64)
    words.view(np.uint8)[: len(packed)] = packed
    before = np.zeros(len(words) + 1, dtype=np.int64)
    np.cumsum(np.bitwise_count(words), out=before[1:], dtype=np.int64)
    word, bit = ends >> 6, (ends & 63).astype(np.uint64)
    below = (np.uint64(1) << bit) - np.uint64(1)
    ones: npt.NDArray[np.int64] = np.diff(before[word] + np.bitwise_count(words[word] & below), prepend=0)
    return ones


def _check_ids(ids: Integers, ends: npt.NDArray[np.int64], vocabulary: int | None) -> None:
    limit = vocabulary if vocabulary is not None else LARGEST_VOCABULARY
    # As unsigned, a negative id is beyond every limit: one pass finds both.
    unsigned = ids.view(f"u{ids.itemsize}")
    if unsigned.max() >= limit:
        outside = int(np.argmax(unsigned >= limit))
        row = int(np.searchsorted(ends, outside, side="right"))
        vocabulary_told = f"the vocabulary of {vocabulary}" if vocabulary is not None else "every vocabulary"
        raise RowFaultError(row, f"id {ids[outside]} is outside {vocabulary_told}")


def _mask(values: pa.Array, ends: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    mask = integers(values.cast(pa.uint8()) if pa.types.is_boolean(values.type) else values)
    if len(mask) and mask.view(f"u{mask.itemsize}").max() > 1:
        strange = int(np.argmax(mask.view(f"u{mask.itemsize}") > 1))
        row = int(np.searchsorted(ends, strange, side="right"))
        raise RowFaultError(row, f"loss_mask has the value {mask[strange]}, which is neither 0 nor 1")
    return mask.view(np.uint8) if mask.itemsize == 1 else mask.astype(np.uint8)


def _fits(name: str, found: pa.DataType, expected: pa.DataType) -> bool:
    if pa.types.is_list(expected):
        if not (pa.types.is_list(found) or pa.types.is_large_list(found)):
            return False
        is_mask = name == "loss_mask" and pa.types.is_boolean(found.value_type)
        return bool(is_mask or pa.types.is_integer(found.value_type))
    return bool(pa.types.is_integer(found))


def _values(lists: pa.Array) -> pa.Array:
    """The lists end to end; without null rows that is a slice, where flatten() is a computation."""
    offsets = integers(lists.offsets)
    return lists.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))


def _lengths(lists: pa.Array) -> npt.NDArray[np.int64]:
    # Unlike value_lengths(), the offsets need no pass of their own; a null row was refused before.
    lengths: npt.NDArray[np.int64] = np.diff(integers(lists.offsets)).astype(np.int64)
    return lengths


def integers(array: pa.Array) -> Integers:
    """An array of integers without nulls, where it lies; Array.to_numpy() would import pandas for that."""
    dtype = np.dtype(array.type.to_pandas_dtype())
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.empty(0, dtype=dtype)
    return np.frombuffer(buffer, dtype, len(array), array.offset * dtype.itemsize)
