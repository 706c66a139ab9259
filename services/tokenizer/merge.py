"""Merge a run's samples with an existing corpus: its shards are linked and never written to."""

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import structlog

from services.errors import UserError
from services.ledger import check_balance, read_chunks
from services.records import SAMPLE_SCHEMA, Chunk
from services.runs import Run, publish_folder, publish_json, read_json
from services.settings import Settings
from services.tokenizer.dataset_folder import (
    DatasetFolder,
    describe,
    open_dataset,
    read_batches,
    shard_name,
    write_shards,
    write_state,
)
from services.tokenizer.sample_rows import check_columns, contents, examine

# Room for state, indices and whatever else is written meanwhile.
SPARE_BYTES = 64 * 2**20

log = structlog.get_logger()


@dataclass
class Size:
    """How much a set of samples is."""

    samples: int = 0
    tokens: int = 0
    supervised_tokens: int = 0

    def add(self, samples: int, tokens: int, supervised_tokens: int) -> None:
        self.samples += samples
        self.tokens += tokens
        self.supervised_tokens += supervised_tokens


@dataclass
class SourceSize(Size):
    """What one source adds: `assembled` = `samples` + `dropped` (`duplicate`: of another new one; `in_base`)."""

    assembled: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


class Base(NamedTuple):
    """The existing corpus, read through once; `known` are those new samples that it has already."""

    folder: DatasetFolder
    size: Size
    known: set[bytes]


def merge_run(run: Run, settings: Settings) -> dict[str, Any]:
    """Publish the run's dataset, with merge.json in it, and return that; a dataset that is there is left as it is.

    Raises:
        UserError: chunks are not assembled, the existing corpus is no corpus of samples, or the disk is too small.
    """
    if run.merged.is_file():
        return read_json(run.merged)
    if run.dataset.exists():
        raise UserError(f"{run.dataset} is there, but no merge made it (it has no {run.merged.name}); move it away")
    chunks = _assembled(run)
    folder = open_dataset(settings.merge.base) if settings.merge.base else None
    if folder:
        check_columns(folder.schema, where=f"corpus {folder.path}")
    schema = folder.schema if folder else SAMPLE_SCHEMA
    new = {content for chunk in chunks for batch in _new_batches(run, chunk, schema) for content in contents(batch)}
    if not new:
        raise UserError(f"run {run.name} has not one sample to merge; `dflash-stack status` tells what became of them")
    base = _read_base(folder, new) if folder else None
    _check_disk(run, chunks, base, schema)
    publish_folder(run.dataset, lambda temporary: _fill(temporary, run, settings, chunks, base, schema))
    content = read_json(run.merged)
    log.info("merged", run=run.name, **content["after"])
    return content


def _fill(
    folder: Path, run: Run, settings: Settings, chunks: Sequence[Chunk], base: Base | None, schema: pa.Schema
) -> None:
    """Make the whole dataset in an empty folder."""
    shards, how = _link(base.folder.shards, folder) if base else ([], None)
    # New content, new fingerprint; the same content has the same.
    digest = hashlib.sha256(f"{base.folder.fingerprint or base.folder.path}".encode() if base else b"")
    known = set(base.known) if base else set()
    sources: dict[str, SourceSize] = {}

    def new_tables() -> Iterator[pa.Table]:
        for chunk in chunks:
            size = sources.setdefault(chunk.source, SourceSize())
            for batch in _new_batches(run, chunk, schema):
                names = list(contents(batch))
                kept = _new_rows(names, known, base.known if base else set(), size)
                digest.update(b"".join(names[row] for row in kept))
                rows = examine(batch)
                size.add(len(kept), int(rows.tokens[kept].sum()), int(rows.supervised[kept].sum()))
                yield pa.Table.from_batches([batch.take(pa.array(kept, pa.int64()))], schema=schema)

    shards += write_shards(folder, schema, new_tables(), first=len(shards))
    fingerprint = digest.hexdigest()[:16]
    write_state(folder, shards, fingerprint)
    publish_json(folder / run.merged.name, _account(run, settings, base, how, sources, fingerprint))


def _new_rows(names: Sequence[bytes], known: set[bytes], in_base: set[bytes], size: SourceSize) -> list[int]:
    """The rows whose content is not known yet, which makes them known; the others are counted."""
    kept = []
    for row, name in enumerate(names):
        if name not in known:
            known.add(name)
            kept.append(row)
        else:
            size.dropped["in_base" if name in in_base else "duplicate"] += 1
    size.assembled += len(names)
    return kept


def _assembled(run: Run) -> list[Chunk]:
    chunks = read_chunks(run)
    if not chunks:
        raise UserError(f"run {run.name} has no chunks; enqueue with `dflash-stack submit`")
    missing = [chunk.chunk for chunk in chunks if not run.assembled(chunk.chunk).is_file()]
    if missing:
        raise UserError(
            f"run {run.name}: {len(missing)} of {len(chunks)} chunks are not assembled ({missing[0]} is the first); "
            "wait for them (`dflash-stack status`), or enqueue them again with `dflash-stack submit`"
        )
    return chunks


def _new_batches(run: Run, chunk: Chunk, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The chunk's samples in the corpus' own types."""
    path = run.samples(chunk.chunk)
    for batch in read_batches(path):
        try:
            columns = [batch.column(field.name).cast(field.type) for field in schema]
        except pa.ArrowInvalid as error:
            raise UserError(
                f"{path}: its samples do not fit the corpus' columns {describe(schema)} ({error}); "
                "save the corpus anew with wider integers"
            ) from error
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _read_base(folder: DatasetFolder, new: set[bytes]) -> Base:
    """Read the whole corpus once.

    Raises:
        UserError: a row is no sample; the first is named.
    """
    size = Size()
    known: set[bytes] = set()
    for shard in folder.shards:
        first = 0
        for batch in read_batches(shard):
            rows = examine(batch)
            if rows.fault:
                row, why = rows.fault
                raise UserError(
                    f"corpus {folder.path}: {shard.name} row {first + row}: {why}; remove or mend such rows"
                )
            size.add(batch.num_rows, int(rows.tokens.sum()), int(rows.supervised.sum()))
            known.update(content for content in contents(batch) if content in new)
            first += batch.num_rows
    return Base(folder, size, known)


def _link(shards: Sequence[Path], folder: Path) -> tuple[list[str], str]:
    """Put the corpus' shards into the folder: hard links, or copies where the file system gives none."""
    how = "linked"
    names = []
    for number, shard in enumerate(shards):
        names.append(shard_name(number))
        try:
            os.link(shard, folder / names[-1])
        except OSError:
            shutil.copyfile(shard, folder / names[-1])
            how = "copied"
    return names, how


def _check_disk(run: Run, chunks: Sequence[Chunk], base: Base | None, schema: pa.Schema) -> None:
    """Raises UserError when the dataset has no room beside the run."""
    widths = sum(schema.field(name).type.value_type.bit_width for name in ("input_ids", "loss_mask")) / 8
    tokens = sum(read_json(run.assembled(chunk.chunk))["tokens"] for chunk in chunks)
    needed = int(tokens * widths) + SPARE_BYTES
    if base and base.folder.path.stat().st_dev != run.root.stat().st_dev:
        needed += sum(shard.stat().st_size for shard in base.folder.shards)
    free = shutil.disk_usage(run.root).free
    if free < needed:
        raise UserError(
            f"{run.root}: the dataset needs {needed / 1e6:,.0f} MB and {free / 1e6:,.0f} MB are free; make room, or "
            "keep the corpus on the same file system, so that it is linked and not copied"
        )


def _account(
    run: Run,
    settings: Settings,
    base: Base | None,
    how: str | None,
    sources: dict[str, SourceSize],
    fingerprint: str,
) -> dict[str, Any]:
    """The content of merge.json, checked against what was assembled."""
    before, added = base.size if base else Size(), Size()
    for name, source in sources.items():
        check_balance(f"source {name}", source.assembled, {"samples": source.samples, **source.dropped})
        added.add(source.samples, source.tokens, source.supervised_tokens)
    after = Size()
    for size in (before, added):
        after.add(size.samples, size.tokens, size.supervised_tokens)
    parts: dict[str, Size] = {**({settings.merge.base_source: before} if base else {}), **sources}
    dropped = sum((source.dropped for source in sources.values()), Counter[str]())
    return {
        "run": run.name,
        "base": base
        and {
            "path": str(base.folder.path),
            "fingerprint": base.folder.fingerprint,
            "shards": len(base.folder.shards),
            "how": how,
        },
        "fingerprint": fingerprint,
        "before": vars(before),
        "added": vars(added),
        "after": vars(after),
        "growth_percent": {
            name: round(100 * count / vars(before)[name], 2) for name, count in vars(added).items() if before.samples
        },
        "assembled": sum(source.assembled for source in sources.values()),
        "dropped": dict(dropped),
        "sources": {
            name: {
                **vars(part),
                "samples_percent": round(100 * part.samples / after.samples, 2),
                "tokens_percent": round(100 * part.tokens / after.tokens, 2),
            }
            for name, part in parts.items()
        },
    }
