"""From a row of any known shape to a conversation that awaits an answer.

Each adapter is a pure function of one column's value. What cannot become a prompt is rejected with a reason,
one word that accounts and reports use.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from services.prompts.tools import UnreadableError, parse, tool_name, tool_schemas
from services.settings import SourceSettings

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
MESSAGE_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}

# Which role may follow which: a prompt is a conversation that could have been held.
FOLLOWERS = {
    None: {"system", "user"},
    "system": {"user"},
    "user": {"assistant"},
    "assistant": {"user", "tool"},
    "tool": {"tool", "assistant", "user"},
}


class Rejected(Exception):  # noqa: N818 - a row's fate, not a fault of the program
    """This row is no prompt; its text is the reason."""


@dataclass(frozen=True)
class Conversation:
    """OpenAI messages up to the user (or tool) turn that awaits an answer, and OpenAI tool schemas."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


def adapt(row: Mapping[str, Any], source: SourceSettings) -> Conversation:
    """The conversation of one row.

    Raises:
        Rejected: with the reason.
    """
    if source.column not in row or (source.tools_column and source.tools_column not in row):
        raise Rejected("missing_column")
    try:
        tools = tool_schemas(row[source.tools_column]) if source.tools_column else None
    except UnreadableError:
        raise Rejected("bad_tools") from None
    try:
        messages = ADAPTERS[source.adapter](row[source.column])
    except UnreadableError:
        raise Rejected("unreadable") from None
    if source.instruction:
        messages[-1]["content"] = f"{source.instruction}\n\n{messages[-1]['content']}"
    return Conversation(messages, tools)


def from_messages(value: Any) -> list[dict[str, Any]]:
    """OpenAI messages; of a list of such lists (one a user turn, as in BFCL) the first, which awaits no answer."""
    turns = parse(value)
    if isinstance(turns, list) and turns and isinstance(turns[0], list):
        turns = turns[0]
    return _up_to_open_turn([_message(turn, "role", "content", MESSAGE_ROLES) for turn in _listed(turns)])


def from_sharegpt(value: Any) -> list[dict[str, Any]]:
    """ShareGPT turns: {"from": "human", "value": "..."}."""
    return _up_to_open_turn([_message(turn, "from", "value", SHAREGPT_ROLES) for turn in _listed(parse(value))])


def from_turns(value: Any) -> list[dict[str, Any]]:
    """A list of user turns, as in MT-bench: the first, since the later ones await the answers before them."""
    return from_question(_listed(value)[0])


def from_question(value: Any) -> list[dict[str, Any]]:
    """One question as text."""
    if not isinstance(value, str):
        raise Rejected("not_text")
    if not value.strip():
        raise Rejected("empty_turn")
    return [{"role": "user", "content": value}]


ADAPTERS: dict[str, Callable[[Any], list[dict[str, Any]]]] = {
    "messages": from_messages,
    "sharegpt": from_sharegpt,
    "turns": from_turns,
    "question": from_question,
}


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise Rejected("not_a_list")
    if not value:
        raise Rejected("no_turns")
    return value


def _message(turn: Any, role_key: str, text_key: str, roles: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(turn, Mapping) or role_key not in turn:
        raise Rejected("not_a_turn")
    role = roles.get(str(turn[role_key]))
    if role is None:
        raise Rejected("unknown_role")
    message: dict[str, Any] = {"role": role, "content": _text(turn.get(text_key))}
    if role == "assistant" and turn.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call) for call in _listed(parse(turn["tool_calls"]))]
    elif not message["content"].strip():
        raise Rejected("empty_turn")
    if role == "assistant" and isinstance(reasoning := turn.get("reasoning_content"), str) and reasoning:
        message["reasoning_content"] = reasoning
    if role == "tool" and isinstance(name := turn.get("name"), str) and name:
        message["name"] = tool_name(name)
    return message


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Rejected("not_text")
    parts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise Rejected("not_text")
        parts.append(part["text"])
    return "".join(parts)


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Rejected("bad_tool_call")
    # Templates walk through the arguments as a mapping; OpenAI's own form is a JSON string.
    arguments = parse(function.get("arguments") or {})
    if not isinstance(arguments, Mapping):
        raise Rejected("bad_tool_call")
    return {"type": "function", "function": {"name": tool_name(function["name"]), "arguments": dict(arguments)}}


def _up_to_open_turn(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cut the answer that is there already, and check what is left."""
    open_turn = max((i for i, message in enumerate(messages) if message["role"] in {"user", "tool"}), default=None)
    if open_turn is None:
        raise Rejected("no_user_turn")
    kept = messages[: open_turn + 1]
    before: str | None = None
    for message in kept:
        if message["role"] not in FOLLOWERS[before]:
            raise Rejected("broken_alternation")
        before = message["role"]
    return kept
