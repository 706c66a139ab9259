"""Make a run's prompts: read, adapt, reject, drop duplicates, sample, render; every row is accounted for.

A source is read twice, so to speak. All rows are scanned: adapted, filtered, named by their content, and written
packed into a temporary file, so that memory holds 40 bytes of a row. Then they are drawn in the order of their ranks
and rendered until the quota is full: first those held out, then those to generate for. What decides on a row is its
own content and the rows taken before it, never the order of the files or the number of processes.
"""

import os
import shutil
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import structlog
from transformers import PreTrainedTokenizerBase

from services import chat
from services.errors import UserError
from services.ledger import check_balance
from services.prompts import accounts
from services.prompts.accounts import SourceCounts
from services.prompts.adapters import FAULTS
from services.prompts.contamination import EvaluationSets
from services.prompts.existing import TokenizedPrompts
from services.prompts.hub import locate
from services.prompts.near_duplicates import NearDuplicates
from services.prompts.parallel import Processes, available_processes
from services.prompts.progress import Progress
from services.prompts.ranking import RECORD, Indices, Records, name_of, ranked
from services.prompts.reading import Block, DamagedFileError, read_blocks
from services.prompts.tasks import (
    Drawn,
    DrawTask,
    Renderer,
    ScanTask,
    Shared,
    draw,
    index_block,
    index_prompts,
    scan,
    unpack_texts,
)
from services.records import Prompt, read_prompt_texts, write_prompts
from services.runs import Run, publish, publish_json, read_json, record_rendering
from services.settings import Settings, SourceSettings

DRAWN_AT_ONCE = 128
DRAWN_BYTES = 4 * 2**20

log = structlog.get_logger()


class Taken:
    """What is taken already, by name, by token ids and by signature: no further prompt may equal it."""

    def __init__(self, settings: Settings) -> None:
        near = settings.prepare.deduplicate.near
        self.of_corpus: set[str] = set()
        self.of_run: set[str] = set()
        self.tokenized = TokenizedPrompts(settings.merge.base)
        self.near = NearDuplicates(near) if near is not None else None

    def add_corpus(self, settings: Settings, processes: Processes[Shared]) -> None:
        """The existing corpus as text. Raises UserError when it cannot be read."""
        for shape in settings.prepare.deduplicate.against:
            blocks = (block for path in locate(shape).files for block in read_blocks(path, shape.columns()))
            for indexed in processes.map(index_block, ((shape, block) for block in blocks)):
                self.of_corpus.update(indexed.names)
                for signed in indexed.signatures:
                    self._add_signature(signed)

    def add_prepared(self, run: Run, source: SourceSettings, processes: Processes[Shared]) -> None:
        """A source that an earlier try has published."""
        for path in (run.held_out(source.name), run.prompts(source.name)):
            self.of_run.update(pq.read_table(path, columns=["prompt_id"])["prompt_id"].to_pylist())
            if self.near is not None and source.near_duplicates == "drop":
                for signatures in processes.map(index_prompts, read_prompt_texts(path)):
                    for signed in signatures:
                        self._add_signature(signed)

    def why(self, drawn: Drawn) -> str | None:
        """What the drawn row duplicates, if anything; if nothing, it is taken from now on."""
        if self.tokenized.has(drawn.input_ids):
            return "in_corpus"
        if drawn.signature is not None:
            if self.near is not None and self.near.has(drawn.signature):
                return "near"
            self._add_signature(drawn.signature)
        return None

    def _add_signature(self, signed: Any) -> None:
        if self.near is not None:
            self.near.add(signed)


class Candidates(NamedTuple):
    """Scanned rows, and where each lies in the temporary file: from its offset to the next one's."""

    records: Records
    offsets: Sequence[int]
    packed: IO[bytes]

    def read(self, index: int) -> bytes:
        begin, end = self.offsets[index], self.offsets[index + 1]
        return os.pread(self.packed.fileno(), end - begin, begin)


def prepare_run(
    run: Run, settings: Settings, tokenizer: PreTrainedTokenizerBase, processes: int | None = None
) -> dict[str, Any]:
    """Publish prompts, held-out prompts and accounts of every source, then prepare.json, and return its content.

    A source that is published already is left as it is. The number of processes (None: one for each CPU) does not
    change the result.

    Raises:
        UserError: a file cannot be read, a source gives no prompt at all, or the run was begun with another
            tokenizer, template or thinking mode.
    """
    if run.prepared.is_file():
        return read_json(run.prepared)
    renderer = Renderer(tokenizer, settings.render.thinking, chat.takes_tools(tokenizer))
    rendering = {
        "thinking": settings.render.thinking,
        "template": chat.template_fingerprint(tokenizer),
        "tokenizer": chat.tokenizer_fingerprint(settings.target.path),
    }
    record_rendering(run, rendering)
    decontaminate = settings.prepare.decontaminate
    evaluation = EvaluationSets(decontaminate, {shape.name: locate(shape).files for shape in decontaminate.against})
    progress = Progress(run, settings.sources)
    taken = Taken(settings)
    with Processes(Shared(settings, renderer, evaluation), processes or available_processes()) as pool:
        taken.add_corpus(settings, pool)
        for source in settings.sources:
            if run.source_prepared(source.name).is_file():
                progress.finish(source.name, read_json(run.source_prepared(source.name)))
                taken.add_prepared(run, source, pool)
            else:
                prepare_source(run, settings, source, pool, taken, progress)
    listed = [read_json(run.source_prepared(source.name)) for source in settings.sources]
    content: dict[str, Any] = {
        "sources": {account["source"]: account for account in listed},
        "total": accounts.total(listed),
        "mix": accounts.mix(listed, settings.prepare.corpus),
        "warnings": [*accounts.warnings(listed, settings.sources), *_thinking_warning(settings, tokenizer)],
        "evaluation_sets": evaluation.accounts,
        "corpus_prompts": len(taken.of_corpus) + len(taken.tokenized.hashes),
        **rendering,
        "tools": "template" if renderer.tools_in_template else "system prompt",
        "vocabulary_size": chat.vocabulary_size(settings.target.path),
    }
    if publish_json(run.prepared, content):
        log.info("prepared", run=run.name, **{name: content["total"][name] for name in ("read", "kept", "held_out")})
        for warning in content["warnings"]:
            log.warning("prepared with a warning", run=run.name, warning=warning)
    return read_json(run.prepared)


def prepare_source(
    run: Run,
    settings: Settings,
    source: SourceSettings,
    pool: Processes[Shared],
    taken: Taken,
    progress: Progress,
) -> None:
    """Publish one source, and add its prompts to those taken."""
    located = locate(source)
    counts = SourceCounts(source.name, source.domain, source.quota, commit=located.commit)
    counts.files = [str(path) for path in located.files]
    run.prepared.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryFile(dir=run.prepared.parent) as packed,
        tempfile.TemporaryDirectory(dir=run.prepared.parent, prefix=f".{source.name}.") as folder,
    ):
        candidates = _scan(settings, source, located.files, packed, pool, counts, progress)
        prompts = _draw(source, candidates, pool, taken, counts, progress)
        held_out, kept = Path(folder) / "held_out", Path(folder) / "kept"
        write_prompts(held_out, islice(prompts, source.held_out))
        write_prompts(kept, prompts)
        if not counts.kept:
            raise UserError(
                f"source {source.name}: none of {counts.read} rows is left to generate for ({counts.explained()}); "
                "check its adapter and columns"
            )
        counts.check()
        for final, written, count in (
            (run.prompts(source.name), kept, counts.kept),
            (run.held_out(source.name), held_out, counts.held_out),
        ):
            publish(final, partial(shutil.copyfile, written))
            # A run taken up again may find the file of an earlier try: it must be of the same rows.
            check_balance(f"{final}", pq.read_metadata(final).num_rows, {"prompts": count})
    if publish_json(run.source_prepared(source.name), counts.content()):
        log.info("source prepared", run=run.name, source=source.name, read=counts.read, kept=counts.kept)
    progress.finish(source.name, counts.content())


def _scan(
    settings: Settings,
    source: SourceSettings,
    files: Sequence[Path],
    packed: IO[bytes],
    pool: Processes[Shared],
    counts: SourceCounts,
    progress: Progress,
) -> Candidates:
    """Scan every row of the source; what may become a prompt is packed into the temporary file."""
    records, offsets = [np.empty(0, RECORD)], array("Q", [0])
    blocks = _blocks(source, files, settings.prepare.max_row_bytes, counts)
    tasks = (ScanTask(source, file, block) for file, block in blocks)
    done = dict.fromkeys(files, 0.0)
    for scanned in pool.map(scan, tasks):
        counts.read += scanned.read
        for number, reason in scanned.rejected:
            _refuse_if_told(source, scanned.path, number, reason)
            counts.reject(scanned.path, number, reason)
        records.append(scanned.records)
        for one in scanned.packed:
            packed.write(one)
            offsets.append(offsets[-1] + len(one))
        done[scanned.path] = scanned.position
        progress.scanned(source.name, counts.read, sum(done.values()) / len(done))
    packed.flush()
    return Candidates(np.concatenate(records), offsets, packed)


def _blocks(
    source: SourceSettings, files: Sequence[Path], max_row_bytes: int, counts: SourceCounts
) -> Iterator[tuple[int, Block]]:
    for file, path in enumerate(files):
        try:
            for block in read_blocks(path, source.columns(), max_row_bytes):
                yield file, block
        except DamagedFileError as error:
            if source.on_error == "fail":
                raise
            # The row at which the file breaks off; what follows it in the file was never seen.
            counts.read += 1
            counts.reject(path, error.row, "file_breaks_off")
            counts.damaged.append(str(error))


def _draw(
    source: SourceSettings,
    candidates: Candidates,
    pool: Processes[Shared],
    taken: Taken,
    counts: SourceCounts,
    progress: Progress,
) -> Iterator[Prompt]:
    """Prompts in the order of their ranks until the quota is full, those held out first, counted as they are taken."""
    rows = ranked(candidates.records, taken.of_run, taken.of_corpus, source.group_by is not None)
    counts.duplicates.update(rows.duplicates)
    wanted = source.held_out + source.quota
    decided = 0
    for batch in pool.map(draw, _draw_tasks(source, candidates, rows.order)):
        for index, drawn in batch:
            if counts.held_out + counts.kept == wanted:
                break
            decided += 1
            row = candidates.records[index]
            if drawn.dropped == "rejected":
                counts.reject(Path(counts.files[row["file"]]), int(row["row"]), drawn.detail)
            elif drawn.dropped == "contaminated":
                counts.contaminated[drawn.detail] += 1
            elif drawn.dropped == "over_length":
                counts.over_length += 1
            elif duplicate := taken.why(drawn):
                counts.duplicates[duplicate] += 1
            else:
                yield _take(source, row, candidates.read(index), drawn, taken, counts)
        if counts.held_out + counts.kept == wanted:
            break
        progress.drawn(source.name, counts.held_out + counts.kept)
    counts.not_needed = len(rows.order) - decided


def _draw_tasks(source: SourceSettings, candidates: Candidates, order: Indices) -> Iterator[DrawTask]:
    rows: list[tuple[int, bytes]] = []
    for index in map(int, order):
        rows.append((index, candidates.read(index)))
        if len(rows) == DRAWN_AT_ONCE or sum(len(packed) for _, packed in rows) > DRAWN_BYTES:
            yield DrawTask(source, rows)
            rows = []
    yield DrawTask(source, rows)


def _take(
    source: SourceSettings, row: np.void, packed: bytes, drawn: Drawn, taken: Taken, counts: SourceCounts
) -> Prompt:
    name = name_of(row)
    taken.of_run.add(name)
    tokens = len(drawn.input_ids)
    if counts.held_out < source.held_out:
        counts.held_out += 1
        counts.held_out_tokens += tokens
    else:
        counts.kept += 1
        counts.prompt_tokens += tokens
        counts.lengths[accounts.bucket(tokens)] += 1
    counts.tools_as_text += drawn.tools_as_text
    messages, tools = unpack_texts(packed)
    return Prompt(name, source.name, messages, tools, drawn.input_ids.tolist())


def _refuse_if_told(source: SourceSettings, path: Path, row: int, reason: str) -> None:
    if source.on_error == "fail" and reason in FAULTS:
        raise UserError(
            f"source {source.name}: {path} row {row}: {reason}; mend the file, or set on_error to reject such rows"
        )


def _thinking_warning(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    if settings.render.thinking is None or chat.takes_thinking(tokenizer):
        return []
    return ["the template has no enable_thinking: render.thinking has no effect"]
