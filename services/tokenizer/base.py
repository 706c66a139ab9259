"""The existing corpus of a merge: what it holds, and how it comes into the new dataset without being copied."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from services.dataset_folder import (
    DatasetFolder,
    index_path,
    open_dataset,
    provenance_path,
    read_batches,
    shard_name,
    write_shards,
)
from services.errors import UserError
from services.files import read_json, sweep
from services.records import SAMPLE_SCHEMA
from services.sample_rows import Totals, check_columns
from services.tokenizer.content_index import ShardIndex, build_index, read_index
from services.tokenizer.linking import How, link_file, worse

MERGE_RECORD = "merge.json"
CORPUS_RECORD = "corpus.json"


@dataclass(frozen=True)
class Base:
    """A corpus, found and checked but not read. `columns` are its own names of a sample's columns.

    `record` is its merge.json, for one that a merge made.
    """

    folder: DatasetFolder
    schema: pa.Schema
    columns: Mapping[str, str]
    record: dict[str, Any]


@dataclass
class BasePart:
    """A corpus as part of the new dataset."""

    shards: list[str] = field(default_factory=list)
    indexes: list[ShardIndex] = field(default_factory=list)
    how: How | None = None

    @property
    def totals(self) -> Totals:
        totals = Totals()
        for index in self.indexes:
            totals.include(index.totals)
        return totals


def open_base(path: Path, columns: Mapping[str, str], tokenizer: str) -> Base:
    """Find a corpus, and check its columns and, where it tells them, its tokenizer.

    Raises:
        UserError: it is no dataset of samples, its record is damaged, its ids are another tokenizer's, or one of its
            columns is to be two of a sample's.
    """
    folder = open_dataset(path)
    where = f"corpus {path}"
    schema = folder.schema
    if columns:
        theirs = {name: columns.get(name, name) for name in SAMPLE_SCHEMA.names}
        if missing := [own for own in theirs.values() if own not in schema.names]:
            found = ", ".join(schema.names)
            raise UserError(f"{where}: merge.base_columns names {missing[0]!r}, and its columns are {found}")
        if len(set(theirs.values())) < len(theirs):
            told = ", ".join(f"{name}: {own}" for name, own in theirs.items())
            raise UserError(f"{where}: merge.base_columns takes one column for two ({told}); name each one's own")
        schema = pa.schema([pa.field(name, schema.field(own).type) for name, own in theirs.items()])
        columns = theirs
    check_columns(schema, where)
    record, made_as_text = (_record(path / name) for name in (MERGE_RECORD, CORPUS_RECORD))
    # A corpus of other origin does not tell; its ids are checked against the vocabulary.
    if any(of.get("tokenizer", tokenizer) != tokenizer for of in (record, made_as_text)):
        raise UserError(f"{where}: it is of another tokenizer than the runs' target; merge what is of one model")
    return Base(folder, schema, columns, record)


def _record(path: Path) -> dict[str, Any]:
    """What is told of how a corpus was made; nothing where nothing is."""
    try:
        content = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}; put it back, or remove it") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} does not tell how the corpus was made; move it away")
    return content


def find_indexes(base: Base, kept: Path, vocabulary: int | None) -> list[Path]:
    """A path of every shard's index, by the corpus itself or in the folder `kept`, where missing ones are built.

    Raises:
        UserError: a row of a shard that has to be read is no sample.
    """
    found = []
    for shard in base.folder.shards:
        name = hashlib.sha256(str(shard.resolve()).encode()).hexdigest()[:32]
        paths = (index_path(base.folder.path, shard.name), kept / f"{name}.arrow")
        sweep(paths[1])
        usable = next((path for path in paths if read_index(path, shard)), None)
        if usable is None:
            usable = paths[1]
            build_index(usable, shard, vocabulary)
        found.append(usable)
    return found


def add_base(base: Base, indexes: Sequence[Path], folder: Path, vocabulary: int | None) -> BasePart:
    """Put the corpus' shards, indexes and provenance into the folder of the new dataset."""
    part = BasePart()
    for number, shard in enumerate(base.folder.shards):
        name = shard_name(number)
        index, target = index_path(folder, name), folder / name
        if base.columns:
            _rename_columns(base, shard, folder, number)
            part.how = "renamed"
            part.indexes.append(build_index(index, target, vocabulary))
        else:
            part.how = worse(link_file(shard, target), part.how)
            link_file(indexes[number], index)
            linked = read_index(index, target)
            assert linked is not None
            part.indexes.append(linked)
        if (provenance := provenance_path(base.folder.path, shard.name)).is_file():
            link_file(provenance, provenance_path(folder, name))
        part.shards.append(name)
    return part


def _rename_columns(base: Base, shard: Path, folder: Path, number: int) -> None:
    """Arrow keeps a column's name in the file, so such a shard is written anew."""
    tables = (
        pa.Table.from_arrays([batch.column(own) for own in base.columns.values()], schema=base.schema)
        for batch in read_batches(shard)
    )
    one_shard = 1 << 62
    if not write_shards(folder, base.schema, tables, first=number, shard_bytes=one_shard):
        with pa.ipc.new_stream(str(folder / shard_name(number)), base.schema):
            pass
