"""What counts as an answer."""

from typing import Any

import pytest

from services.producer.outcome import Answer, Question, judge, repeated_share
from services.settings import GenerateSettings

END = 2


def _judge(output_ids: list[int], finish_reason: dict[str, Any], **settings: Any) -> tuple[str, str | None, list[int]]:
    outcome = judge(Answer(output_ids, finish_reason, "s"), GenerateSettings(max_new_tokens=16, **settings))
    return outcome.status, outcome.reason, outcome.output_ids


@pytest.mark.parametrize("emitted", [[5, 6, END], [5, 6], [5, 6, END, END]], ids=["with", "without", "doubled"])
def test_a_stopped_answer_ends_with_its_end_token_once(emitted: list[int]) -> None:
    assert _judge(emitted, {"type": "stop", "matched": END}) == ("completed", None, [5, 6, END])


def test_an_end_token_inside_the_answer_stays() -> None:
    assert _judge([5, END, 6], {"type": "stop", "matched": END}) == ("completed", None, [5, END, 6, END])


@pytest.mark.parametrize("emitted", [[], [END]])
def test_an_answer_of_an_end_token_alone_is_empty(emitted: list[int]) -> None:
    assert _judge(emitted, {"type": "stop", "matched": END})[:2] == ("rejected", "empty answer")


def test_a_full_length_answer_is_kept_without_an_end_token() -> None:
    full = list(range(16))
    assert _judge(full, {"type": "length", "length": 16}) == ("completed", None, full)


def test_a_full_length_answer_is_rejected_by_policy() -> None:
    full = list(range(16))
    assert _judge(full, {"type": "length", "length": 16}, truncated="reject") == ("rejected", "truncated", full)


def test_length_counts_only_when_the_limit_was_reached() -> None:
    assert _judge([5, 6, 7], {"type": "length", "length": 3})[:2] == ("rejected", "cut short")


@pytest.mark.parametrize(
    ("finish_reason", "reason"),
    [
        ({"type": "abort", "message": "Aborted"}, "aborted"),
        ({"type": "stop", "matched": "NaN happened"}, "no end token"),
        ({"type": "stop"}, "no end token"),
        ({"type": "later version"}, "unknown finish"),
        ({}, "unknown finish"),
    ],
)
def test_other_ends_are_no_answers(finish_reason: dict[str, Any], reason: str) -> None:
    assert _judge([5, 6], finish_reason)[:2] == ("rejected", reason)


def test_a_loop_is_rejected_and_an_ordinary_answer_is_not() -> None:
    loop, plain = [4, 5] * 20, list(range(4, 44))
    stop = {"type": "stop", "matched": END}
    assert _judge([*loop, END], stop, max_repetition=0.5)[:2] == ("rejected", "repetition")
    assert _judge([*plain, END], stop, max_repetition=0.5)[:2] == ("completed", None)


def test_any_repetition_passes_by_default() -> None:
    assert _judge([7] * 16, {"type": "length", "length": 16})[:2] == ("completed", None)


@pytest.mark.parametrize(
    ("ids", "share"),
    [([], 0.0), ([1] * 7, 0.0), ([1] * 8, 0.0), ([1] * 9, 0.5), ([1] * 17, 0.9), (list(range(30)), 0.0)],
)
def test_repeated_share_counts_grams_seen_before(ids: list[int], share: float) -> None:
    assert repeated_share(ids) == pytest.approx(share)


THINKING_IDS = {"<think>": 90, "</think>": 91}


@pytest.mark.parametrize(
    ("prompt", "answer", "reason"),
    [
        ([1, 90], [5, 91, 6], None),
        ([1, 90], [5, 6], "unclosed thinking"),
        ([1], [90, 5, 91, 6], None),
        ([1], [90, 5], "unclosed thinking"),
        ([1], [5, 6], None),
        ([90, 91], [5, 6], None),
        ([90, 7, 91, 1, 90], [91, 90, 5], "unclosed thinking"),
    ],
)
def test_thinking_has_to_be_closed_by_policy(prompt: list[int], answer: list[int], reason: str | None) -> None:
    emitted = Answer([*answer, END], {"type": "stop", "matched": END}, "s")
    for policy, expected in (("reject", reason), ("keep", None)):
        settings = GenerateSettings(max_new_tokens=16, unclosed_thinking=policy)  # type: ignore[arg-type]
        assert judge(emitted, settings, Question(prompt), THINKING_IDS).reason == expected
        # A target without such tokens cannot leave them open.
        assert judge(emitted, settings, Question(prompt), {}).reason is None


def test_tool_calls_are_checked_where_tools_were_given() -> None:
    tools = '[{"type": "function", "function": {"name": "get_time"}}]'
    text = "<tool_call>{broken</tool_call>"

    def reason(finish: dict[str, Any], tools: str | None, **settings: Any) -> str | None:
        answer = Answer([5, END] if finish["type"] == "stop" else list(range(16)), finish, "s", text)
        return judge(answer, GenerateSettings(max_new_tokens=16, **settings), Question([1], tools)).reason

    stop, length = {"type": "stop", "matched": END}, {"type": "length", "length": 16}
    assert reason(stop, tools) == "unparsable tool call"
    assert reason(stop, tools, tool_calls="keep") is None
    assert reason(stop, None) is None
    # A truncated answer is kept or rejected as such.
    assert reason(length, tools) is None


@pytest.mark.parametrize(
    ("prompt_ids", "text", "fault"),
    [
        ([1, 50], "A <tool_call> is due.</think>\n{call}", None),
        ([1], "<think>A <tool_call> is due.</think>\n{call}", None),
        ([1, 50], "A call is due.</think>\n<tool_call>{broken</tool_call>", "unparsable tool call"),
        ([1, 50], "{call}</think>No call is due.", None),
        # Closed in the prompt: a mark in an argument is an argument's.
        ([1, 50, 51], '<tool_call>{"name": "get_time", "arguments": {"of": "</think>"}}</tool_call>', None),
    ],
)
def test_what_is_thought_about_a_tool_call_is_none(prompt_ids: list[int], text: str, fault: str | None) -> None:
    tools = '[{"type": "function", "function": {"name": "get_time"}}]'
    text = text.replace("{call}", '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>')
    answer = Answer([5, END], {"type": "stop", "matched": END}, "s", text)
    thinking = {"<think>": 50, "</think>": 51}
    assert judge(answer, GenerateSettings(max_new_tokens=16), Question(prompt_ids, tools), thinking).reason == fault
