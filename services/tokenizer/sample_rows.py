"""What every batch of samples is asked: lengths, supervised tokens, faults, and a name for each row's content."""

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from services.errors import UserError
from services.records import SAMPLE_SCHEMA
from services.tokenizer.dataset_folder import describe

Integers = npt.NDArray[np.int64]


class SampleRows(NamedTuple):
    """The rows of one batch.

    `tokens` and `supervised` have one count a row; `fault` is the first row that is no sample, and why.
    """

    tokens: Integers
    supervised: Integers
    fault: tuple[int, str] | None


def check_columns(schema: pa.Schema, where: str) -> None:
    """Raises UserError when a dataset's columns are not those of a sample; integer widths may differ."""
    fits = set(schema.names) == set(SAMPLE_SCHEMA.names) and all(
        _fits(schema.field(field.name).type, field.type) for field in SAMPLE_SCHEMA
    )
    if not fits:
        missing = [name for name in SAMPLE_SCHEMA.names if name not in schema.names]
        unknown = [name for name in schema.names if name not in SAMPLE_SCHEMA.names]
        wrong = [
            f"{field.name} is {schema.field(field.name).type}"
            for field in SAMPLE_SCHEMA
            if field.name in schema.names and not _fits(schema.field(field.name).type, field.type)
        ]
        differences = [
            *(f"no column {name}" for name in missing),
            *(f"unknown column {name}" for name in unknown),
            *wrong,
        ]
        raise UserError(
            f"{where}: {', '.join(differences)}; expected {describe(SAMPLE_SCHEMA)} (integers of any width): "
            "rename or remove columns and save it anew"
        )


def examine(batch: pa.RecordBatch) -> SampleRows:
    """Count tokens, and find the first row whose lengths disagree or that supervises nothing."""
    ids, mask, seq_len = (batch.column(name) for name in SAMPLE_SCHEMA.names)
    if ids.null_count or mask.null_count or seq_len.null_count:
        valid = pc.and_(pc.and_(ids.is_valid(), mask.is_valid()), seq_len.is_valid())
        return _faulty(pc.index(valid, False).as_py(), "a column is null")
    tokens, mask_lengths = _lengths(ids), _lengths(mask)
    if len(wrong := np.flatnonzero((tokens != mask_lengths) | (tokens != _integers(seq_len)))):
        row = int(wrong[0])
        told = f"{tokens[row]} input_ids, {mask_lengths[row]} of loss_mask, seq_len {seq_len[row].as_py()}"
        return _faulty(row, f"lengths disagree: {told}")
    flat = _integers(mask.flatten())
    ends = np.cumsum(tokens)
    if len(strange := np.flatnonzero((flat != 0) & (flat != 1))):
        row = int(np.searchsorted(ends, strange[0], side="right"))
        return _faulty(row, f"loss_mask has the value {flat[strange[0]]}, which is neither 0 nor 1")
    sums = np.concatenate([[0], np.cumsum(flat)])
    supervised = sums[ends] - sums[ends - tokens]
    fault = None
    if len(empty := np.flatnonzero(supervised == 0)):
        fault = (int(empty[0]), "no token is supervised")
    return SampleRows(tokens, supervised, fault)


def contents(batch: pa.RecordBatch) -> Iterator[bytes]:
    """A digest a row of its ids and mask: equal rows of one schema have equal digests."""
    ids, mask = batch.column("input_ids"), batch.column("loss_mask")
    ends = np.cumsum(_lengths(ids))
    id_bytes, mask_bytes = (_bytes(column.flatten()) for column in (ids, mask))
    begin = 0
    for end in ends:
        yield hashlib.blake2b(id_bytes[begin:end].tobytes() + mask_bytes[begin:end].tobytes(), digest_size=16).digest()
        begin = end


def _fits(found: pa.DataType, expected: pa.DataType) -> bool:
    if pa.types.is_list(expected):
        is_list = pa.types.is_list(found) or pa.types.is_large_list(found)
        return bool(is_list and (pa.types.is_integer(found.value_type) or pa.types.is_boolean(found.value_type)))
    return bool(pa.types.is_integer(found))


def _lengths(lists: pa.Array) -> Integers:
    return _integers(lists.value_lengths())


def _integers(array: pa.Array) -> Integers:
    integers: Integers = array.cast(pa.int64()).to_numpy(zero_copy_only=False)
    return integers


def _bytes(array: pa.Array) -> npt.NDArray[np.generic]:
    values: npt.NDArray[np.generic] = array.to_numpy(zero_copy_only=False)
    return values


def _faulty(row: int, why: str) -> SampleRows:
    nothing = np.zeros(0, dtype=np.int64)
    return SampleRows(nothing, nothing, (row, why))
