"""Make a run's prompts: read, adapt, reject, drop duplicates, sample, render; every row is accounted for.

All rows of a source are scanned first: adapted, filtered, named by their content, and written packed into a temporary
file, so that memory holds some 50 bytes a row. Then they are drawn in the order of their ranks and rendered until the
quota is full: first those held out, then those to generate for. What decides on a row is its own content and the rows
taken before it, never the order of the files or the number of processes.
"""

import shutil
import tempfile
from functools import partial
from itertools import islice
from typing import Any

import pyarrow.parquet as pq
import structlog
from transformers import PreTrainedTokenizerBase

from services import chat
from services.errors import UserError
from services.files import publish, publish_json, read_json, scratch_folder
from services.ledger import check_balance
from services.prompts import accounts
from services.prompts.accounts import SourceCounts
from services.prompts.contamination import EvaluationSets
from services.prompts.drawing import draw_prompts
from services.prompts.hub import locate_for
from services.prompts.parallel import Processes, available_processes
from services.prompts.progress import Progress
from services.prompts.scanning import scan_source
from services.prompts.taken import Taken
from services.prompts.tasks import Renderer, Shared
from services.prompts.user_turns import turn_marks
from services.records import write_prompts
from services.runs import Run, record_rendering
from services.settings import Settings, SourceSettings
from services.target import tokenizer_fingerprint, vocabulary_size

log = structlog.get_logger()


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
    renderer = Renderer(tokenizer, settings.render.thinking, chat.takes_tools(tokenizer), turn_marks(tokenizer))
    rendering = {
        "thinking": settings.render.thinking,
        "template": chat.template_fingerprint(tokenizer),
        "tokenizer": tokenizer_fingerprint(settings.target.path),
    }
    record_rendering(run, rendering)
    decontaminate, base = settings.prepare.decontaminate, settings.merge.base
    evaluation = EvaluationSets(
        decontaminate, {shape.name: locate_for(run, shape).files for shape in decontaminate.against}
    )
    progress = Progress(run, settings.sources)
    taken = Taken(settings)
    with Processes(Shared(settings, renderer, evaluation), processes or available_processes()) as pool:
        taken.add_corpus(run, settings, pool)
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
        "corpora": {**taken.corpora, **({"tokenized": {"prompts": len(taken.tokenized.hashes)}} if base else {})},
        **rendering,
        "tools": "template" if renderer.tools_in_template else "system prompt",
        "vocabulary_size": vocabulary_size(settings.target.path),
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
    located = locate_for(run, source)
    counts = SourceCounts(source.name, source.domain, source.quota, commit=located.commit)
    counts.files = [str(path) for path in located.files]
    with (
        scratch_folder(run.prepared.parent, source.name) as folder,
        tempfile.TemporaryFile(dir=folder) as packed,
    ):
        candidates = scan_source(source, located.files, settings.prepare.max_row_bytes, packed, pool, counts, progress)
        prompts = draw_prompts(source, candidates, pool, taken, counts, progress)
        held_out, kept = folder / "held_out", folder / "kept"
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


def _thinking_warning(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    if settings.render.thinking is None or chat.takes_thinking(tokenizer):
        return []
    return ["the template has no enable_thinking: render.thinking has no effect"]
