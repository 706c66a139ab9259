"""What becomes of an answer: completed, or rejected with a reason. Pure, so that every rule is easily shown."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from services.producer.tool_calls import calls_fault
from services.settings import GenerateSettings

NGRAM = 8
THINK, END_THINK = "<think>", "</think>"

# Faults of a sampled answer that another sample may not have. `aborted` is the server's and retried as such.
ASKED_AGAIN = {
    "empty answer",
    "cut short",
    "repetition",
    "unclosed thinking",
    "unparsable tool call",
    "unknown tool",
    "no end token",
    "unknown finish",
}


@dataclass(frozen=True)
class Answer:
    """What SGLang's /generate returned: the ids it emitted, their text, and its finish_reason as it gives it."""

    output_ids: list[int]
    finish_reason: dict[str, Any]
    server: str
    text: str = ""


@dataclass(frozen=True)
class Outcome:
    """`output_ids` of a stopped answer end with its end-of-turn token, exactly once."""

    status: Literal["completed", "rejected"]
    reason: str | None
    output_ids: list[int]


@dataclass(frozen=True)
class Question:
    """What of a prompt its answer is judged by: its ids, and its tools as JSON text."""

    input_ids: Sequence[int] = ()
    tools: str | None = None


def judge(
    answer: Answer,
    settings: GenerateSettings,
    question: Question = Question(),
    thinking_ids: dict[str, int] | None = None,
) -> Outcome:
    """Apply the run's rules to one answer; a rejected one keeps its ids, to be looked at.

    `thinking_ids` are the ids of `<think>` and `</think>`, for a target that has them.
    """
    end = _end_token(answer)
    content = answer.output_ids if end is None else _without_end(answer.output_ids, end)
    output_ids = content if end is None else [*content, end]
    reason = (
        _finish_fault(answer, settings)
        or _content_fault(content, settings)
        or _thinking_fault(content, settings, question, thinking_ids or {})
        or _calls_fault(answer, settings, question, thinking_ids or {})
    )
    return Outcome("rejected" if reason else "completed", reason, output_ids)


def is_aborted(answer: Answer) -> bool:
    """Whether the server gave the request up, which says nothing about the prompt."""
    return answer.finish_reason.get("type") == "abort"


def repeated_share(ids: Sequence[int], n: int = NGRAM) -> float:
    """Share of the n-grams of `ids` that occurred before; 0 for fewer ids than n."""
    grams = len(ids) - n + 1
    if grams < 1:
        return 0.0
    return 1 - len(set(zip(*(ids[start : start + grams] for start in range(n)), strict=True))) / grams


def _end_token(answer: Answer) -> int | None:
    matched = answer.finish_reason.get("matched")
    return matched if answer.finish_reason.get("type") == "stop" and isinstance(matched, int) else None


def _finish_fault(answer: Answer, settings: GenerateSettings) -> str | None:
    kind = answer.finish_reason.get("type")
    if is_aborted(answer):
        return "aborted"
    if kind == "length":
        # SGLang also says `length` when its own context ran out, and some versions when they aborted.
        if len(answer.output_ids) < settings.max_new_tokens:
            return "cut short"
        return "truncated" if settings.truncated == "reject" else None
    if kind == "stop":
        # No stop strings are sent; SGLang reports logits that are not numbers as a match of such a string.
        return "no end token" if _end_token(answer) is None else None
    return "unknown finish"


def _content_fault(content: Sequence[int], settings: GenerateSettings) -> str | None:
    if not content:
        return "empty answer"
    if settings.max_repetition >= 1:
        return None
    return "repetition" if repeated_share(content) > settings.max_repetition else None


def _thinking_fault(
    content: Sequence[int], settings: GenerateSettings, question: Question, ids: dict[str, int]
) -> str | None:
    if settings.unclosed_thinking == "keep" or THINK not in ids or END_THINK not in ids:
        return None
    for part in (content, question.input_ids):
        if mark := _last_mark(part, ids):
            return "unclosed thinking" if mark == THINK else None
    return None


def _last_mark(part: Sequence[int], ids: dict[str, int]) -> str | None:
    names = {ids[mark]: mark for mark in (THINK, END_THINK) if mark in ids}
    return next((names[token] for token in reversed(part) if token in names), None)


def _calls_fault(answer: Answer, settings: GenerateSettings, question: Question, ids: dict[str, int]) -> str | None:
    # A truncated answer is kept or rejected as such: its last call cannot be whole.
    if settings.tool_calls == "keep" or question.tools is None or answer.finish_reason.get("type") != "stop":
        return None
    # Many templates end the prompt with <think>, so that the answer holds the closing mark alone.
    thinks = answer.text.lstrip().startswith(THINK) or _last_mark(question.input_ids, ids) == THINK
    # What is thought about a call is no call.
    said = answer.text.partition(END_THINK)[2] if thinks else answer.text
    return calls_fault(said, question.tools)


def _without_end(ids: list[int], end: int) -> list[int]:
    length = len(ids)
    while length and ids[length - 1] == end:
        length -= 1
    return ids[:length]
