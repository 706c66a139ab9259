"""Make a run's prompts: read, adapt, reject, drop duplicates, sample, render; every row is accounted for.

A source's prompts are a fixed sample: each row gets a rank from the seed and its content, and the rows of least
rank are taken, first those held out, then those to generate for. So the order of the files does not matter, and
a raised quota keeps all earlier prompts, held-out ones too. Only rows that can still be taken are rendered and
kept, so memory holds a source's quota and not the source.
"""

import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pyarrow.parquet as pq
import structlog
from transformers import PreTrainedTokenizerBase

from services import chat
from services.errors import UserError
from services.ledger import check_balance
from services.prompts.adapters import Conversation, Rejected, adapt
from services.prompts.reading import Row, read_rows
from services.records import Prompt, write_prompts
from services.runs import Run, publish, publish_json, read_json
from services.settings import Settings, SourceSettings
from services.target import vocabulary_size

EXAMPLES_A_REASON = 5

log = structlog.get_logger()


@dataclass
class SourceCounts:
    """What became of every row of one source.

    `read` = `rejected` + `duplicates` + `over_length` + `not_needed` + `kept` + `held_out`. A row that the quota
    had no place for was not rendered, so `over_length` speaks of those that were.
    """

    source: str
    domain: str
    quota: int
    read: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0
    over_length: int = 0
    not_needed: int = 0
    kept: int = 0
    held_out: int = 0
    prompt_tokens: int = 0
    held_out_tokens: int = 0
    tools_as_text: int = 0
    rejected_rows: dict[str, list[str]] = field(default_factory=dict)

    def reject(self, row: Row, reason: str) -> None:
        self.rejected[reason] += 1
        examples = self.rejected_rows.setdefault(reason, [])
        if len(examples) < EXAMPLES_A_REASON:
            examples.append(f"{row.path} row {row.number}")


@dataclass(frozen=True)
class Renderer:
    """The target's template with the run's choices."""

    tokenizer: PreTrainedTokenizerBase
    thinking: bool | None
    tools_in_template: bool

    def needs_text(self, conversation: Conversation) -> bool:
        """Whether the conversation has tools that the template would not show."""
        called = any("tool_calls" in message for message in conversation.messages)
        return not self.tools_in_template and bool(conversation.tools or called)

    def __call__(self, conversation: Conversation) -> list[int]:
        messages, tools = conversation.messages, conversation.tools
        if self.needs_text(conversation):
            messages, tools = chat.with_tools_as_text(messages, tools), None
        return chat.render(self.tokenizer, messages, tools, self.thinking)


@dataclass(frozen=True, order=True)
class Candidate:
    """A prompt that may yet be taken; ordered so that a heap gives the greatest rank first."""

    negative_rank: int
    prompt: Prompt = field(compare=False)
    tools_as_text: bool = field(compare=False)


def prepare_run(run: Run, settings: Settings, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Publish prompts, held-out prompts and accounts of every source, then prepare.json, and return its content.

    A source that is published already is left as it is.

    Raises:
        UserError: a file cannot be read, or a source gives no prompt at all.
    """
    if run.prepared.is_file():
        return read_json(run.prepared)
    renderer = Renderer(tokenizer, settings.render.thinking, chat.takes_tools(tokenizer))
    taken: set[str] = set()
    for source in settings.sources:
        if not run.source_prepared(source.name).is_file():
            prepare_source(run, settings, source, renderer, taken)
        for path in (run.prompts(source.name), run.held_out(source.name)):
            taken.update(pq.read_table(path, columns=["prompt_id"])["prompt_id"].to_pylist())
    accounts = {source.name: read_json(run.source_prepared(source.name)) for source in settings.sources}
    content: dict[str, Any] = {
        "sources": accounts,
        "total": _total(accounts.values()),
        "warnings": _warnings(accounts.values(), settings, tokenizer),
        "thinking": settings.render.thinking,
        "tools": "template" if renderer.tools_in_template else "system prompt",
        "template": chat.template_fingerprint(tokenizer),
        "tokenizer": chat.tokenizer_fingerprint(settings.target.path),
        "vocabulary_size": vocabulary_size(settings.target.path),
    }
    if publish_json(run.prepared, content):
        log.info("prepared", run=run.name, **{name: content["total"][name] for name in ("read", "kept", "held_out")})
        for warning in content["warnings"]:
            log.warning("prepared with a warning", run=run.name, warning=warning)
    return read_json(run.prepared)


def prepare_source(run: Run, settings: Settings, source: SourceSettings, renderer: Renderer, taken: set[str]) -> None:
    """Publish one source; `taken` has the prompt ids of the sources before it, which count as duplicates here."""
    counts = SourceCounts(source.name, source.domain, source.quota)
    candidates = sorted(_candidates(settings, source, renderer, taken, counts), reverse=True)
    held_out = [candidate.prompt for candidate in candidates[: source.held_out]]
    kept = [candidate.prompt for candidate in candidates[source.held_out :]]
    if not kept:
        raise UserError(
            f"source {source.name}: none of {counts.read} rows is left to generate for (rejected: "
            f"{_listed(counts.rejected)}; duplicates: {counts.duplicates}; over length: {counts.over_length}; "
            f"held out: {len(held_out)}); check its adapter and columns"
        )
    counts.kept, counts.held_out = len(kept), len(held_out)
    counts.prompt_tokens = sum(len(prompt.input_ids) for prompt in kept)
    counts.held_out_tokens = sum(len(prompt.input_ids) for prompt in held_out)
    counts.tools_as_text = sum(candidate.tools_as_text for candidate in candidates)
    _check(counts)
    for path, prompts in ((run.prompts(source.name), kept), (run.held_out(source.name), held_out)):
        publish(path, lambda temporary, prompts=prompts: write_prompts(temporary, prompts))  # type: ignore[misc]
        # A run taken up again may find the file of an earlier try: it must be of the same rows.
        check_balance(f"{path}", pq.read_metadata(path).num_rows, {"prompts": len(prompts)})
    if publish_json(run.source_prepared(source.name), vars(counts)):
        log.info("source prepared", run=run.name, source=source.name, read=counts.read, kept=counts.kept)


def prompt_id(conversation: Conversation) -> str:
    """A stable name of the content: equal messages and tools give equal ids, in whatever source.

    Raises:
        Rejected: the content cannot be written as JSON in UTF-8 (a lone surrogate, a Python object).
    """
    try:
        text = json.dumps([conversation.messages, conversation.tools], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:32]
    except UnicodeEncodeError:
        raise Rejected("not_utf8") from None
    except (TypeError, ValueError):
        raise Rejected("not_json") from None


def _candidates(
    settings: Settings, source: SourceSettings, renderer: Renderer, taken: set[str], counts: SourceCounts
) -> list[Candidate]:
    """The prompts of least rank, as many as the source needs, in no order."""
    heap: list[Candidate] = []
    seen: set[str] = set()
    columns = [source.column, *([source.tools_column] if source.tools_column else [])]
    for row in (row for path in source.files for row in read_rows(path, columns)):
        counts.read += 1
        try:
            if row.value is None:
                raise Rejected(row.fault or "not_an_object")
            conversation = adapt(row.value, source)
            name = prompt_id(conversation)
            if name in seen or name in taken:
                counts.duplicates += 1
                continue
            seen.add(name)
            negative_rank = -_rank(settings.seed, name)
            full = len(heap) == source.quota + source.held_out
            if full and negative_rank < heap[0].negative_rank:
                counts.not_needed += 1
                continue
            input_ids = renderer(conversation)
        except Rejected as error:
            counts.reject(row, str(error))
            continue
        except chat.RenderingError:
            counts.reject(row, "template_refused")
            continue
        if len(input_ids) > settings.render.max_prompt_tokens:
            counts.over_length += 1
            continue
        prompt = Prompt(
            prompt_id=name,
            source=source.name,
            messages=json.dumps(conversation.messages, ensure_ascii=False),
            tools=json.dumps(conversation.tools, ensure_ascii=False) if conversation.tools else None,
            input_ids=input_ids,
        )
        candidate = Candidate(negative_rank, prompt, renderer.needs_text(conversation))
        if full:
            heapq.heapreplace(heap, candidate)
            counts.not_needed += 1
        else:
            heapq.heappush(heap, candidate)
    return heap


def _rank(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big")


def _check(counts: SourceCounts) -> None:
    check_balance(
        f"source {counts.source}",
        counts.read,
        {
            "rejected": counts.rejected.total(),
            "duplicates": counts.duplicates,
            "over length": counts.over_length,
            "not needed": counts.not_needed,
            "kept": counts.kept,
            "held out": counts.held_out,
        },
    )


def _total(accounts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    total: Counter[str] = Counter()
    rejected: Counter[str] = Counter()
    for account in accounts:
        total.update({name: value for name, value in account.items() if isinstance(value, int)})
        rejected.update(account["rejected"])
    return {**total, "rejected": dict(rejected)}


def _warnings(accounts: Iterable[dict[str, Any]], settings: Settings, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    warnings = [
        f"source {account['source']}: {account['kept']} prompts, its quota is {account['quota']}"
        for account in accounts
        if account["kept"] < account["quota"]
    ]
    warnings += [
        f"source {account['source']}: the template shows no tools; {account['tools_as_text']} prompts have them in "
        "the system prompt"
        for account in accounts
        if account["tools_as_text"]
    ]
    if settings.render.thinking is not None and not chat.takes_thinking(tokenizer):
        warnings.append("the template has no enable_thinking: render.thinking has no effect")
    return warnings


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.most_common()) or "none"
