"""Which samples a shard holds: a sorted list of digests, so that looking up new ones costs what is new.

One Arrow file a shard: the digests' two halves, sorted by the first, with the shard's totals in the schema's
metadata. A merge therefore reads no byte of a shard whose index is there.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from services.files import publish
from services.sample_rows import SampleRows, Totals, examine_shard, integers

INDEX_SCHEMA = pa.schema([("high", pa.uint64()), ("low", pa.uint64())])
METADATA = b"dflash_index"
VERSION = 1

# Shape [rows, 2], the high and low half of a digest of 128 bits.
Digests = npt.NDArray[np.uint64]


class ShardIndex(NamedTuple):
    """`high` is sorted; both are mapped from the file and not read into memory."""

    high: npt.NDArray[np.uint64]
    low: npt.NDArray[np.uint64]
    totals: Totals


def digest_rows(rows: SampleRows) -> Digests:
    """XXH3-128 of every row's ids and mask: equal rows have equal digests, whatever the integers' widths.

    Chance makes two of a billion samples equal with probability 1e-21.
    """
    content = np.ascontiguousarray((rows.ids.astype(np.int32) << 1) | rows.mask).view(np.uint8).data
    ends = (rows.ends * 4).tolist()
    digests = [xxhash.xxh3_128_digest(content[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
    return np.frombuffer(b"".join(digests), dtype=">u8").reshape(-1, 2).astype(np.uint64)


def write_index(path: Path, digests: Sequence[Digests], totals: Totals, shard: Path) -> None:
    """Write the index of a shard from its rows' digests."""
    joined = np.concatenate(digests)
    joined = joined[np.argsort(joined[:, 0])]
    stat = shard.stat()
    about = {"version": VERSION, "bytes": stat.st_size, "totals": totals.as_json()}
    schema = INDEX_SCHEMA.with_metadata({METADATA: json.dumps(about).encode()})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        # From buffers, since pa.array() would import pandas for that.
        columns = (np.ascontiguousarray(joined[:, half]) for half in (0, 1))
        halves = [pa.Array.from_buffers(pa.uint64(), len(joined), [None, pa.py_buffer(half)]) for half in columns]
        writer.write_batch(pa.RecordBatch.from_arrays(halves, schema=schema))


def read_index(path: Path, shard: Path) -> ShardIndex | None:
    """The index of a shard; None when there is none, or it is older than the shard or of another."""
    try:
        if path.stat().st_mtime_ns < shard.stat().st_mtime_ns:
            return None
        # The mapping stays for as long as the arrays that point into it.
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        about = json.loads(reader.schema.metadata[METADATA])
        if about["version"] != VERSION or about["bytes"] != shard.stat().st_size:
            return None
        batch = reader.get_batch(0)
        high, low = (integers(column).view(np.uint64) for column in batch.columns)
        return ShardIndex(high, low, Totals.from_json(about["totals"]))
    except (OSError, pa.ArrowInvalid, ValueError, KeyError, TypeError):
        return None


def build_index(path: Path, shard: Path, vocabulary: int | None) -> ShardIndex:
    """Read a shard whole, check every row, and publish its index as `path`.

    Raises:
        UserError: a row is no sample; it is named.
    """
    totals = Totals()
    digests = [np.empty((0, 2), dtype=np.uint64)]
    for rows in examine_shard(shard, vocabulary):
        totals.add(rows.tokens, rows.supervised)
        digests.append(digest_rows(rows))
    if read_index(path, shard) is None:  # else another merge has published it meanwhile, and may be linking it
        path.unlink(missing_ok=True)  # of an earlier content of the shard
    publish(path, lambda temporary: write_index(temporary, digests, totals, shard))
    index = read_index(path, shard)
    assert index is not None
    return index


def are_known(digests: Digests, indexes: Iterable[ShardIndex]) -> npt.NDArray[np.bool_]:
    """Which of the digests some index holds."""
    order = np.argsort(digests[:, 0])  # neighbours are looked up in the same pages
    high, low = digests[order, 0], digests[order, 1]
    known = np.zeros(len(digests), dtype=np.bool_)
    for index in indexes:
        if not len(index.high):
            continue
        first = np.minimum(np.searchsorted(index.high, high), len(index.high) - 1)
        found = index.high[first] == high
        equal = found & (index.low[first] == low)
        for row in np.flatnonzero(found & ~equal):  # several samples with the same first half
            last = np.searchsorted(index.high, high[row], side="right")
            equal[row] = (index.low[first[row] : last] == low[row]).any()
        known[order] |= equal
    return known


class SeenDigests:
    """The digests that a merge has taken so far, sorted like a shard's index."""

    def __init__(self) -> None:
        self._seen = ShardIndex(np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.uint64), Totals())

    def add(self, digests: Digests) -> npt.NDArray[np.int64]:
        """Add digests; returns the rows, in order, of those that were not there and are the first of their kind."""
        unknown = np.flatnonzero(~are_known(digests, [self._seen]))
        ordered = digests[unknown]
        order = np.lexsort((ordered[:, 1], ordered[:, 0]))  # stable, so the first of equal ones stays first
        ordered = ordered[order]
        first = np.ones(len(ordered), dtype=np.bool_)
        first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
        new = ordered[first]
        places = np.searchsorted(self._seen.high, new[:, 0])
        high, low = np.insert(self._seen.high, places, new[:, 0]), np.insert(self._seen.low, places, new[:, 1])
        self._seen = ShardIndex(high, low, Totals())
        return np.sort(unknown[order[first]])
