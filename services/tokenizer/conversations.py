"""Conversations as corpora have them, brought into the form that the target's template shows without loss."""

import json
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from services import chat

THINK, END_THINK = "<think>", "</think>"
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant"}

QUESTION: chat.Message = {"role": "user", "content": "Hello"}


class NoConversationError(ValueError):
    """A row that is no conversation, in few words to be counted by."""


def read_conversation(row: dict[str, Any]) -> tuple[list[chat.Message], list[chat.Tool]]:
    """Messages and tools of a row: OpenAI `messages`, or ShareGPT `conversations`; JSON text of either is read.

    Raises:
        NoConversationError: there is neither, or a message has no role and text.
    """
    found = _parsed(row.get("messages"))
    if found is None and (turns := _parsed(row.get("conversations"))) is not None:
        found = [_from_sharegpt(turn) for turn in _listed(turns)]
    messages = [_message(message) for message in _listed(found)]
    if not messages:
        raise NoConversationError("no_conversation")
    return messages, _tools(row.get("tools"))


class Normalizer:
    """What a template takes, found by rendering probes, and messages changed accordingly.

    - Thinking at the beginning of a reply's content becomes its `reasoning_content`, where the template has one. The
      template would look for the marks itself, and in the wrong place when the answer speaks of them.
    - A call's arguments become a mapping, where the template does not take JSON text.
    - Tools and calls become text, where the template has no tools.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._takes_tools = chat.takes_tools(tokenizer)
        self.takes_reasoning = _shows(tokenizer, {"content": "Hi", "reasoning_content": "considered"}, "considered")
        call = {"type": "function", "function": {"name": "probe", "arguments": '{"x": "1"}'}}
        self._takes_text_arguments = _shows(tokenizer, {"content": "", "tool_calls": [call]}, '{"x": "1"}')

    def __call__(
        self, messages: Sequence[chat.Message], tools: Sequence[chat.Tool]
    ) -> tuple[list[chat.Message], list[chat.Tool]]:
        """Messages and tools for the template."""
        changed = [self._changed(message) for message in messages]
        if not self._takes_tools and (tools or any(message.get("tool_calls") for message in messages)):
            return chat.with_tools_as_text(changed, tools), []
        return changed, list(tools)

    def _changed(self, message: chat.Message) -> chat.Message:
        if message["role"] != "assistant":
            return message
        changed = dict(message)
        if self.takes_reasoning and not isinstance(message.get("reasoning_content"), str):
            changed["reasoning_content"], changed["content"] = split_thinking(message["content"])
        if message.get("tool_calls") and not self._takes_text_arguments:
            changed["tool_calls"] = [_with_mapping(call) for call in message["tool_calls"]]
        return changed


def split_thinking(content: str) -> tuple[str, str]:
    """Thinking and answer of a reply, without the marks and the line breaks that belong to them.

    Thinking opens the reply, or was opened by the prompt already: then its end stands on a line of its own. A mark
    anywhere else is text of the answer.
    """
    opened = content.lstrip()
    if opened.startswith(THINK):
        thinking, end, answer = opened.removeprefix(THINK).partition(END_THINK)
        if end:
            return thinking.strip("\n"), answer.lstrip("\n")
    elif THINK not in content:
        before, end, answer = content.partition(f"\n{END_THINK}\n")
        if end:
            return before.strip("\n"), answer.lstrip("\n")
    return "", content


def _from_sharegpt(turn: Any) -> chat.Message:
    role = SHAREGPT_ROLES.get(str(turn.get("from"))) if isinstance(turn, dict) else None
    if role is None:
        raise NoConversationError("no_conversation")
    return {"role": role, "content": turn.get("value")}


def _message(message: Any) -> chat.Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise NoConversationError("no_conversation")
    # Columns of a Parquet file are there in every row; a template asks only whether a key is there.
    message = {key: value for key, value in message.items() if value is not None}
    if "tool_calls" in message:
        message["tool_calls"] = _calls(message["tool_calls"])
    if not isinstance(message.get("reasoning_content", ""), str):
        raise NoConversationError("not_text")
    content = message.get("content", "" if message.get("tool_calls") else None)
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise NoConversationError("not_text")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise NoConversationError("no_conversation")
    return {**message, "content": content}


def _calls(value: Any) -> list[Any]:
    calls = _parsed(value) if value != "" else []
    if not isinstance(calls, list) or not all(isinstance(_function(call).get("name"), str) for call in calls):
        raise NoConversationError("bad_tool_call")
    return calls


def _function(call: Any) -> dict[str, Any]:
    """What is called; empty for what is no call."""
    function = call.get("function", call) if isinstance(call, dict) else {}
    return function if isinstance(function, dict) else {}


def _tools(value: Any) -> list[chat.Tool]:
    tools = _parsed(value) if value != "" else None
    if not tools:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise NoConversationError("bad_tools")
    return tools


def _with_mapping(call: Any) -> Any:
    function = _function(call)
    arguments = _parsed(function.get("arguments"))
    if not isinstance(arguments, dict):
        raise NoConversationError("arguments_not_json")
    return {**call, "function": {**function, "arguments": arguments}}


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise NoConversationError("not_json") from None


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise NoConversationError("no_conversation")
    return value


def _shows(tokenizer: PreTrainedTokenizerBase, reply: chat.Message, text: str) -> bool:
    try:
        return text in chat.render_text(tokenizer, [QUESTION, {"role": "assistant", **reply}], thinking=None)
    except chat.RenderingError:
        return False
