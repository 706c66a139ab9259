"""The folder that `datasets.load_from_disk` reads: Arrow stream files, state.json and dataset_info.json.

A merge puts more beside them, which `datasets` leaves alone:

    merge.json                what came from where
    index/SHARD.arrow         which samples the shard holds (services/tokenizer/content_index.py)
    provenance/SHARD.parquet  where each of its samples came from, where that is known (records.PROVENANCE_SCHEMA)
"""

import json
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

import pyarrow as pa

from services.errors import UserError

SHARD_BYTES = 256 * 2**20
# Of a shard that is read through.
MAPPED_BYTES = 32 * 2**20
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def index_path(folder: Path, shard: str) -> Path:
    return folder / "index" / shard


def provenance_path(folder: Path, shard: str) -> Path:
    return (folder / "provenance" / shard).with_suffix(".parquet")


class DatasetFolder(NamedTuple):
    """A folder as found; `fingerprint` is the one `datasets` caches by, where there is one."""

    path: Path
    shards: list[Path]
    schema: pa.Schema
    fingerprint: str | None


class ShardWriter:
    """Writes tables into shards of bounded size, numbered from `first` on. Close it, or use it with `with`."""

    def __init__(self, folder: Path, schema: pa.Schema, first: int = 0, shard_bytes: int = SHARD_BYTES) -> None:
        self.names: list[str] = []
        self._folder, self._schema, self._first, self._shard_bytes = folder, schema, first, shard_bytes
        self._written = 0
        self._stack = ExitStack()

    def write(self, table: pa.Table) -> str:
        """Write a table whole into one shard; returns the shard's name."""
        if not self.names or self._written >= self._shard_bytes:
            self._stack.close()
            self.names.append(shard_name(self._first + len(self.names)))
            path = str(self._folder / self.names[-1])
            self._stream = self._stack.enter_context(pa.ipc.new_stream(path, self._schema))
            self._written = 0
        self._stream.write_table(table)
        self._written += table.nbytes
        return self.names[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def write_shards(
    folder: Path, schema: pa.Schema, tables: Iterable[pa.Table], first: int = 0, shard_bytes: int = SHARD_BYTES
) -> list[str]:
    """Write tables into shards of bounded size, numbered from `first` on; returns their names."""
    with ShardWriter(folder, schema, first, shard_bytes) as writer:
        for table in tables:
            if table.num_rows:
                writer.write(table)
    return writer.names


def shard_name(number: int) -> str:
    return f"data-{number:05d}.arrow"


def write_state(folder: Path, shards: list[str], fingerprint: str) -> None:
    """Make a folder of shards a dataset. `fingerprint` must be new for new content: `datasets` caches by it."""
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in shards],
        "_fingerprint": fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    # Features are read from the shards, which carry their schema.
    (folder / "dataset_info.json").write_text("{}\n", encoding="utf-8")


def open_dataset(path: Path) -> DatasetFolder:
    """Find the shards of a dataset and their common schema, without reading rows.

    Raises:
        UserError: it is no such folder, a shard is missing or cut off, or its shards have different schemas.
    """
    state_path = path / "state.json"
    if (path / "dataset_dict.json").is_file():
        raise UserError(f"corpus {path}: it holds several splits; name the folder of one of them in merge.base")
    try:
        state: dict[str, Any] = json.loads(state_path.read_text(encoding="utf-8"))
        shards = [path / data_file["filename"] for data_file in state["_data_files"]]
    except OSError as error:
        raise UserError(f"corpus {path}: {error.strerror}: state.json; give a folder of save_to_disk") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"corpus {path}: state.json does not list its files; save it anew with save_to_disk") from error
    if not shards:
        raise UserError(f"corpus {path}: state.json lists no file; set merge.base to null to merge with nothing")
    schemas = [_schema(shard) for shard in shards]
    for shard, schema in zip(shards, schemas, strict=True):
        if not schema.equals(schemas[0]):
            raise UserError(
                f"corpus {path}: {shard.name} has columns {describe(schema)}, but {shards[0].name} has "
                f"{describe(schemas[0])}; save it anew with one schema"
            )
    return DatasetFolder(path, shards, schemas[0], state.get("_fingerprint"))


def read_batches(shard: Path) -> Iterator[pa.RecordBatch]:
    """The record batches of one shard, one after another, where they lie: nothing is copied.

    Pages that were read are given back now and then, so that memory holds a window of the file. A batch may be kept:
    its pages come again from the file.

    Raises:
        UserError: the file is damaged.
    """
    try:
        with shard.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise UserError(f"{shard} is damaged: it is empty")
            # It is unmapped with the last batch that points into it.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapped.madvise(mmap.MADV_SEQUENTIAL)
        source = pa.BufferReader(pa.py_buffer(mapped))
        given_back = 0
        with pa.ipc.open_stream(source) as reader:
            for batch in reader:
                yield batch
                whole_pages = source.tell() // mmap.PAGESIZE * mmap.PAGESIZE
                if whole_pages - given_back >= MAPPED_BYTES:
                    mapped.madvise(mmap.MADV_DONTNEED, given_back, whole_pages - given_back)
                    given_back = whole_pages
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{shard} is damaged: {' '.join(str(error).split())}") from error


def read_row(dataset: DatasetFolder, row: int) -> tuple[Path, int, pa.RecordBatch]:
    """One row, with its shard and its number there; nothing else is read but the sizes of the batches before it.

    Raises:
        UserError: there is no such row.
    """
    begin = 0
    for shard in dataset.shards:
        first_of_shard = begin
        with pa.memory_map(str(shard)) as source, pa.ipc.open_stream(source) as reader:
            for batch in reader:
                if begin <= row < begin + batch.num_rows:
                    return shard, row - first_of_shard, batch.slice(row - begin, 1)
                begin += batch.num_rows
    raise UserError(f"dataset {dataset.path}: there is no row {row}; its {begin} rows are numbered from 0")


def describe(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _schema(shard: Path) -> pa.Schema:
    try:
        with shard.open("rb") as stream:
            stream.seek(-len(END_OF_STREAM), 2)
            # Arrow reads a stream that was cut between two batches as a shorter one, and says nothing.
            if stream.read() != END_OF_STREAM:
                raise UserError(f"{shard} is cut off: it has no end of stream; restore the file")
        with pa.memory_map(str(shard)) as source, pa.ipc.open_stream(source) as reader:
            return reader.schema
    except OSError as error:
        raise UserError(f"{shard} cannot be read: {error.strerror or error}") from error
    except pa.ArrowInvalid as error:
        raise UserError(f"{shard} is no Arrow stream: {' '.join(str(error).split())}") from error
