"""Tools, calls and results that a data set writes as XML into the turns' text (the Hermes form), made structure.

The target has a form of its own for all three, and its template writes it: what stays here would contradict that.
"""

import re
from collections.abc import Mapping
from typing import Any

from services.prompts.tools import UnreadableError, parse, tool_name, tool_schemas

TOOLS = re.compile(r"<tools>((?:(?!<tools>).)*?)</tools>", re.DOTALL)
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
RESPONSE = re.compile(r"<tool_response>(.*?)</tool_response>", re.DOTALL)
SENTENCE = re.compile(r"(?<=[.:!?])\s+|\n+")
MARKS = re.compile(r"</?(tools|tool_call|tool_response)>")


def take_tools(system: str) -> tuple[str, list[dict[str, Any]] | None]:
    """The system prompt without its tools and without how to call them, and the tools' schemas.

    The marks are also named in passing ("within <tools></tools> XML tags"), so the pair that holds a list counts.

    Raises:
        UnreadableError: a pair holds something, but no tools.
    """
    filled = [match for match in TOOLS.finditer(system) if match.group(1).strip()]
    if not filled:
        return system, None
    for match in filled:
        try:
            schemas = tool_schemas(_listed(match.group(1)))
        except UnreadableError:
            continue
        before, after = system[: match.start()], system[match.end() :]
        kept = (_without_protocol(before), _without_protocol(_past_example(after)))
        return "\n\n".join(text for text in kept if text), schemas
    raise UnreadableError("the tools in the system prompt cannot be read")


def take_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """An answer's text without its calls, and the calls as OpenAI tool calls with their arguments as a mapping.

    Raises:
        UnreadableError: a call cannot be read.
    """
    return CALL.sub("", text).strip(), [tool_call(parse(call.strip())) for call in CALL.findall(text)]


def take_results(text: str) -> list[str]:
    """The results in a tool's turn, one for each pair of marks; the whole text where there are none."""
    return [result.strip() for result in RESPONSE.findall(text)] or [text]


def tool_call(call: Any) -> dict[str, Any]:
    """One OpenAI tool call. Templates walk through the arguments as a mapping; OpenAI's own form is a JSON string.

    Raises:
        UnreadableError: it has no name, or its arguments are no mapping.
    """
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise UnreadableError("a call has no name")
    arguments = parse(function.get("arguments") or {})
    if not isinstance(arguments, Mapping):
        raise UnreadableError("a call's arguments are no mapping")
    return {"type": "function", "function": {"name": tool_name(function["name"]), "arguments": dict(arguments)}}


def _listed(text: str) -> Any:
    """The list in the text; also of objects that only follow each other, one a line."""
    try:
        return parse(text.strip())
    except UnreadableError:
        return [parse(line) for line in text.strip().splitlines() if line.strip()]


def _past_example(text: str) -> str:
    """What follows the last example of a call: up to there the text says how a call is to be written."""
    examples = list(CALL.finditer(text))
    return text[examples[-1].end() :] if examples else text


def _without_protocol(text: str) -> str:
    """Without the sentences that name the marks, and without one that announces the list."""
    sentences = [sentence.strip() for sentence in SENTENCE.split(text) if sentence.strip()]
    kept = [sentence for sentence in sentences if not MARKS.search(sentence) and not sentence.endswith(":")]
    return " ".join(kept)
