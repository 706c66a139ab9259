"""Function lists as data sets write them, made OpenAI tool schemas."""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

JSON_TYPES = {"string", "number", "integer", "boolean", "array", "object", "null"}

# Type names of other languages, as BFCL and others write them; "any" is a schema without a type.
TYPE_NAMES = {
    "dict": "object",
    "hashmap": "object",
    "map": "object",
    "list": "array",
    "tuple": "array",
    "set": "array",
    "arraylist": "array",
    "array": "array",
    "str": "string",
    "string": "string",
    "char": "string",
    "int": "integer",
    "long": "integer",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "boolean": "boolean",
}
FORBIDDEN_IN_NAME = re.compile(r"[^a-zA-Z0-9_-]")


class UnreadableError(ValueError):
    """Text that is neither JSON nor a Python literal, or a value of the wrong shape."""


def parse(value: Any) -> Any:
    """What a text holds as JSON or as a Python literal; a value that is no text is returned as it is.

    Raises:
        UnreadableError: it is neither.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise UnreadableError("neither JSON nor a Python literal") from error


def tool_schemas(value: Any) -> list[dict[str, Any]] | None:
    """OpenAI tool schemas from a list of functions, or of tools, or one of them; as values or as text.

    Returns None when there are none.

    Raises:
        UnreadableError: it holds no such list, or two functions have one name.
    """
    functions = parse(value) if value != "" else None
    if isinstance(functions, Mapping):
        functions = [functions]
    if not functions:
        return None
    if not isinstance(functions, list):
        raise UnreadableError("tools are no list")
    schemas = [_tool_schema(function) for function in functions]
    if len({schema["function"]["name"] for schema in schemas}) < len(schemas):
        raise UnreadableError("two tools have one name")
    return schemas


def tool_name(name: str) -> str:
    """The name with OpenAI's alphabet: `math.factorial` becomes `math_factorial`."""
    return FORBIDDEN_IN_NAME.sub("_", name)


def _tool_schema(function: Any) -> dict[str, Any]:
    if isinstance(function, Mapping) and isinstance(function.get("function"), Mapping):
        function = function["function"]
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise UnreadableError("a tool has no name")
    parameters = _json_schema(function.get("parameters") or {})
    if not isinstance(parameters.get("properties") or {}, Mapping):
        raise UnreadableError("a tool's properties are no mapping")
    description = function.get("description")
    return {
        "type": "function",
        "function": {
            "name": tool_name(function["name"]),
            "description": description if isinstance(description, str) else "",
            "parameters": {**parameters, "type": "object", "properties": parameters.get("properties") or {}},
        },
    }


def _json_schema(schema: Any) -> dict[str, Any]:
    """The schema with JSON's type names. Only schemas are walked: a property may well be called "type"."""
    if not isinstance(schema, Mapping):
        raise UnreadableError("a parameter has no schema")
    # A struct column of Parquet gives every row the fields of all rows: null is a field that is not there.
    fixed = {key: value for key, value in schema.items() if value is not None}
    named = fixed.pop("type", None)
    types = [_json_type(name) for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)]
    if types and None not in types:
        fixed = {"type": types if isinstance(named, list) else types[0], **fixed}
    if not isinstance(fixed.get("required", []), list):
        del fixed["required"]  # a flag on the property itself, which JSON Schema does not know
    if isinstance(properties := fixed.get("properties"), Mapping):
        fixed["properties"] = {name: _json_schema(child) for name, child in properties.items() if child is not None}
    if isinstance(fixed.get("items"), Mapping):
        fixed["items"] = _json_schema(fixed["items"])
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(fixed.get(key), list):
            fixed[key] = [_json_schema(child) for child in fixed[key]]
    return fixed


def _json_type(name: str) -> str | None:
    if name in JSON_TYPES:
        return name
    return TYPE_NAMES.get(name.lower())
