"""What becomes of an answer: completed, or rejected with a reason. Pure, so that every rule is easily shown."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from services.settings import GenerateSettings

NGRAM = 8


@dataclass(frozen=True)
class Answer:
    """What SGLang's /generate returned: the ids it emitted, and its finish_reason as it gives it."""

    output_ids: list[int]
    finish_reason: dict[str, Any]
    server: str


@dataclass(frozen=True)
class Outcome:
    """`output_ids` of a stopped answer end with its end-of-turn token, exactly once."""

    status: Literal["completed", "rejected"]
    reason: str | None
    output_ids: list[int]


def judge(answer: Answer, settings: GenerateSettings) -> Outcome:
    """Apply the run's rules to one answer; a rejected one keeps its ids, to be looked at."""
    end = _end_token(answer)
    content = answer.output_ids if end is None else _without_end(answer.output_ids, end)
    output_ids = content if end is None else [*content, end]
    reason = _finish_fault(answer, settings) or _content_fault(content, settings)
    return Outcome("rejected" if reason else "completed", reason, output_ids)


def is_aborted(answer: Answer) -> bool:
    """Whether the server gave the request up, which says nothing about the prompt."""
    return answer.finish_reason.get("type") == "abort"


def repeated_share(ids: Sequence[int], n: int = NGRAM) -> float:
    """Share of the n-grams of `ids` that occurred before; 0 for fewer ids than n."""
    grams = len(ids) - n + 1
    if grams < 1:
        return 0.0
    return 1 - len({tuple(ids[start : start + n]) for start in range(grams)}) / grams


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
    return "repetition" if repeated_share(content) > settings.max_repetition else None


def _without_end(ids: list[int], end: int) -> list[int]:
    length = len(ids)
    while length and ids[length - 1] == end:
        length -= 1
    return ids[:length]
