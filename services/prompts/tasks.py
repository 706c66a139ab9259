"""What the processes do for one source: scan blocks of its files, then render the rows that are drawn.

Everything here depends on a row alone, so that any process may do it; what depends on other rows is decided in
`prepare`.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from services import chat
from services.prompts.adapters import Conversation, Rejected, adapt
from services.prompts.contamination import EvaluationSets
from services.prompts.languages import is_other_language
from services.prompts.near_duplicates import Signature, signature
from services.prompts.ranking import RECORD, Records, prompt_id, record
from services.prompts.reading import Block, Row, parse_block
from services.prompts.text import user_text
from services.prompts.user_turns import TurnMarks, user_text_of
from services.settings import FilterSettings, RowsSettings, Settings, SourceSettings

TokenIds = np.ndarray[Any, np.dtype[np.int32]]
NO_IDS: TokenIds = np.empty(0, np.int32)


@dataclass(frozen=True)
class Renderer:
    """The target's template with the run's choices."""

    tokenizer: PreTrainedTokenizerBase
    thinking: bool | None
    tools_in_template: bool
    turn_marks: TurnMarks | None

    def needs_text(self, conversation: Conversation) -> bool:
        """Whether the conversation has tools that the template would not show."""
        called = any("tool_calls" in message for message in conversation.messages)
        return not self.tools_in_template and bool(conversation.tools or called)

    def __call__(self, conversation: Conversation) -> list[int]:
        messages, tools = conversation.messages, conversation.tools
        if self.needs_text(conversation):
            messages, tools = chat.with_tools_as_text(messages, tools), None
        return chat.render(self.tokenizer, messages, tools, self.thinking)


@dataclass(frozen=True)
class Shared:
    """What every process knows."""

    settings: Settings
    renderer: Renderer
    evaluation: EvaluationSets


class ScanTask(NamedTuple):
    source: SourceSettings
    file: int
    block: Block


class Scanned(NamedTuple):
    """The rows of a block: those that may become prompts as records and packed conversations, the others counted."""

    path: Path
    position: float
    read: int
    rejected: list[tuple[int, str]]
    records: Records
    packed: list[bytes]


class DrawTask(NamedTuple):
    """Packed conversations, each with its index among the candidates."""

    source: SourceSettings
    rows: list[tuple[int, bytes]]


class Drawn(NamedTuple):
    """A drawn row, rendered; or why it is dropped, and what more there is to say of that."""

    dropped: Literal["contaminated", "over_length", "rejected"] | None
    detail: str
    input_ids: TokenIds
    tools_as_text: bool
    signature: Signature | None


class IndexedTokens(NamedTuple):
    """Of some tokenized prompts: hashes of their ids, and signatures of those with words, [signed, permutations]."""

    hashes: np.ndarray[Any, np.dtype[np.uint64]]
    signatures: Signature


class Indexed(NamedTuple):
    """What later prompts are compared with, and the rows that are no prompts."""

    names: list[str]
    signatures: list[Signature]
    rejected: list[str]


def scan(shared: Shared, task: ScanTask) -> Scanned:
    """Adapt, filter and name the rows of one block."""
    source, block = task.source, task.block
    read, rejected, records, packed = 0, [], [], []
    for row in parse_block(block, shared.settings.prepare.max_row_bytes):
        read += 1
        try:
            value, conversation = _conversation(row, source)
            _filter(value, conversation, source.filters)
            group = _group(value, source.group_by)
            records.append(record(prompt_id(conversation), shared.settings.seed, group, task.file, row.number))
        except Rejected as error:
            rejected.append((row.number, str(error)))
        else:
            packed.append(pack(conversation))
    return Scanned(block.path, block.position, read, rejected, np.array(records, RECORD), packed)


def draw(shared: Shared, task: DrawTask) -> list[tuple[int, Drawn]]:
    """Render conversations, and find out what else the decision to take them needs."""
    return [(index, _drawn(shared, task.source, unpack(packed))) for index, packed in task.rows]


def index_block(shared: Shared, task: tuple[RowsSettings, Block]) -> Indexed:
    """Names and signatures of the existing corpus' prompts in one block."""
    shape, block = task
    indexed = Indexed([], [], [])
    for row in parse_block(block, shared.settings.prepare.max_row_bytes):
        try:
            _, conversation = _conversation(row, shape)
            indexed.names.append(prompt_id(conversation))
        except Rejected as error:
            indexed.rejected.append(str(error))
        else:
            indexed.signatures.extend(_signatures(shared, conversation.messages))
    return indexed


def index_prompts(shared: Shared, messages: list[str]) -> list[Signature]:
    """Signatures of prompts that are published, given as the JSON texts of their messages."""
    return [signed for text in messages for signed in _signatures(shared, json.loads(text))]


def index_tokens(shared: Shared, prompts: list[TokenIds]) -> IndexedTokens:
    """What later prompts are compared with, of prompts of which only the token ids are left."""
    near, marks = shared.settings.prepare.deduplicate.near, shared.renderer.turn_marks
    hashes = np.fromiter(map(hash_of, prompts), np.uint64, len(prompts))
    if near is None or marks is None:
        return IndexedTokens(hashes, np.empty((0, near.permutations if near else 0), np.uint32))
    texts = (user_text_of(shared.renderer.tokenizer, marks, input_ids.tolist()) for input_ids in prompts)
    signatures = [signed for text in texts if (signed := signature(text, near)) is not None]
    return IndexedTokens(hashes, np.array(signatures, np.uint32).reshape(-1, near.permutations))


def hash_of(input_ids: TokenIds) -> int:
    """64 bits of a hash of a prompt's ids."""
    return int.from_bytes(hashlib.blake2b(input_ids.tobytes(), digest_size=8).digest(), "little")


def pack(conversation: Conversation) -> bytes:
    """A conversation as two lines of JSON: messages, and tools if there are any."""
    messages = json.dumps(conversation.messages, ensure_ascii=False)
    tools = json.dumps(conversation.tools, ensure_ascii=False) if conversation.tools else ""
    return f"{messages}\n{tools}".encode()


def unpack(packed: bytes) -> Conversation:
    messages, tools = unpack_texts(packed)
    return Conversation(json.loads(messages), json.loads(tools) if tools else None)


def unpack_texts(packed: bytes) -> tuple[str, str | None]:
    """The two texts: messages, and tools or None."""
    messages, _, tools = packed.decode().partition("\n")
    return messages, tools or None


def _conversation(row: Row, shape: RowsSettings) -> tuple[dict[str, Any], Conversation]:
    if row.value is None:
        raise Rejected(row.fault or "not_an_object")
    return row.value, adapt(row.value, shape)


def _filter(value: dict[str, Any], conversation: Conversation, filters: FilterSettings) -> None:
    for rule in filters.reject:
        if rule.column not in value:
            raise Rejected("missing_column")
        if not _texts(value[rule.column]).isdisjoint(rule.values):
            raise Rejected(rule.reason)
    if not filters.languages:
        return
    if filters.language_column and filters.language_column not in value:
        raise Rejected("missing_column")
    told = value[filters.language_column] if filters.language_column else None
    if told is None:
        other = is_other_language(user_text(conversation.messages), tuple(filters.languages))
    else:
        other = str(told).split("-")[0].lower() not in filters.languages  # "zh-cn" is Chinese too
    if other:
        raise Rejected("other_language")


def _texts(value: Any) -> set[str]:
    """What a configuration may call a value: `true` as the file has it, or `True` as Python does."""
    return {str(value), json.dumps(value)} if value is None or isinstance(value, bool) else {str(value)}


def _group(value: dict[str, Any], column: str | None) -> str | None:
    if column is None:
        return None
    if column not in value:
        raise Rejected("missing_column")
    return None if value[column] is None else " ".join(str(value[column]).split())


def _drawn(shared: Shared, source: SourceSettings, conversation: Conversation) -> Drawn:
    if (overlapped := shared.evaluation.find(conversation.messages)) is not None:
        return Drawn("contaminated", overlapped, NO_IDS, False, None)
    try:
        input_ids = shared.renderer(conversation)
    except chat.RenderingError:
        return Drawn("rejected", "template_refused", NO_IDS, False, None)
    if len(input_ids) > shared.settings.render.max_prompt_tokens:
        return Drawn("over_length", "", NO_IDS, False, None)
    signed = _signatures(shared, conversation.messages) if source.near_duplicates == "drop" else []
    tools_as_text = shared.renderer.needs_text(conversation)
    return Drawn(None, "", np.array(input_ids, np.int32), tools_as_text, signed[0] if signed else None)


def _signatures(shared: Shared, messages: list[dict[str, Any]]) -> list[Signature]:
    """The prompt's signature; none when near duplicates are not looked for, or it has no words."""
    near = shared.settings.prepare.deduplicate.near
    signed = signature(user_text(messages), near) if near is not None else None
    return [] if signed is None else [signed]
