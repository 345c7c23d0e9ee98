"""What a tool's JSON schema says about its parameters, and values in its types."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def parameter_schemas(tools: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """{function name: {parameter name: its JSON schema}}."""
    found: dict[str, dict[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        found[function["name"]] = properties if isinstance(properties, dict) else {}
    return found


def types_of(schema: Any) -> set[str]:
    """JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, dict):
        return set()
    kind = schema.get("type")
    found = {kind} if isinstance(kind, str) else set(kind if isinstance(kind, list) else ())
    for branch in ("anyOf", "oneOf"):
        for choice in schema.get(branch) or ():
            found |= types_of(choice)
    if not found and isinstance(schema.get("enum"), list):
        found = {"string"} if all(isinstance(v, str) for v in schema["enum"]) else {"object"}
    return found


def convert_value(text: str, schema: Any) -> Any:
    """A parameter's text as the JSON value that its schema asks for, else the text."""
    if text.strip() == "null":
        return None
    types = types_of(schema)
    for kind, convert in _CONVERTERS.items():
        if kind in types:
            try:
                return convert(text.strip())
            except ValueError:
                continue
    return text


def _number(text: str) -> int | float:
    value = float(text)
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError("not a JSON number")
    return value


def _boolean(text: str) -> bool:
    lowered = text.lower()
    if lowered not in ("true", "false"):
        raise ValueError("not a boolean")
    return lowered == "true"


def _json_of(kind: type) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        value = json.loads(text)
        if not isinstance(value, kind):
            raise ValueError(f"not a JSON {kind.__name__}")
        return value

    return convert


def _number_keeping_ints(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return _number(text)


_CONVERTERS: dict[str, Callable[[str], Any]] = {
    "integer": int,
    "number": _number_keeping_ints,
    "boolean": _boolean,
    "object": _json_of(dict),
    "array": _json_of(list),
}
