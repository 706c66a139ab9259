"""Tool calls in an answer: read as JSON or as Qwen's XML, or told to be unreadable."""

import json

import pytest

from services.producer.tool_calls import calls_fault

TOOLS = json.dumps([{"type": "function", "function": {"name": "get_time"}}, {"name": "get_weather"}])
JSON_CALL = '<tool_call>\n{"name": "get_time", "arguments": {"city": "Oslo"}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=day>1</parameter>\n"
    "</function>\n</tool_call>"
)


@pytest.mark.parametrize(
    "text",
    [
        "It is noon.",
        JSON_CALL,
        XML_CALL,
        f"Let me see.\n{JSON_CALL}\n{XML_CALL}",
        '<tool_call>{"name": "get_time"}</tool_call>',
        "<tool_call><function=get_time></function></tool_call>",
        '<tool_call>{"name": "get_time", "arguments": {"city": "</tool_call>"}}</tool_call>',
    ],
)
def test_calls_that_parse_pass(text: str) -> None:
    assert calls_fault(text, TOOLS) is None


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "get_time", "arguments": {"city": "Oslo"}',
        '<tool_call>{"name": "get_time", "arguments": {"city": }}</tool_call>',
        '<tool_call>{"name": "get_time", "arguments": "Oslo"}</tool_call>',
        '<tool_call>["get_time"]</tool_call>',
        "<tool_call><function=get_time><parameter=city>Oslo</function></tool_call>",
        f"{JSON_CALL}<tool_call>",
        "Oslo</tool_call>",
    ],
)
def test_calls_that_do_not_parse_are_told(text: str) -> None:
    assert calls_fault(text, TOOLS) == "unparsable tool call"


def test_a_call_of_a_tool_that_was_not_given_is_told() -> None:
    assert calls_fault(JSON_CALL.replace("get_time", "get_date"), TOOLS) == "unknown tool"
