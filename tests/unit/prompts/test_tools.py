"""Function lists of any writing become OpenAI tool schemas."""

import json
from typing import Any

import pytest

from services.prompts.tools import UnreadableError, tool_schemas


def parameters(schema: dict[str, Any]) -> dict[str, Any]:
    schemas = tool_schemas([{"name": "f", "parameters": schema}])
    assert schemas
    found: dict[str, Any] = schemas[0]["function"]["parameters"]
    return found


def test_type_names_become_those_of_json_schema_at_every_depth() -> None:
    schema = {
        "type": "dict",
        "properties": {
            "point": {"type": "tuple", "items": {"type": "float"}},
            "options": {"type": "dict", "properties": {"deep": {"type": "dict", "properties": {}}}},
            "either": {"anyOf": [{"type": "String"}, {"type": "null"}]},
            "free": {"type": "any", "description": "whatever"},
            "known": {"type": "integer", "default": 1},
        },
        "required": ["point"],
    }
    assert parameters(schema) == {
        "type": "object",
        "properties": {
            "point": {"type": "array", "items": {"type": "number"}},
            "options": {"type": "object", "properties": {"deep": {"type": "object", "properties": {}}}},
            "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "free": {"description": "whatever"},
            "known": {"type": "integer", "default": 1},
        },
        "required": ["point"],
    }


def test_a_property_may_be_called_type() -> None:
    schema = {"type": "dict", "properties": {"type": {"type": "string", "enum": ["dict"]}}}
    assert parameters(schema)["properties"] == {"type": {"type": "string", "enum": ["dict"]}}


def test_properties_that_a_parquet_struct_filled_with_null_are_left_out() -> None:
    assert parameters({"type": "object", "properties": {"x": {"type": "int"}, "y": None}})["properties"] == {
        "x": {"type": "integer"}
    }


def test_names_get_openais_alphabet() -> None:
    schemas = tool_schemas([{"name": "math.factorial"}])
    assert schemas
    assert schemas[0]["function"]["name"] == "math_factorial"


def test_json_python_literals_and_wrapped_tools_are_read_alike() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "it's", "parameters": {"type": "object"}}}
    expected = tool_schemas([tool])
    assert expected
    assert tool_schemas(json.dumps([tool])) == expected
    assert tool_schemas(str([tool])) == expected
    assert tool_schemas(tool) == expected
    assert tool_schemas([tool["function"]]) == expected
    assert tool_schemas(expected) == expected


@pytest.mark.parametrize("nothing", [None, "", "[]", [], "null"])
def test_no_tools_are_none(nothing: Any) -> None:
    assert tool_schemas(nothing) is None


@pytest.mark.parametrize(
    "wrong",
    [
        "text",
        "[1",
        3,
        [3],
        [{}],
        [{"name": ""}],
        [{"name": "f", "parameters": [1]}],
        [{"name": "a.b"}, {"name": "a_b"}],
    ],
)
def test_what_is_no_list_of_functions_is_refused(wrong: Any) -> None:
    with pytest.raises(UnreadableError):
        tool_schemas(wrong)


def test_fields_that_are_null_or_no_json_schema_are_left_out() -> None:
    schema = {
        "type": "object",
        "properties": {"x": {"type": ["str", "null"], "enum": None, "required": True}, "y": {"type": ["any", "str"]}},
    }
    assert parameters(schema)["properties"] == {"x": {"type": ["string", "null"]}, "y": {}}
