"""From a row of any known shape to a conversation that awaits an answer.

What cannot become a prompt is rejected with a reason, one word that accounts and reports use.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from services.prompts.tool_text import take_calls, take_results, take_tools, tool_call
from services.prompts.tools import UnreadableError, parse, tool_name, tool_schemas
from services.settings import RowsSettings

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

# Reasons that tell of a row that is not of the shape it should have; the others tell of a conversation that is no
# prompt, or not a wanted one.
FAULTS = {
    "not_utf8",
    "not_json",
    "not_an_object",
    "row_too_long",
    "missing_column",
    "unreadable",
    "not_text",
    "not_a_list",
    "not_a_turn",
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


def adapt(row: Mapping[str, Any], shape: RowsSettings) -> Conversation:
    """The conversation of one row.

    Raises:
        Rejected: with the reason.
    """
    for column in (shape.column, shape.input_column, shape.tools_column):
        if column is not None and column not in row:
            raise Rejected("missing_column")
    try:
        tools = tool_schemas(row[shape.tools_column]) if shape.tools_column else None
    except UnreadableError:
        raise Rejected("bad_tools") from None
    try:
        turns = TURNS[shape.adapter](row[shape.column])
    except UnreadableError:
        raise Rejected("unreadable") from None
    if shape.tools_in_system:
        turns, in_system = _with_structure(turns)
        tools = tools or in_system
    messages = _up_to_open_turn(turns) if shape.prompt == "last_turn" else _first_turn(turns)
    if shape.input_column:
        messages[-1]["content"] += _input(row[shape.input_column])
    if shape.instruction:
        messages[-1]["content"] = f"{shape.instruction}\n\n{messages[-1]['content']}"
    return Conversation(messages, tools)


def from_messages(value: Any) -> list[dict[str, Any]]:
    """OpenAI messages; of a list of such lists (one a user turn, as in BFCL) the first, which awaits no answer."""
    turns = parse(value)
    if isinstance(turns, list) and turns and isinstance(turns[0], list):
        turns = turns[0]
    return [_message(turn, "role", "content", MESSAGE_ROLES) for turn in _listed(turns)]


def from_sharegpt(value: Any) -> list[dict[str, Any]]:
    """ShareGPT turns: {"from": "human", "value": "..."}."""
    return [_message(turn, "from", "value", SHAREGPT_ROLES) for turn in _listed(parse(value))]


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


TURNS: dict[str, Callable[[Any], list[dict[str, Any]]]] = {
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
        message["tool_calls"] = _tool_calls(turn["tool_calls"])
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
    return "".join(_part(part) for part in content)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = str(part.get("type")) if isinstance(part, Mapping) else ""
    for medium in ("image", "audio", "video"):
        if medium in kind:
            raise Rejected(f"has_{medium}")
    if kind != "text" or not isinstance(part.get("text"), str):
        raise Rejected("not_text")
    return str(part["text"])


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    try:
        return [tool_call(call) for call in _listed(parse(calls))]
    except UnreadableError:
        raise Rejected("bad_tool_call") from None


def _with_structure(turns: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """The turns with tools, calls and results taken out of their texts, and the tools."""
    structured: list[dict[str, Any]] = []
    tools = None
    for turn in turns:
        if turn["role"] == "system":
            try:
                text, tools = take_tools(turn["content"])
            except UnreadableError:
                raise Rejected("bad_tools") from None
            # A system prompt that only told of the tools has nothing left to say.
            structured += [{**turn, "content": text}] if text or tools is None else []
        elif turn["role"] == "assistant":
            try:
                text, calls = take_calls(turn["content"])
            except UnreadableError:
                raise Rejected("bad_tool_call") from None
            structured.append({**turn, "content": text, "tool_calls": calls} if calls else turn)
        elif turn["role"] == "tool":
            structured += [{**turn, "content": text} for text in take_results(turn["content"])]
        else:
            structured.append(turn)
    return structured, tools


def _input(text: Any) -> str:
    if text is None:
        return ""
    if not isinstance(text, str):
        raise Rejected("not_text")
    return f"\n\n{text}" if text.strip() else ""


def _first_turn(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The system prompt, if there is one, and the first user turn."""
    first = next((index for index, message in enumerate(messages) if message["role"] == "user"), len(messages))
    return _up_to_open_turn(messages[: first + 1])


def _up_to_open_turn(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cut the answer that is there already, and check what is left."""
    open_turn = max((i for i, message in enumerate(messages) if message["role"] in {"user", "tool"}), default=None)
    if open_turn is None:
        raise Rejected("only_system" if all(message["role"] == "system" for message in messages) else "no_user_turn")
    kept = messages[: open_turn + 1]
    before: str | None = None
    for message in kept:
        if message["role"] not in FOLLOWERS[before]:
            raise Rejected("broken_alternation")
        if not message["content"].strip() and "tool_calls" not in message:
            raise Rejected("empty_turn")
        before = message["role"]
    return kept
