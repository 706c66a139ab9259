"""Rows of every known shape become conversations that await an answer, or are rejected with a reason."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from services.prompts.adapters import Conversation, Rejected, adapt
from services.prompts.ranking import prompt_id
from services.settings import SourceSettings

USER = {"role": "user", "content": "Hi"}


def source(adapter: str, **more: Any) -> SourceSettings:
    return SourceSettings.model_validate(
        {
            "name": "source",
            "files": [Path("rows.jsonl")],
            "adapter": adapter,
            "column": "column",
            "domain": "general",
            "quota": 1,
            **more,
        }
    )


def messages(adapter: str, value: Any, **more: Any) -> list[dict[str, Any]]:
    return adapt({"column": value}, source(adapter, **more)).messages


def reason(adapter: str, value: Any) -> str:
    with pytest.raises(Rejected) as caught:
        messages(adapter, value)
    return str(caught.value)


def test_a_question_has_its_instruction_before_it() -> None:
    assert messages("question", "def f():\n", instruction="Complete.") == [
        {"role": "user", "content": "Complete.\n\ndef f():\n"}
    ]


def test_of_turns_the_first_is_the_prompt() -> None:
    assert messages("turns", ["Write.", "Now rewrite."]) == [{"role": "user", "content": "Write."}]


def test_sharegpt_turns_are_cut_before_the_answer() -> None:
    turns = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "1+1?"},
        {"from": "gpt", "value": "2"},
        {"from": "human", "value": "2+2?", "weight": None},
        {"from": "gpt", "value": "4"},
    ]
    assert messages("sharegpt", turns) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2?"},
    ]


def test_a_tool_result_awaits_an_answer_too() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "math.add", "arguments": '{"x": 1}'}}
    value = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": "math.add", "content": "2"},
    ]
    found = messages("messages", value)
    assert [message["role"] for message in found] == ["user", "assistant", "tool"]
    assert found[1]["tool_calls"] == [{"type": "function", "function": {"name": "math_add", "arguments": {"x": 1}}}]
    assert found[2]["name"] == "math_add"


def test_messages_may_be_text_parts_json_text_or_one_list_a_user_turn() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]
    assert messages("messages", parts) == [USER]
    assert messages("messages", '[{"role": "user", "content": "Hi"}]') == [USER]
    assert messages("messages", "[{'role': 'user', 'content': 'Hi'}]") == [USER]
    assert messages("messages", [[USER], [{"role": "user", "content": "later"}]]) == [USER]


@pytest.mark.parametrize(
    ("adapter", "value", "told"),
    [
        ("question", None, "not_text"),
        ("question", " \n", "empty_turn"),
        ("turns", [], "no_turns"),
        ("turns", "text", "not_a_list"),
        ("messages", "no list", "unreadable"),
        ("messages", None, "not_a_list"),
        ("messages", [], "no_turns"),
        ("messages", ["Hi"], "not_a_turn"),
        ("messages", [{"role": "user", "content": ""}], "empty_turn"),
        ("messages", [{"role": "user", "content": None}], "empty_turn"),
        ("messages", [{"role": "wizard", "content": "Hi"}], "unknown_role"),
        ("messages", [{"role": "system", "content": "Hi"}], "only_system"),
        ("messages", [{"role": "assistant", "content": "Hi"}], "no_user_turn"),
        ("messages", [USER, USER], "broken_alternation"),
        ("messages", [{"role": "assistant", "content": "Hi"}, USER], "broken_alternation"),
        ("messages", [USER, {"role": "system", "content": "late"}, USER], "broken_alternation"),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "has_image"),
        ("messages", [{"role": "user", "content": [{"type": "input_audio"}]}], "has_audio"),
        ("messages", [{"role": "user", "content": [{"type": "card"}]}], "not_text"),
        (
            "messages",
            [USER, {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": "{}"}}]}, USER],
            "bad_tool_call",
        ),
        ("sharegpt", [{"from": "human"}], "empty_turn"),
        ("sharegpt", [{"value": "Hi"}], "not_a_turn"),
    ],
)
def test_what_is_no_prompt_is_rejected_with_its_reason(adapter: str, value: Any, told: str) -> None:
    assert reason(adapter, value) == told


def test_a_row_without_the_column_is_rejected() -> None:
    with pytest.raises(Rejected, match="missing_column"):
        adapt({"other": "Hi"}, source("question"))
    with pytest.raises(Rejected, match="missing_column"):
        adapt({"column": [USER]}, source("messages", tools_column="tools"))


def test_tools_come_from_their_column() -> None:
    row = {"column": [[USER]], "function": [{"name": "f", "description": "F.", "parameters": {"type": "dict"}}]}
    assert adapt(row, source("messages", tools_column="function")) == Conversation(
        [USER],
        [
            {
                "type": "function",
                "function": {"name": "f", "description": "F.", "parameters": {"type": "object", "properties": {}}},
            }
        ],
    )


def test_tools_that_cannot_be_read_reject_the_row() -> None:
    with pytest.raises(Rejected, match="bad_tools"):
        adapt({"column": [USER], "tools": "none, really"}, source("messages", tools_column="tools"))


def anything(draw: random.Random, depth: int = 0) -> Any:
    """A value as a damaged file may hold one: the right words in the wrong places."""
    words = [
        "",
        "user",
        "gpt",
        "text",
        "object",
        "[]",
        "{[]: 1}",
        "{'a': b''}",
        "\ud800",
        "<tools>[1]</tools>",
        "[" * 9999,
    ]
    keys = ["role", "from", "value", "content", "type", "text", "tool_calls", "function", "name", "arguments"]
    keys += ["parameters", "properties", "items", "anyOf", "required", "description"]
    match draw.randrange(7 if depth < 5 else 4):
        case 0:
            return draw.choice(words)
        case 1:
            return draw.choice([None, True, 0, 10**400, float("nan")])
        case 2 | 3:
            return draw.choice(words[1:4])
        case 4:
            return [anything(draw, depth + 1) for _ in range(draw.randrange(4))]
        case _:
            return {draw.choice(keys): anything(draw, depth + 1) for _ in range(draw.randrange(5))}


@pytest.mark.parametrize("adapter", ["messages", "sharegpt", "turns", "question"])
def test_whatever_a_row_holds_it_is_adapted_or_rejected(adapter: str) -> None:
    draw = random.Random(adapter)
    structured = {"tools_in_system": True} if adapter in {"messages", "sharegpt"} else {}
    shape = source(adapter, tools_column="tools", **structured)
    adapted = 0
    for _ in range(1500):
        row = {"column": anything(draw), "tools": anything(draw) if draw.random() < 0.5 else None}
        if structured and draw.random() < 0.5:
            texts = [(role, anything(draw)) for role in ("system", "user")]
            row["column"] = [{"role": role, "from": role, "content": text, "value": text} for role, text in texts]
        try:
            conversation = adapt(row, shape)
            prompt_id(conversation)
        except Rejected:
            continue
        adapted += 1
        json.dumps(conversation.messages).encode()
    assert adapted > 10
