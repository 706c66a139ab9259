"""Training samples from a memory-mapped `save_to_disk` folder, and their packing into steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dflash.anchors import valid_anchors
from dflash.errors import DflashError
from dflash.files import read_json


@dataclass(frozen=True)
class Sample:
    """One document: token ids (int64 [length]) and 0/1 for "the target produced it" (int8 [length])."""

    input_ids: NDArray[np.int64]
    loss_mask: NDArray[np.int8]


class Dataset:
    """Read-only samples in Arrow files that stay on disk until a row is asked for."""

    def __init__(self, path: Path, table: pa.Table, fingerprint: str) -> None:
        self.path = path
        self.fingerprint = fingerprint
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


def open_dataset(path: Path) -> Dataset:
    """Open the folder and check every row.

    Raises DflashError for a missing file or column, a column of another type, rows whose three columns
    disagree in length, and samples without a supervised token (the first such row is named).
    """
    if not (path / "state.json").is_file():
        raise DflashError(f"{path}: no dataset here (state.json is missing): expected a folder from save_to_disk")
    state = read_json(path / "state.json")
    tables = []
    for entry in state.get("_data_files", []):
        file = path / entry["filename"]
        try:
            tables.append(pa.ipc.open_stream(pa.memory_map(str(file))).read_all())
        except (OSError, pa.ArrowInvalid) as error:
            raise DflashError(f"{file}: not readable as an Arrow stream ({error})") from error
        _check_columns(file, tables[-1].schema)
        _check_rows(file, tables[-1])
    rows = sum(table.num_rows for table in tables)
    if rows == 0:
        raise DflashError(f"{path}: the dataset has no samples")
    columns = ["input_ids", "loss_mask", "seq_len"]
    table = pa.concat_tables([table.select(columns) for table in tables], promote_options="permissive")
    return Dataset(path, table, str(state.get("_fingerprint", "")))


def trainable_rows(dataset: Dataset, max_length: int) -> list[int]:
    """Return the rows that still have a valid anchor once cut to `max_length`, in order."""
    return [
        index for index in range(len(dataset)) if len(valid_anchors(dataset.sample(index, max_length).loss_mask)) > 0
    ]


def check_vocabulary(dataset: Dataset, vocab_size: int) -> None:
    """Raise DflashError when a token id has no row in an embedding of `vocab_size` rows."""
    for chunk in dataset._table["input_ids"].chunks:
        ids = _to_numpy(chunk.flatten())
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        if len(outside):
            raise DflashError(
                f"{dataset.path}: token id {outside[0]} is outside the "
                f"target's vocabulary of {vocab_size}: the samples come from another tokenizer"
            )


def packs(
    rows: list[int], lengths: NDArray[np.int64], token_budget: int, max_batch_size: int, seed: int, epoch: int
) -> Iterator[list[int]]:
    """Yield the packs of one epoch: `rows` in an order that seed and epoch decide, cut where a pack is full.

    Args:
        rows: the rows of the dataset to use.
        lengths: tokens of every row of the dataset, none above token_budget.
        token_budget: most tokens of a pack.
        max_batch_size: most rows of a pack.
    """
    order = np.random.default_rng([seed, epoch]).permutation(np.asarray(rows, dtype=np.int64))
    pack: list[int] = []
    tokens = 0
    for row in order.tolist():
        if pack and (tokens + lengths[row] > token_budget or len(pack) == max_batch_size):
            yield pack
            pack, tokens = [], 0
        pack.append(row)
        tokens += int(lengths[row])
    if pack:
        yield pack


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
