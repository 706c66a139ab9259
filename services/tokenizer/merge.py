"""Merge the samples of runs with an existing corpus into one dataset: its shards are linked and never written to."""

import hashlib
import os
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from services.dataset_folder import ShardWriter, index_path, open_dataset, provenance_path, write_state
from services.errors import UserError
from services.files import publish_folder, publish_json, read_json
from services.records import PROVENANCE_SCHEMA, SAMPLE_SCHEMA
from services.runs import Run
from services.sample_rows import Totals, read_totals
from services.settings import MergeSettings, Settings
from services.tokenizer.account import account, check_totals
from services.tokenizer.base import MERGE_RECORD, Base, BasePart, add_base, find_indexes, open_base
from services.tokenizer.content_index import Digests, write_index
from services.tokenizer.new_samples import AssembledChunk, NewRows, Selection, assembled_chunks, read_groups

# Room for state, indices and whatever else is written meanwhile.
SPARE_BYTES = 64 * 2**20

log = structlog.get_logger()


@dataclass(frozen=True)
class Plan:
    """A merge that can be done: everything that it needs is there and fits together."""

    runs: dict[str, Run]
    chunks: dict[str, list[AssembledChunk]]
    prepared: dict[str, Any]
    base: Base | None
    indexes: list[Path]
    settings: MergeSettings
    target: Path
    inputs: dict[str, Any]

    @property
    def schema(self) -> pa.Schema:
        return self.base.schema if self.base else SAMPLE_SCHEMA

    @property
    def vocabulary(self) -> int | None:
        size: int | None = self.prepared.get("vocabulary_size")
        return size


@dataclass
class _ShardParts:
    """What is written about a new shard when it is full."""

    digests: list[Digests] = field(default_factory=list)
    provenance: list[pa.Table] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)

    def add(self, rows: NewRows) -> None:
        self.digests.append(rows.digests)
        self.provenance.append(rows.provenance)
        self.totals.include(rows.totals)


def merge_run(run: Run, settings: Settings) -> dict[str, Any]:
    """Publish the dataset of a run and of the corpus that its settings name; see `merge_runs`."""
    if run.merged.is_file():
        return read_json(run.merged)
    return merge_runs([run], settings.merge.base, run.dataset, settings, settings.merge.verify)


def merge_runs(
    runs: Sequence[Run], base: Path | None, dataset: Path, settings: Settings, verify: bool
) -> dict[str, Any]:
    """Publish a dataset of a corpus and what runs add to it, with merge.json in it, and return that.

    A dataset of the same inputs that is there is left as it is, and read through if `verify` says so.

    Args:
        runs: in the order in which their samples follow; for one that two of them have, the first counts.
        base: the existing corpus; it is never written to. None: there is none.
        dataset: the folder to make. Removing it undoes the merge.
        settings: `merge` says what is left out; `target` is noted for `inspect`.
        verify: read the whole dataset and compare with the account, before it is published.

    Raises:
        UserError: the inputs do not fit together, chunks are not assembled, the disk is too small, `dataset` is
            something else, or what was read is not what was counted.
    """
    record = dataset / MERGE_RECORD
    names = [run.name for run in runs]
    inputs = {"base": str(base.absolute()) if base else None, "runs": names}
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"run {doubled[0]} is named twice; name each run once")
    if record.is_file():
        return _existing(record, inputs, verify)
    if dataset.exists() or dataset.is_symlink():
        raise UserError(f"{dataset} is there, but no merge made it (it has no {record.name}); move it away")
    plan = _plan(runs, base, settings, inputs)
    _check_disk(plan, dataset.parent)
    publish_folder(dataset, lambda folder: _fill(folder, plan, verify))
    content = read_json(record)
    log.info("merged", dataset=str(dataset), **{name: content["after"][name] for name in ("samples", "tokens")})
    return content


def verify_dataset(dataset: Path) -> Totals:
    """Read a merged dataset whole and compare it with its merge.json; returns what is in it.

    Raises:
        UserError: a row is no sample, or the numbers differ.
    """
    content = read_json(dataset / MERGE_RECORD)
    totals = read_totals(open_dataset(dataset).shards, content["vocabulary_size"])
    check_totals(f"{dataset}", Totals.from_json(content["after"]), totals)
    return totals


def _existing(record: Path, inputs: dict[str, Any], verify: bool) -> dict[str, Any]:
    content = read_json(record)
    if content["inputs"] != inputs:
        made_of = content["inputs"]
        raise UserError(
            f"{record.parent} is there, made of base {made_of['base']} and runs {', '.join(made_of['runs'])}; "
            "name another dataset, or remove that folder"
        )
    if verify:
        verify_dataset(record.parent)
    return content


def _plan(runs: Sequence[Run], base: Path | None, settings: Settings, inputs: dict[str, Any]) -> Plan:
    prepared = {run.name: read_json(run.prepared) for run in runs}
    first = prepared[runs[0].name]
    for name, content in prepared.items():
        if content["tokenizer"] != first["tokenizer"]:
            raise UserError(
                f"runs {runs[0].name} and {name} were made with different tokenizers; merge what is of one model"
            )
    chunks = {run.name: assembled_chunks(run) for run in runs}
    columns = {str(name): own for name, own in settings.merge.base_columns.items()}
    opened = open_base(base, columns, first["tokenizer"]) if base else None
    # A corpus whose columns have other names is indexed when they are renamed.
    kept = runs[0].root.parent / ".indexes"
    vocabulary = first.get("vocabulary_size")
    indexes = find_indexes(opened, kept, vocabulary) if opened and not opened.columns else []
    by_name = {run.name: run for run in runs}
    return Plan(by_name, chunks, first, opened, indexes, settings.merge, settings.target.path, inputs)


def _fill(folder: Path, plan: Plan, verify: bool) -> None:
    """Make the whole dataset in an empty folder."""
    for beside in (index_path(folder, ""), provenance_path(folder, "any").parent):
        beside.mkdir()
    part = add_base(plan.base, plan.indexes, folder, plan.vocabulary) if plan.base else BasePart()
    selection = Selection(plan.schema, part.indexes, plan.settings, plan.vocabulary)
    digest = hashlib.sha256(_identity(plan.base))
    shards = [*part.shards, *_write_new(folder, plan, selection, len(part.shards), digest)]
    # New content, new fingerprint; the same content has the same.
    fingerprint = digest.hexdigest()[:16]
    write_state(folder, shards, fingerprint)
    content: dict[str, Any] = {
        "inputs": plan.inputs,
        "base": plan.base
        and {
            "path": str(plan.base.folder.path),
            "fingerprint": plan.base.folder.fingerprint,
            "shards": len(plan.base.folder.shards),
            "how": part.how,
        },
        "fingerprint": fingerprint,
        "tokenizer": plan.prepared["tokenizer"],
        "vocabulary_size": plan.vocabulary,
        "target": str(plan.target),
        "dropped_if": {
            "supervised_tokens_below": plan.settings.min_supervised_tokens,
            "tokens_above": plan.settings.max_length,
        },
        "verified": verify,
        **account(part.totals, plan.base, plan.settings.base_source, list(selection.added.values())),
    }
    if verify:
        read = read_totals([folder / shard for shard in shards], plan.vocabulary)
        check_totals("the dataset as written", Totals.from_json(content["after"]), read)
    publish_json(folder / MERGE_RECORD, content)


def _write_new(folder: Path, plan: Plan, selection: Selection, first: int, digest: "hashlib._Hash") -> list[str]:
    """Write what is new into shards, each with its index and provenance; returns their names."""
    parts: defaultdict[str, _ShardParts] = defaultdict(_ShardParts)

    def finish(shard: str) -> None:
        part = parts.pop(shard)
        write_index(index_path(folder, shard), part.digests, part.totals, folder / shard)
        provenance = pa.concat_tables(part.provenance).cast(PROVENANCE_SCHEMA)
        # Each prompt's name is its own: a dictionary of them would only cost.
        repeated = [name for name in PROVENANCE_SCHEMA.names if name != "prompt_id"]
        pq.write_table(provenance, provenance_path(folder, shard), compression="zstd", use_dictionary=repeated)

    with ShardWriter(folder, plan.schema, first) as writer:
        for name, run in plan.runs.items():
            for source, group in read_groups(run, plan.chunks[name]):
                if (rows := selection.take(run, source, group)) is None:
                    continue
                digest.update(rows.digests.tobytes())
                shard = writer.write(rows.samples)
                parts[shard].add(rows)
                for full in [other for other in parts if other != shard]:
                    finish(full)
    for last in list(parts):
        finish(last)
    return writer.names


def _identity(base: Base | None) -> bytes:
    return f"{base.folder.fingerprint or base.folder.path}".encode() if base else b""


def _check_disk(plan: Plan, parent: Path) -> None:
    """Raises UserError when the dataset cannot be made in the folder where it is to be, or has no room there."""
    widths = sum(plan.schema.field(name).type.value_type.bit_width for name in ("input_ids", "loss_mask")) / 8
    tokens = sum(chunk.tokens for chunks in plan.chunks.values() for chunk in chunks)
    needed = int(tokens * widths) + SPARE_BYTES
    if plan.base and plan.base.columns:
        needed += sum(shard.stat().st_size for shard in plan.base.folder.shards)
    there = next(folder for folder in (parent, *parent.absolute().parents) if folder.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        why = "may not be written to" if there.is_dir() else "is no folder"
        raise UserError(f"{parent}: the dataset cannot be made there, since {there} {why}; name another folder")
    free = shutil.disk_usage(there).free
    if free < needed:
        raise UserError(
            f"{parent}: the dataset needs {needed / 1e6:,.0f} MB and {free / 1e6:,.0f} MB are free; make room, or "
            "name a folder on another disk"
        )
