"""What is taken already, so that no further prompt may equal it."""

from collections import Counter
from typing import Any

import pyarrow.parquet as pq

from services.errors import UserError
from services.prompts.existing import TokenizedPrompts, tokenized_prompts
from services.prompts.hub import locate_for
from services.prompts.near_duplicates import NearDuplicates
from services.prompts.parallel import Processes
from services.prompts.reading import read_blocks
from services.prompts.tasks import Drawn, Shared, index_block, index_prompts, index_tokens
from services.records import read_prompt_texts
from services.runs import Run
from services.settings import Settings, SourceSettings


class Taken:
    """The prompts of the existing corpus and of this run, by name, by token ids and by signature."""

    def __init__(self, settings: Settings) -> None:
        near = settings.prepare.deduplicate.near
        self.of_corpus: set[str] = set()
        self.corpora: dict[str, Any] = {}
        self.of_run: set[str] = set()
        self.tokenized = TokenizedPrompts([], near)
        self.near = NearDuplicates(near) if near is not None else None

    def add_corpus(self, run: Run, settings: Settings, processes: Processes[Shared]) -> None:
        """The existing corpus: the one to merge with, of which the token ids are left, and what there is as text.

        Raises:
            UserError: a file cannot be read, or holds no prompt at all.
        """
        indexed_tokens = processes.map(index_tokens, tokenized_prompts(settings.merge))
        self.tokenized = TokenizedPrompts(indexed_tokens, settings.prepare.deduplicate.near)
        for shape in settings.prepare.deduplicate.against:
            files = locate_for(run, shape).files
            prompts, rejected = 0, Counter[str]()
            blocks = (block for path in files for block in read_blocks(path, shape.columns()))
            for indexed in processes.map(index_block, ((shape, block) for block in blocks)):
                prompts += len(indexed.names)
                rejected.update(indexed.rejected)
                self.of_corpus.update(indexed.names)
                for signed in indexed.signatures:
                    self._add_signature(signed)
            if not prompts:
                raise UserError(
                    f"existing corpus {shape.name}: no prompt in {', '.join(map(str, files))} (rejected: "
                    f"{dict(rejected)}); check its adapter and column"
                )
            self.corpora[shape.name] = {"prompts": prompts, "rejected": dict(rejected)}

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
            if self.tokenized.has_nearly(drawn.signature):
                return "near_corpus"
            if self.near is not None and self.near.has(drawn.signature):
                return "near"
            self._add_signature(drawn.signature)
        return None

    def _add_signature(self, signed: Any) -> None:
        if self.near is not None:
            self.near.add(signed)
