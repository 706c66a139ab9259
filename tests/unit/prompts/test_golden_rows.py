"""One row, written by us, for each data set's shape and each quirk that its files have."""

import json
from typing import Any

import pytest

from services.prompts.adapters import Conversation, Rejected, adapt
from services.settings import RowsSettings

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "It's the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
HERMES_SYSTEM = """You are a function calling AI model. You are provided with function signatures within \
<tools></tools> XML tags. You may call one or more functions. Don't make assumptions about values. \
Here are the available tools:
<tools>
{tools}
</tools>
Use the following pydantic model json schema for each tool call: {{'title': 'FunctionCall', 'type': 'object'}}
For each function call return a json object within <tool_call></tool_call> XML tags as follows:
<tool_call>
{{'arguments': <args-dict>, 'name': <function-name>}}
</tool_call>"""
HERMES_KEPT = (
    "You are a function calling AI model. You may call one or more functions. Don't make assumptions about values."
)


def shape(**keys: Any) -> RowsSettings:
    return RowsSettings.model_validate({"name": "golden", "files": ["rows.jsonl"], **keys})


SHAREGPT = shape(adapter="sharegpt", column="conversations")
HERMES = shape(adapter="sharegpt", column="conversations", tools_column="tools", tools_in_system=True)
MESSAGES = shape(adapter="messages", column="messages")
QUESTION = shape(adapter="question", column="query")


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": role, "value": text} for role, text in pairs]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_infinity_instruct() -> None:
    row = {
        "id": 7,
        "conversations": turns(("human", "Name two primes."), ("gpt", "2 and 3.")),
        "label": None,
        "langdetect": "en",
        "source": "demo",
        "reward": None,
    }
    assert adapt(row, SHAREGPT) == Conversation([user("Name two primes.")])


def test_infinity_instruct_of_several_turns_with_a_system_prompt() -> None:
    pairs = [("system", "Be brief."), ("human", "1+1?"), ("gpt", "2"), ("human", "2+2?"), ("gpt", "4")]
    row = {"conversations": turns(*pairs)}
    system = {"role": "system", "content": "Be brief."}
    whole = [system, user("1+1?"), {"role": "assistant", "content": "2"}, user("2+2?")]
    assert adapt(row, SHAREGPT).messages == whole
    first = SHAREGPT.model_copy(update={"prompt": "first_turn"})
    assert adapt(row, first).messages == [system, user("1+1?")]


def test_web_instruct_sub() -> None:
    row = {
        "orig_question": "?",
        "source": "stackexchange",
        "question": "Why does <b>ice</b> float, $\\rho$?",
        "index": 7,
    }
    found = adapt(row, shape(adapter="question", column="question"))
    assert found == Conversation([user("Why does <b>ice</b> float, $\\rho$?")])


def test_code_feedback_filtered() -> None:
    row = {"query": "Reverse xs.\n```python\nxs = []\n```", "answer": "xs[::-1]", "resource": "demo", "lang": "python"}
    assert adapt(row, QUESTION) == Conversation([user(row["query"])])


def test_code_feedback_with_execution_output_as_user_turns() -> None:
    pairs = [("user", "Sort."), ("assistant", "sorted(x)"), ("user", "Execution: NameError"), ("assistant", "def x")]
    row = {"id": 3, "messages": [{"role": role, "content": text} for role, text in pairs]}
    assert adapt(row, MESSAGES).messages[-1] == user("Execution: NameError")


def test_meta_math_qa() -> None:
    row = {
        "type": "GSM_Rephrased",
        "query": "How many are 3 apples?",
        "original_question": "3 apples?",
        "response": "3",
    }
    assert adapt(row, QUESTION) == Conversation([user("How many are 3 apples?")])


def test_an_instruction_with_an_input() -> None:
    alpaca = shape(adapter="question", column="instruction", input_column="input")
    assert adapt({"instruction": "Sum up.", "input": "A text."}, alpaca).messages == [user("Sum up.\n\nA text.")]
    for nothing in ("", None):
        assert adapt({"instruction": "Sum up.", "input": nothing}, alpaca).messages == [user("Sum up.")]
    with pytest.raises(Rejected, match="missing_column"):
        adapt({"instruction": "Sum up."}, alpaca)
    with pytest.raises(Rejected, match="not_text"):
        adapt({"instruction": "Sum up.", "input": 3}, alpaca)


@pytest.mark.parametrize("listed", [str([WEATHER]), json.dumps([WEATHER]), json.dumps(WEATHER), str(WEATHER)])
@pytest.mark.parametrize("column", [None, "", "[]", json.dumps([WEATHER])])
def test_hermes_with_tools_in_the_system_prompt_or_the_column(listed: str, column: str | None) -> None:
    """Single-turn rows end with the call, which is the answer to come; Python literals stand where JSON should."""
    call = "<tool_call>\n{'name': 'get_weather', 'arguments': {'city': 'Oslo'}}\n</tool_call>"
    system = HERMES_SYSTEM.format(tools=listed)
    row = {
        "id": "x1",
        "conversations": turns(("system", system), ("human", "Rain in Oslo?"), ("gpt", call)),
        "tools": column,
        "category": "Demo",
    }
    found = adapt(row, HERMES)
    assert found.tools == [WEATHER]
    assert found.messages == [{"role": "system", "content": HERMES_KEPT}, user("Rain in Oslo?")]


def test_hermes_with_parallel_calls_and_their_results() -> None:
    calls = (
        "Both.\n<tool_call>\n{'name': 'get_weather', 'arguments': {'city': 'Oslo'}}\n</tool_call>\n"
        '<tool_call>\n{"arguments": "{\\"city\\": \\"Rom\\"}", "name": "get_weather"}\n</tool_call>'
    )
    results = '<tool_response>\n{"rain": true}\n</tool_response>\n<tool_response>\n{"rain": false}\n</tool_response>'
    row = {
        "conversations": turns(
            ("system", HERMES_SYSTEM.format(tools=[WEATHER])),
            ("human", "Rain in Oslo, in Rome?"),
            ("gpt", calls),
            ("tool", results),
            ("gpt", "In Oslo."),
        ),
        "tools": json.dumps([WEATHER]),
    }
    _, _, assistant, *tools = adapt(row, HERMES).messages
    assert assistant["content"] == "Both."
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [{"city": "Oslo"}, {"city": "Rom"}]
    assert [tool["content"] for tool in tools] == ['{"rain": true}', '{"rain": false}']
    assert {tool["role"] for tool in tools} == {"tool"}


def test_hermes_without_tools_keeps_its_system_prompt() -> None:
    system = "You answer in JSON. Here's the schema:\n<schema>\n{}\n</schema>"
    row = {"conversations": turns(("system", system), ("human", "Make one.")), "tools": None}
    assert adapt(row, HERMES) == Conversation([{"role": "system", "content": system}, user("Make one.")])


def test_tags_that_are_only_named_do_not_hide_the_tools() -> None:
    system = f"Tools stand between <tools> and its end. <tools>{[WEATHER]}</tools>"
    row = {"conversations": turns(("system", system), ("human", "Rain?")), "tools": None}
    assert adapt(row, HERMES).tools == [WEATHER]


def test_a_system_prompt_that_only_told_of_tools_is_gone() -> None:
    row = {"conversations": turns(("system", f"<tools>{[WEATHER]}</tools>"), ("human", "Rain?")), "tools": None}
    assert adapt(row, HERMES) == Conversation([user("Rain?")], [WEATHER])


@pytest.mark.parametrize(
    ("system", "answer", "told"),
    [
        ("<tools>\n[{broken\n</tools>", "ok", "bad_tools"),
        (f"<tools>{[WEATHER]}</tools>", "<tool_call>get_weather(Oslo)</tool_call>", "bad_tool_call"),
    ],
)
def test_hermes_that_cannot_be_read_is_rejected(system: str, answer: str, told: str) -> None:
    pairs = [("system", system), ("human", "Rain?"), ("gpt", answer), ("human", "And now?")]
    with pytest.raises(Rejected, match=told):
        adapt({"conversations": turns(*pairs), "tools": None}, HERMES)


def test_a_function_list_with_types_of_another_language() -> None:
    function = {"name": "get.weather", "parameters": {"type": "dict", "properties": {"city": {"type": "String"}}}}
    bfcl = shape(adapter="messages", column="question", tools_column="function")
    (tool,) = adapt({"question": [[user("Rain?")]], "function": [function]}, bfcl).tools or []
    assert tool["function"] == {
        "name": "get_weather",
        "description": "",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }


def test_agent_training_dataset() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "remind", "arguments": '{"at": "9:00"}'}}
    row = {
        "messages": [
            {"role": "system", "content": "You are an agent."},
            {"role": "user", "content": [{"type": "text", "text": "Remind me at 9."}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "ok"},
            {"role": "assistant", "content": "Done.", "tool_calls": None},
        ]
    }
    found = adapt(row, MESSAGES).messages
    assert [message["role"] for message in found] == ["system", "user", "assistant", "tool"]
    assert found[1]["content"] == "Remind me at 9."
    assert found[2] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "remind", "arguments": {"at": "9:00"}}}],
    }


def test_agent_instruct() -> None:
    row = {
        "conversations": [
            {"from": "human", "loss": None, "value": "You are in a kitchen."},
            {"from": "gpt", "loss": False, "value": "OK."},
            {"from": "human", "loss": None, "value": "Find a cup."},
            {"from": "gpt", "loss": True, "value": "Act: look"},
        ],
        "id": "os_0",
    }
    assert [message["content"] for message in adapt(row, SHAREGPT).messages] == [
        "You are in a kitchen.",
        "OK.",
        "Find a cup.",
    ]


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "has_image"),
        ([{"role": "user", "content": [{"type": "text", "text": "Hear"}, {"type": "input_audio"}]}], "has_audio"),
        ([{"role": "user", "content": [{"type": "video"}]}], "has_video"),
        ([{"role": "system", "content": "You are an agent."}], "only_system"),
        ([{"role": "assistant", "content": "Hello."}], "no_user_turn"),
        ([user("Hi"), user("Hello?")], "broken_alternation"),
        ([user("Hi"), {"role": "assistant", "content": ""}, user("Hello?")], "empty_turn"),
    ],
)
def test_what_is_no_prompt(messages: list[dict[str, Any]], told: str) -> None:
    with pytest.raises(Rejected, match=f"^{told}$"):
        adapt({"messages": messages}, MESSAGES)


def test_an_empty_answer_after_the_last_question_does_not_matter() -> None:
    assert adapt({"messages": [user("Hi"), {"role": "assistant", "content": None}]}, MESSAGES).messages == [user("Hi")]
