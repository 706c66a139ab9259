"""Whether the tool calls in an answer can be read: JSON or Qwen's XML between <tool_call> tags."""

import json
import re
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
PARAMETERS = re.compile(r"(?:\s*<parameter=[^>\s]+>.*?</parameter>)*\s*", re.DOTALL)


def calls_fault(text: str, tools: str) -> str | None:
    """What is wrong with the answer's calls, given the prompt's tools as JSON text; None for an answer without."""
    names = {_name(tool) for tool in json.loads(tools)}
    pieces = text.split(OPEN)
    if CLOSE in pieces[0]:
        return "unparsable tool call"
    for piece in pieces[1:]:
        # `</tool_call>` may occur in an argument: the last one ends the call.
        call, closed, _ = piece.rpartition(CLOSE)
        called = _called(call) if closed else None
        if called is None:
            return "unparsable tool call"
        if called not in names:
            return "unknown tool"
    return None


def _called(call: str) -> str | None:
    """Name of the called tool, or None when the call does not parse."""
    if match := FUNCTION.fullmatch(call):
        return match[1] if PARAMETERS.fullmatch(match[2]) else None
    try:
        content = json.loads(call)
    except ValueError:
        return None
    if not isinstance(content, dict) or not isinstance(content.get("arguments", {}), dict):
        return None
    name = content.get("name")
    return name if isinstance(name, str) else None


def _name(tool: dict[str, Any]) -> str | None:
    function: dict[str, Any] = tool.get("function", tool)
    return function.get("name")
