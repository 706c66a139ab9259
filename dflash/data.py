"""Training samples from a memory-mapped `save_to_disk` folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dflash.errors import DflashError
from dflash.files import read_json

COLUMNS = ["input_ids", "loss_mask", "seq_len"]
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


@dataclass(frozen=True)
class Sample:
    """One document: token ids (int64 [length]) and 0/1 for "the target produced it" (int8 [length])."""

    input_ids: NDArray[np.int64]
    loss_mask: NDArray[np.int8]


class Dataset:
    """Read-only samples in Arrow files that stay on disk until a row is asked for.

    `shards` names each file with its number of rows, in the order of the rows.
    """

    def __init__(self, path: Path, table: pa.Table, fingerprint: str, shards: list[tuple[str, int]]) -> None:
        self.path = path
        self.fingerprint = fingerprint
        self.shards = shards
        self.input_ids: list[pa.Array] = table["input_ids"].chunks
        self.loss_masks: list[pa.Array] = table["loss_mask"].chunks
        self._table = table
        self.lengths: NDArray[np.int64] = _to_numpy(table["seq_len"]).astype(np.int64)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def sample(self, index: int, max_length: int | None = None) -> Sample:
        """Return row `index`, cut to `max_length` tokens."""
        ids = self._table["input_ids"][index].values[:max_length]
        mask = self._table["loss_mask"][index].values[:max_length]
        return Sample(
            ids.to_numpy(zero_copy_only=False).astype(np.int64),
            mask.to_numpy(zero_copy_only=False).astype(np.int8),
        )


def open_dataset(path: Path, check: bool = True) -> Dataset:
    """Open the folder, and check every row unless another process has done so.

    Raises DflashError for a missing file or column, a file that is cut off or damaged, a column of another type, rows
    whose three columns disagree in length, and samples without a supervised token (the first such row is named).
    """
    if not (path / "state.json").is_file():
        raise DflashError(f"{path}: no dataset here (state.json is missing): expected a folder from save_to_disk")
    state = read_json(path / "state.json")
    files = [path / entry["filename"] for entry in state.get("_data_files", [])]
    tables = [_read_shard(file, check) for file in files]
    rows = sum(table.num_rows for table in tables)
    if rows == 0:
        raise DflashError(f"{path}: the dataset has no samples")
    table = pa.concat_tables([table.select(COLUMNS) for table in tables], promote_options="permissive")
    shard_rows = [(file.name, table.num_rows) for file, table in zip(files, tables, strict=True)]
    return Dataset(path, table, str(state.get("_fingerprint", "")), shard_rows)


def trainable_rows(dataset: Dataset, max_length: int) -> NDArray[np.int64]:
    """Return the rows that still have a valid anchor once cut to `max_length`, in order."""
    counts = [_anchor_counts(chunk, max_length) for chunk in dataset.loss_masks]
    return np.flatnonzero(np.concatenate(counts))


def _anchor_counts(masks: pa.Array, max_length: int) -> NDArray[np.int64]:
    """Count `valid_anchors` of every row of one chunk without a loop over its rows."""
    lengths = _to_numpy(masks.value_lengths()).astype(np.int64)
    begins = np.concatenate(([0], np.cumsum(lengths)))
    supervised = np.concatenate((_to_numpy(masks.flatten()) != 0, [False]))
    sums = np.concatenate(([0], np.cumsum(supervised[:-1] & supervised[1:])))
    # The last token that a row keeps has no successor in it.
    ends = begins[:-1] + np.maximum(np.minimum(lengths, max_length) - 1, 0)
    counts: NDArray[np.int64] = sums[ends] - sums[begins[:-1]]
    return counts


def check_vocabulary(dataset: Dataset, vocab_size: int) -> None:
    """Raise DflashError when a token id has no row in an embedding of `vocab_size` rows."""
    for chunk in dataset.input_ids:
        ids = _to_numpy(chunk.flatten())
        if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
            outside = ids[(ids < 0) | (ids >= vocab_size)]
            raise DflashError(
                f"{dataset.path}: token id {outside[0]} is outside the "
                f"target's vocabulary of {vocab_size}: the samples come from another tokenizer"
            )


def _read_shard(file: Path, check: bool) -> pa.Table:
    try:
        with file.open("rb") as stream:
            stream.seek(-len(END_OF_STREAM), 2)
            # Arrow reads a stream that was cut between two batches as a shorter one, and says nothing.
            if stream.read() != END_OF_STREAM:
                raise DflashError(f"{file}: cut off (it has no end of stream): restore the file")
        table = pa.ipc.open_stream(pa.memory_map(str(file))).read_all()
        if check:
            table.validate(full=True)
    except (OSError, pa.ArrowInvalid) as error:
        text = " ".join(str(error).split())
        raise DflashError(f"{file}: not readable as an Arrow stream ({text}): restore the file") from error
    _check_columns(file, table.schema)
    if check:
        _check_rows(file, table)
    return table


def _check_columns(file: Path, schema: pa.Schema) -> None:
    for name, is_list in (("input_ids", True), ("loss_mask", True), ("seq_len", False)):
        if name not in schema.names:
            raise DflashError(f"{file}: column {name} is missing (found {', '.join(schema.names)})")
        kind = schema.field(name).type
        listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        value = kind.value_type if listed else kind
        if listed != is_list or not pa.types.is_integer(value):
            wanted = "lists of integers" if is_list else "integers"
            raise DflashError(f"{file}: column {name} must hold {wanted}, but holds {kind}")


def _check_rows(file: Path, table: pa.Table) -> None:
    start = 0
    for batch in table.to_batches():
        ids, mask = batch.column("input_ids"), batch.column("loss_mask")
        lengths = _to_numpy(batch.column("seq_len"))
        id_lengths, mask_lengths = (_to_numpy(column.value_lengths()) for column in (ids, mask))
        differ = np.flatnonzero((id_lengths != lengths) | (mask_lengths != lengths))
        if len(differ):
            i = int(differ[0])
            raise DflashError(
                f"{file}: row {start + i} has {id_lengths[i]} input_ids and {mask_lengths[i]} loss_mask "
                f"entries, but seq_len {lengths[i]}"
            )
        sums = np.concatenate(([0], np.cumsum(_to_numpy(mask.flatten()) != 0)))
        ends = np.cumsum(mask_lengths)
        unsupervised = np.flatnonzero(sums[ends] == sums[ends - mask_lengths])
        if len(unsupervised):
            raise DflashError(
                f"{file}: row {start + int(unsupervised[0])} has no supervised token (loss_mask is all 0), "
                f"as have {len(unsupervised) - 1} more rows: remove them when the dataset is made"
            )
        start += batch.num_rows


def _to_numpy(column: pa.Array | pa.ChunkedArray) -> NDArray[np.int64]:
    values: NDArray[np.int64] = (
        column.to_numpy() if isinstance(column, pa.ChunkedArray) else column.to_numpy(zero_copy_only=False)
    )
    return values
