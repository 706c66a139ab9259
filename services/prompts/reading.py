"""Rows of local files, streamed: JSONL (also gzipped), a JSON list, Parquet."""

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from services.errors import UserError

PARQUET_BATCH_ROWS = 1000


class Row(NamedTuple):
    """One row, or the reason why it is none; `number` counts from 1 within the file."""

    path: Path
    number: int
    value: dict[str, Any] | None
    fault: str | None = None


def read_rows(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """The rows of one file; of a Parquet file only the named columns are read.

    A bad row is given with its fault. `.json` may hold a list (read whole) or, as often, one object a line.

    Raises:
        UserError: the file cannot be read at all, or breaks off.
    """
    if not path.is_file():
        raise UserError(f"prompt file {path}: there is no such file; see sources[].files")
    try:
        if path.suffix == ".parquet":
            yield from _parquet(path, columns)
        elif path.name.endswith((".json", ".jsonl", ".json.gz", ".jsonl.gz")):
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
                yield from _json(path, stream)
        else:
            raise UserError(f"prompt file {path}: use .jsonl, .json, .jsonl.gz, .json.gz or .parquet")
    except (OSError, EOFError, zlib.error, pa.ArrowInvalid) as error:
        raise UserError(f"prompt file {path} is damaged: {' '.join(str(error).split())}; fetch it again") from error


def _parquet(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    file = pq.ParquetFile(path)
    if missing := [column for column in columns if column not in file.schema_arrow.names]:
        there = ", ".join(file.schema_arrow.names)
        raise UserError(f"prompt file {path}: no column {missing[0]!r}; there are: {there}")
    number = 0
    for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS, columns=list(columns)):
        for value in batch.to_pylist():
            number += 1
            yield Row(path, number, value)


def _json(path: Path, stream: BinaryIO | gzip.GzipFile) -> Iterator[Row]:
    first = stream.read(1)
    while first.isspace():
        first = stream.read(1)
    stream.seek(0)
    if first == b"[":
        yield from _json_list(path, stream)
    else:
        yield from _json_lines(path, stream)


def _json_list(path: Path, stream: BinaryIO | gzip.GzipFile) -> Iterator[Row]:
    try:
        values = json.load(stream)
    except ValueError as error:
        raise UserError(f"prompt file {path} is no JSON list: {error}") from error
    for number, value in enumerate(values, start=1):
        yield _checked(path, number, value)


def _json_lines(path: Path, stream: BinaryIO | gzip.GzipFile) -> Iterator[Row]:
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError:
            yield Row(path, number, None, "not_utf8")
        except (ValueError, RecursionError):
            yield Row(path, number, None, "not_json")
        else:
            yield _checked(path, number, value)


def _checked(path: Path, number: int, value: Any) -> Row:
    return Row(path, number, value) if isinstance(value, dict) else Row(path, number, None, "not_an_object")
