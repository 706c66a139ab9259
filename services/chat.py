"""From a conversation to token ids: the target's own chat template, and where a reply begins.

A prompt is rendered here once, and its ids go unchanged to the server and into the sample. How text that holds
replies already (older corpora) is masked: services/tokenizer/replies.py.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from services.errors import UserError
from services.target import vocabulary_size

Message = dict[str, Any]
Tool = dict[str, Any]

PROBE = [{"role": "user", "content": "Hello"}]
PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}


TOOLS_PREAMBLE = (
    "You may call one or more functions to answer the user. Their signatures are within <tools></tools>. For each "
    "call, reply with a JSON object of the function's name and arguments within <tool_call></tool_call>."
)


class RenderingError(ValueError):
    """The template does not take this conversation; the message says why."""


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face model folder, with its chat template; nothing is fetched from a hub.

    Raises:
        UserError: there is no such folder, or it lacks a tokenizer or a chat template, its template does not take one
            question, or its tokenizer has more tokens than its model has embeddings.
    """
    if not path.is_dir():
        raise UserError(f"target model {path}: there is no such folder; set target.path")
    if not (path / "tokenizer.json").is_file():
        raise UserError(f"target model {path}: no tokenizer.json; save the model's fast tokenizer there")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"target model {path}: the tokenizer cannot be loaded: {_one_line(error)}") from error
    if not tokenizer.chat_template:
        raise UserError(
            f"target model {path}: the tokenizer has no chat template; take an instruction-tuned model, or put its "
            "chat_template.jinja into the folder"
        )
    try:
        render(tokenizer, PROBE)
    except RenderingError as error:
        raise UserError(
            f"target model {path}: its chat template does not take even one question of a user: {error}; mend "
            "chat_template in its tokenizer_config.json, or chat_template.jinja"
        ) from error
    if len(tokenizer) > (size := vocabulary_size(path)):
        raise UserError(
            f"target model {path}: the tokenizer has {len(tokenizer)} tokens and the model {size} embeddings; "
            "they do not belong together"
        )
    return tokenizer


def template_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the chat template (of all of them, for a tokenizer that has several)."""
    return hashlib.sha256(json.dumps(tokenizer.chat_template, sort_keys=True).encode()).hexdigest()


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    thinking: bool | None = None,
    *,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Token ids of a conversation, by default up to where the target's reply begins.

    Args:
        messages: OpenAI messages.
        tools: OpenAI tool schemas, handed to the template.
        thinking: the template's `enable_thinking`; None leaves it to the template.

    Raises:
        RenderingError: the template refuses the conversation.
    """
    as_ids = {"tokenize": True, "return_dict": False, "add_generation_prompt": add_generation_prompt}
    return list(_apply_template(tokenizer, messages, tools, thinking, as_ids))


def render_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    thinking: bool | None = None,
    *,
    add_generation_prompt: bool = False,
    **options: Any,
) -> str:
    """The text of a conversation, by default whole; its ids are those of `render`, see there.

    Args:
        options: what else the template looks at, such as `preserve_thinking`.

    Raises:
        RenderingError: the template refuses the conversation.
    """
    as_text = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
    return str(_apply_template(tokenizer, messages, tools, thinking, options | as_text))


def _apply_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    thinking: bool | None,
    options: dict[str, Any],
) -> Any:
    switch: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    try:
        return tokenizer.apply_chat_template(list(messages), tools=list(tools) if tools else None, **options, **switch)
    except (TemplateError, TypeError, ValueError) as error:
        raise RenderingError(_one_line(error)) from error


def takes_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the template shows tools to the model; one that does not drops them without a word, or refuses them."""
    try:
        return render(tokenizer, PROBE, [PROBE_TOOL]) != render(tokenizer, PROBE)
    except RenderingError:
        return False


def takes_thinking(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the template looks at `enable_thinking`."""
    return render(tokenizer, PROBE, thinking=True) != render(tokenizer, PROBE, thinking=False)


def with_tools_as_text(messages: Sequence[Message], tools: Sequence[Tool] | None) -> list[Message]:
    """The same conversation for a template without tools: schemas and calls as text, in the Hermes XML form."""
    shown = [_with_calls_as_text(message) for message in messages]
    if not tools:
        return shown
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = f"{TOOLS_PREAMBLE}\n<tools>\n{listed}\n</tools>"
    if shown and shown[0]["role"] == "system":
        return [{"role": "system", "content": f"{shown[0]['content']}\n\n{text}"}, *shown[1:]]
    return [{"role": "system", "content": text}, *shown]


def _with_calls_as_text(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = "\n".join(
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in message["tool_calls"]
    )
    content = message["content"]
    return {"role": message["role"], "content": f"{content}\n{calls}" if content else calls}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
