"""Which source each sample came from, and which samples an epoch takes: mixing weights and the replay share.

A merged dataset has, beside a shard `data-00007.arrow`, a file `provenance/data-00007.parquet` with a row for each of
its samples; the column `source` is read. Samples of a shard without that file are of the source EXISTING: the corpus
that was there before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dflash.config import MixtureConfig
from dflash.data import Dataset
from dflash.errors import DflashError

EXISTING = "existing"


@dataclass(frozen=True)
class SourceRows:
    """The rows of one source, and how many of them an epoch takes (more than there are: some twice)."""

    name: str
    rows: NDArray[np.int64]
    per_epoch: int


def read_sources(dataset: Dataset) -> tuple[list[str], NDArray[np.int64]]:
    """Return the names of the sources, and for each row of the dataset the index of its own.

    Raises DflashError when a provenance file is unreadable or has another number of rows than its shard.
    """
    names: list[str] = []
    indexes = []
    for shard, count in dataset.shards:
        path = (dataset.path / "provenance" / shard).with_suffix(".parquet")
        if not path.is_file():
            found, codes = [EXISTING], np.zeros(count, dtype=np.int64)
        else:
            try:
                column = pq.read_table(path, columns=["source"])["source"].cast(pa.string()).combine_chunks()
            except (OSError, pa.ArrowInvalid, KeyError) as error:
                raise DflashError(
                    f"{path}: the column source cannot be read ({' '.join(str(error).split())})"
                ) from error
            if len(column) != count:
                raise DflashError(f"{path}: has {len(column)} rows, but its shard {shard} has {count}")
            encoded = column.fill_null(EXISTING).dictionary_encode()
            found, codes = encoded.dictionary.to_pylist(), encoded.indices.to_numpy().astype(np.int64)
        names += [name for name in found if name not in names]
        indexes.append(np.array([names.index(name) for name in found], dtype=np.int64)[codes])
    return names, np.concatenate(indexes)


def mix(
    dataset: Dataset, rows: NDArray[np.int64], lengths: NDArray[np.int64], config: MixtureConfig
) -> list[SourceRows]:
    """Return what an epoch takes of each source.

    Args:
        rows: the rows of the dataset that can be trained on.
        lengths: tokens of every row of the dataset, as they are trained on.
        config: weights by source, and the replay share.

    Raises DflashError for a weight of a source that is not there, and when nothing remains.
    """
    if config == MixtureConfig():
        return [SourceRows("all", rows, len(rows))]
    names, indexes = read_sources(dataset)
    if unknown := sorted(config.weights.keys() - set(names)):
        raise DflashError(
            f"mixture.weights: {dataset.path} has no source {unknown[0]}; it has {', '.join(sorted(names))}"
        )
    by_source = {name: rows[indexes[rows] == names.index(name)] for name in sorted(names)}
    counts = {name: round(config.weights.get(name, 1.0) * len(own)) for name, own in by_source.items()}
    if config.replay_share is not None:
        old = by_source.get(EXISTING, rows[:0])
        if len(old) == 0:
            raise DflashError(f"mixture.replay_share: all samples of {dataset.path} have a source: nothing to replay")
        new_tokens = sum(
            counts[name] * float(lengths[own].mean())
            for name, own in by_source.items()
            if name != EXISTING and len(own)
        )
        share = config.replay_share
        counts[EXISTING] = round(share / (1 - share) * new_tokens / float(lengths[old].mean()))
    if not sum(counts.values()):
        raise DflashError("mixture: no sample remains; raise a weight")
    return [SourceRows(name, own, counts[name]) for name, own in by_source.items() if counts[name]]


def epoch_rows(sources: list[SourceRows], seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the rows of one epoch in the order that seed and epoch decide.

    An epoch that takes a part of a source goes on where the one before stopped, so that every row has its turn before
    any has its second.
    """
    taken = [
        _slice(source.rows, epoch * source.per_epoch, source.per_epoch, [seed, number])
        for number, source in enumerate(sources)
    ]
    return np.random.default_rng([seed, epoch]).permutation(np.concatenate(taken))


def _slice(rows: NDArray[np.int64], first: int, count: int, seed: list[int]) -> NDArray[np.int64]:
    """Return `count` rows from position `first` on of an endless sequence of shuffles of `rows`."""
    if count == len(rows):
        return rows
    parts = []
    while count:
        turn, start = divmod(first, len(rows))
        part = np.random.default_rng([*seed, turn]).permutation(rows)[start : start + count]
        parts.append(part)
        first, count = first + len(part), count - len(part)
    return np.concatenate(parts)
