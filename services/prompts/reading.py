"""Rows of local files, streamed: JSONL and JSON lists (also gzipped), Parquet.

A file is cut into blocks by one process, which is quick, and a block is parsed into rows by any other, which is not.
Memory holds one block of a file, whatever the file's size and whatever the length of a row.
"""

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from services.errors import UserError

BLOCK_ROWS = 500
BLOCK_BYTES = 4 * 2**20
READ_BYTES = 2**20
PEEK_BYTES = 4096
MAX_ROW_BYTES = 16 * 2**20
WHITE_SPACE = re.compile(r"\s*")


class Row(NamedTuple):
    """One row, or the reason why it is none; `number` counts from 1 within the file (for JSONL: lines)."""

    path: Path
    number: int
    value: dict[str, Any] | None
    fault: str | None = None


class Block(NamedTuple):
    """Rows of one file that are not parsed yet: JSON texts by number, or an Arrow stream that begins at `first`.

    `position` is how much of the file's bytes (of Parquet: rows) is read with this block, from 0 to 1.
    """

    path: Path
    texts: list[tuple[int, bytes]]
    faults: list[tuple[int, str]]
    arrow: bytes | None
    first: int
    position: float


class DamagedFileError(UserError):
    """The file breaks off, or cannot be read on; the rows before `row` were given."""

    def __init__(self, path: Path, row: int, why: str) -> None:
        super().__init__(f"prompt file {path} is damaged at row {row}: {why}; fetch it again")
        self.path = path
        self.row = row


def read_rows(path: Path, columns: Sequence[str], max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[Row]:
    """The rows of one file; of a Parquet file only the named columns are read.

    A bad row is given with its fault.

    Raises:
        UserError: there is no such file, or it lacks a column, or is of an unknown kind.
        DamagedFileError: it breaks off.
    """
    for block in read_blocks(path, columns, max_row_bytes):
        yield from parse_block(block, max_row_bytes)


def read_blocks(path: Path, columns: Sequence[str], max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[Block]:
    """The blocks of one file, in order. Raises as `read_rows` does."""
    try:
        if not path.is_file():
            raise UserError(f"prompt file {path}: there is no such file; see sources[].files")
        path.open("rb").close()
    except OSError as error:
        raise UserError(f"prompt file {path} cannot be read: {error.strerror}; see sources[].files") from error
    if path.suffix == ".parquet":
        yield from _parquet(path, columns)
    elif path.name.endswith((".json", ".jsonl", ".json.gz", ".jsonl.gz")):
        yield from _json(path, max_row_bytes)
    else:
        raise UserError(f"prompt file {path}: use .jsonl, .json, .jsonl.gz, .json.gz or .parquet")


def parse_block(block: Block, max_row_bytes: int = MAX_ROW_BYTES) -> Iterator[Row]:
    """The rows of one block, by number; those that are none with their fault."""
    if block.arrow is not None:
        yield from _arrow_rows(block, block.arrow, max_row_bytes)
        return
    rows: list[tuple[int, bytes | str]] = [*block.texts, *block.faults]
    for number, held in sorted(rows, key=lambda row: row[0]):
        yield Row(block.path, number, None, held) if isinstance(held, str) else _parse(block.path, number, held)


def _parse(path: Path, number: int, text: bytes) -> Row:
    try:
        value = json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return Row(path, number, None, "not_utf8")
    except (ValueError, RecursionError):
        return Row(path, number, None, "not_json")
    return Row(path, number, value) if isinstance(value, dict) else Row(path, number, None, "not_an_object")


def _parquet(path: Path, columns: Sequence[str]) -> Iterator[Block]:
    number = 1
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if missing := [column for column in columns if column not in names]:
                raise UserError(f"prompt file {path}: no column {missing[0]!r}; there are: {', '.join(names)}")
            rows = max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(batch_size=BLOCK_ROWS, columns=list(columns)):
                sink = pa.BufferOutputStream()
                with pa.ipc.new_stream(sink, batch.schema) as writer:
                    writer.write_batch(batch)
                position = (number - 1 + batch.num_rows) / rows
                yield Block(path, [], [], sink.getvalue().to_pybytes(), number, position)
                number += batch.num_rows
    except (OSError, pa.ArrowInvalid) as error:
        raise DamagedFileError(path, number, _one_line(error)) from error


def _arrow_rows(block: Block, stream: bytes, max_row_bytes: int) -> Iterator[Row]:
    number = block.first
    for batch in pa.ipc.open_stream(stream):
        if batch.nbytes <= max_row_bytes:
            try:
                values = batch.to_pylist()
            except UnicodeDecodeError:  # Parquet's writers do not all check that text is UTF-8
                pass
            else:
                yield from (Row(block.path, number + index, value) for index, value in enumerate(values))
                number += batch.num_rows
                continue
        for index in range(batch.num_rows):
            yield _arrow_row(block.path, number, batch.slice(index, 1), max_row_bytes)
            number += 1


def _arrow_row(path: Path, number: int, row: pa.RecordBatch, max_row_bytes: int) -> Row:
    if row.nbytes > max_row_bytes:
        return Row(path, number, None, "row_too_long")
    try:
        return Row(path, number, row.to_pylist()[0])
    except UnicodeDecodeError:
        return Row(path, number, None, "not_utf8")


def _json(path: Path, max_row_bytes: int) -> Iterator[Block]:
    size = max(path.stat().st_size, 1)
    with path.open("rb") as raw:
        stream: Any = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        rows = _list_texts if _begins_a_list(path, stream) else _lines
        block = Block(path, [], [], None, 0, 0.0)
        length = 0
        number = 0
        try:
            for number, held in rows(stream, max_row_bytes):
                if isinstance(held, str):
                    block.faults.append((number, held))
                else:
                    block.texts.append((number, held))
                length += len(held)
                if length > BLOCK_BYTES or len(block.texts) >= BLOCK_ROWS:
                    yield block._replace(position=raw.tell() / size)
                    block, length = Block(path, [], [], None, 0, 0.0), 0
        except (OSError, EOFError, zlib.error, ValueError) as error:
            yield block._replace(position=1.0)
            raise DamagedFileError(path, number + 1, _one_line(error)) from error
        yield block._replace(position=1.0)


def _begins_a_list(path: Path, stream: BinaryIO) -> bool:
    try:
        head = stream.read(PEEK_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
        stream.seek(0)
    except (OSError, EOFError, zlib.error) as error:
        raise DamagedFileError(path, 1, _one_line(error)) from error
    return head.startswith(b"[")


def _lines(stream: BinaryIO, max_row_bytes: int) -> Iterator[tuple[int, bytes | str]]:
    """The lines that are not blank, by number; of one that is too long no more than that is held."""
    number = 0
    while line := stream.readline(max_row_bytes + 1):
        number += 1
        if len(line) > max_row_bytes and not line.endswith(b"\n"):
            while (rest := stream.readline(READ_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield number, "row_too_long"
        elif line.strip():
            yield number, line


def _list_texts(stream: BinaryIO, max_row_bytes: int) -> Iterator[tuple[int, bytes | str]]:
    """The texts of a list's elements, cut where each ends.

    Raises ValueError where the list breaks off, is no JSON, or has an element that is too long to be cut off.
    """
    scan = json.JSONDecoder().raw_decode
    # Bytes that are not UTF-8 pass as lone surrogates and come back as they were, to be rejected with their row.
    decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
    text, at, number, ended = "", 0, 0, False
    while True:
        begin = _after(text, at, "," if number else "[")
        if text[begin : begin + 1] == "]":
            return
        try:
            _, end = scan(text, begin)
            if end == len(text) and not ended:
                raise ValueError("the element may go on")
        except (ValueError, RecursionError) as error:
            if ended:
                raise ValueError(f"the list breaks off, or is no JSON: {_one_line(error)}") from error
            if len(text) - at > max_row_bytes:
                raise ValueError(f"no JSON, or an element of more than {max_row_bytes:,} bytes") from error
            chunk = stream.read(READ_BYTES)
            ended = not chunk
            text, at = text[at:] + decode(chunk, final=ended), 0
            if number == 0:
                text = text.removeprefix("\ufeff")
            continue
        number += 1
        yield number, text[begin:end].encode("utf-8", "surrogateescape")
        at = end


def _after(text: str, at: int, mark: str) -> int:
    """Where what follows `mark` begins, white space before and after it left out."""
    at = WHITE_SPACE.match(text, at).end()  # type: ignore[union-attr]
    return WHITE_SPACE.match(text, at + 1).end() if text[at : at + 1] == mark else at  # type: ignore[union-attr]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
