"""The tool-call formats of the models served here, by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Protocol

from sglang.srt.parser.events import CallArguments, CallStart, Content, Event, partial_suffix
from sglang.srt.parser.qwen3_coder import CALL_CLOSE, CALL_OPEN, Qwen3CoderParser


class ToolCallParser(Protocol):
    """Text in, events out; the result does not depend on how the text is cut."""

    def push(self, text: str) -> list[Event]:
        """More text."""

    def finish(self, *, complete: bool) -> list[Event]:
        """No more text; `complete` False if the model was cut off, so a call stays open."""


class QwenJsonParser:
    """Calls as JSON: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    A call goes out when it is complete; what is no such JSON stays text.
    """

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        self._buffer = ""
        self._index = -1

    def push(self, text: str) -> list[Event]:
        """More text."""
        self._buffer += text
        events: list[Event] = []
        while (at := self._buffer.find(CALL_OPEN)) >= 0:
            end = self._buffer.find(CALL_CLOSE, at)
            if end < 0:
                events += self._content(self._buffer[:at].rstrip("\n"))
                self._buffer = self._buffer[at:]
                return events
            events += self._content(self._buffer[:at].rstrip("\n"))
            events += self._call(self._buffer[at + len(CALL_OPEN) : end])
            self._buffer = self._buffer[end + len(CALL_CLOSE) :]
        keep = partial_suffix(self._buffer, (CALL_OPEN,))
        safe = self._buffer[: len(self._buffer) - keep].rstrip("\n")
        events += self._content(safe)
        self._buffer = self._buffer[len(safe) :]
        return events

    def finish(self, *, complete: bool) -> list[Event]:
        """No more text; a call without its closing tag counts if its JSON is whole."""
        text, self._buffer = self._buffer, ""
        if text.startswith(CALL_OPEN):
            return self._call(text[len(CALL_OPEN) :])
        return self._content(text)

    def _content(self, text: str) -> list[Event]:
        return [Content(text)] if (text.strip() if self._index >= 0 else text) else []

    def _call(self, text: str) -> list[Event]:
        try:
            value = json.loads(text)
            name, arguments = value["name"], value.get("arguments", {})
        except (ValueError, TypeError, KeyError, AttributeError):
            return [Content(CALL_OPEN + text + CALL_CLOSE)]
        self._index += 1
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return [CallStart(self._index, str(name)), CallArguments(self._index, arguments)]


class ForcedCallsParser:
    """The JSON list that a forced tool choice constrains the model to.

    `[{"name": ..., "parameters": {...}}, ...]`. A call starts once its name is there, its arguments go
    out as they come, and of a list that is cut off what has come stays a call. Text that is no such
    list stays text.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._index = -1
        self._in_arguments = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> list[Event]:
        """More text."""
        self._text += text
        events: list[Event] = []
        while True:
            if self._in_arguments:
                events += self._arguments()
                if self._in_arguments:
                    return events
            start = _FORCED_CALL.match(self._text, self._at)
            if start is None:
                return events
            self._at = start.end()
            self._index += 1
            self._in_arguments = True
            events.append(CallStart(self._index, json.loads(start["name"])))

    def finish(self, *, complete: bool) -> list[Event]:
        """No more text. What was cut off before the first name is dropped: it says nothing yet."""
        rest = self._text[self._at :]
        if self._index >= 0 or not rest or (not complete and rest.lstrip()[:1] == "["):
            return []
        return [Content(self._text)]

    def _arguments(self) -> list[Event]:
        """What there is of the object at hand, up to the brace that closes it."""
        begin = self._at
        while self._in_arguments and self._at < len(self._text):
            char = self._text[self._at]
            self._at += 1
            if self._in_string:
                self._in_string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                self._in_arguments = self._depth > 0
        piece = self._text[begin : self._at]
        return [CallArguments(self._index, piece)] if piece else []


_FORCED_CALL = re.compile(
    r"[\s\[,}]*\{\s*\"name\"\s*:\s*(?P<name>\"(?:[^\"\\]|\\.)*\")\s*,\s*\"parameters\"\s*:\s*(?=\{)"
)
"""From the end of one call's arguments to the beginning of the next one's."""

PARSERS: dict[str, Callable[[list[dict[str, Any]]], ToolCallParser]] = {
    "qwen3_coder": Qwen3CoderParser,
    "qwen25": QwenJsonParser,
    "qwen": QwenJsonParser,
}


def parser_for_template(template: str) -> str | None:
    """The name of the format that a chat template teaches the model."""
    if "<tool_call>" not in template:
        return None
    return "qwen3_coder" if "<function=" in template else "qwen25"


_COMPACT = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""llguidance's options for JSON as `json.dumps` writes it: nobody sees the blanks of a forced call."""


def forced_calls_schema(
    tools: list[dict[str, Any]], *, name: str | None, single: bool = False
) -> dict[str, Any]:
    """JSON schema of a forced choice: one call of `name`, or any calls (`single`: one).

    Raises: KeyError.
    """
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if name is not None:
        functions = {name: functions[name]}
    calls, definitions = [], {}
    for index, (each, function) in enumerate(functions.items()):
        parameters = {"type": "object", **(function.get("parameters") or {})}
        definitions[str(index)] = _rebased(parameters, f"#/$defs/{index}")
        properties = {"name": {"const": each}, "parameters": {"$ref": f"#/$defs/{index}"}}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if single or name is not None:
        schema["maxItems"] = 1
    return {**schema, "$defs": definitions, "x-guidance": _COMPACT}


def _rebased(schema: Any, root: str) -> Any:
    """`schema` for use at `root` of another: its references to itself point there."""
    if isinstance(schema, list):
        return [_rebased(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _rebased(value, root) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved
