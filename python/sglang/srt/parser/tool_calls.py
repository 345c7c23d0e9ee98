"""Reads tool calls out of a model's text while it streams."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Protocol

from sglang.srt.parser.events import CallArguments, CallStart, Content, Event, partial_suffix

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"
FUNCTION_CLOSE = "</function>"
PARAMETER_CLOSE = "</parameter>"
PARAMETER_OPEN = "<parameter="
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>")
_AFTER_VALUE = (PARAMETER_OPEN, FUNCTION_CLOSE, CALL_CLOSE)
_VALUE_MARK = re.compile(r"</parameter>|\n</function>|\n<parameter=([^>\n]+)>")
_VALUE_STARTS = (PARAMETER_CLOSE, "\n" + PARAMETER_CLOSE, "\n" + FUNCTION_CLOSE)
_OPEN_PARAMETER_TAIL = re.compile(r"\n?<parameter=[^>\n]*$")


class ToolCallParser(Protocol):
    """Text in, events out; the result does not depend on how the text is cut."""

    def push(self, text: str) -> list[Event]:
        """More text."""

    def finish(self, *, complete: bool) -> list[Event]:
        """No more text; `complete` False if the model was cut off, so a call stays open."""


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


class Qwen3CoderParser:
    """Calls as tags: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...`.

    Text parameters go out in pieces while they arrive. A closing tag counts only where another tag
    or the end follows, so that tag text inside a value survives; missing closing tags are tolerated.
    """

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        self._schemas = parameter_schemas(tools)
        self._buffer = ""
        self._final = False
        self._complete = True
        self._step: Callable[[], bool] = self._outside
        self._events: list[Event] = []
        self._index = -1
        self._parameters: dict[str, Any] = {}
        self._seen: set[str] = set()
        self._key = ""
        self._streams_text = False
        self._value_begun = False
        self._value = ""
        self._undecided_at = 0

    def push(self, text: str) -> list[Event]:
        """More text."""
        self._buffer += text
        return self._run()

    def finish(self, *, complete: bool) -> list[Event]:
        """No more text."""
        self._final = True
        self._complete = complete
        return self._run()

    def _run(self) -> list[Event]:
        self._events = []
        while self._step():
            continue
        return self._events

    # Each step returns True if it moved on and another step may follow.

    def _outside(self) -> bool:
        at = self._buffer.find(CALL_OPEN)
        if at >= 0:
            self._say(self._buffer[:at].rstrip("\n"))
            self._buffer = self._buffer[at + len(CALL_OPEN) :]
            self._step = self._function
            return True
        if self._final:
            text = self._buffer if self._index < 0 else self._buffer.strip("\n")
            self._say(text)
            self._buffer = ""
            return False
        keep = partial_suffix(self._buffer, (CALL_OPEN,))
        safe = self._buffer[: len(self._buffer) - keep].rstrip("\n")
        self._say(safe)
        self._buffer = self._buffer[len(safe) :]
        return False

    def _say(self, text: str) -> None:
        if text.strip() if self._index >= 0 else text:
            self._events.append(Content(text))

    def _function(self) -> bool:
        match = _FUNCTION.match(self._buffer)
        if match is None:
            return self._not_a_call()
        self._buffer = self._buffer[match.end() :]
        name = match.group(1).strip()
        self._index += 1
        self._parameters = self._schemas.get(name, {})
        self._seen = set()
        self._events.append(CallStart(self._index, name))
        self._step = self._between
        return True

    def _not_a_call(self) -> bool:
        """Wait for a function tag, or give the text back if none can come."""
        head = self._buffer.lstrip()
        opening = "<function="
        possible = opening.startswith(head) or (head.startswith(opening) and "\n" not in head)
        if possible and not self._final:
            return False
        self._step = self._outside
        text = CALL_OPEN + self._buffer
        keep = partial_suffix(text, (CALL_OPEN,)) if not self._final else 0
        at = text.find(CALL_OPEN, 1)
        end = at if at > 0 else len(text) - keep
        self._events.append(Content(text[:end]))
        self._buffer = text[end:]
        return bool(self._buffer)

    def _between(self) -> bool:
        match = _PARAMETER.match(self._buffer)
        if match is not None:
            self._buffer = self._buffer[match.end() :]
            self._begin_value(match.group(1).strip())
            return True
        head = self._buffer.lstrip()
        for close in (FUNCTION_CLOSE, CALL_CLOSE):
            if head.startswith(close):
                self._end_call()
                self._buffer = head if close == CALL_CLOSE else head[len(close) :]
                self._step = self._after_function
                return True
        waits = any(mark.startswith(head) for mark in _AFTER_VALUE)
        waits = waits or (head.startswith(PARAMETER_OPEN) and ">" not in head)
        if not self._final:
            if not waits:
                self._buffer = head[1:]
            return not waits
        if self._complete:
            self._end_call()
        self._buffer = ""
        self._step = self._outside
        return False

    def _after_function(self) -> bool:
        head = self._buffer.lstrip()
        if head.startswith(CALL_CLOSE):
            self._buffer = head[len(CALL_CLOSE) :]
        elif CALL_CLOSE.startswith(head) and not self._final:
            return False
        self._step = self._outside
        return True

    def _end_call(self) -> None:
        self._arguments("}" if self._seen else "{}")

    def _begin_value(self, key: str) -> None:
        self._arguments(
            ("{" if not self._seen else ", ") + json.dumps(key, ensure_ascii=False) + ": "
        )
        self._seen.add(key)
        self._key = key
        self._streams_text = types_of(self._parameters.get(key)) <= {"string", "null"}
        self._value_begun = False
        self._value = ""
        self._step = self._in_value

    def _in_value(self) -> bool:
        end, after = self._find_value_end()
        if end < 0:
            if self._final:
                return self._cut_off_value()
            keep = self._held_in_value()
            self._take_value(self._buffer[: len(self._buffer) - keep])
            self._buffer = self._buffer[len(self._buffer) - keep :]
            return False
        text, self._buffer = self._buffer[:end], self._buffer[after:]
        self._take_value(text.removesuffix("\n"))
        self._end_value()
        self._step = self._between
        return True

    def _find_value_end(self) -> tuple[int, int]:
        """(where the value ends, where the next tag begins), or (-1, -1) if that is not decided;
        the buffer before an undecided mark is left to `_held_in_value`."""
        self._undecided_at = len(self._buffer)
        for match in _VALUE_MARK.finditer(self._buffer):
            rest = self._buffer[match.end() :].lstrip()
            mark = match.group(0)
            if mark == PARAMETER_CLOSE:
                followers, after = _AFTER_VALUE, match.end()
            elif mark == "\n" + FUNCTION_CLOSE:
                followers, after = (CALL_CLOSE,), match.start()
            else:
                name = match.group(1).strip()
                if name in self._parameters and name not in self._seen:
                    return match.start(), match.start()
                continue
            if any(rest.startswith(f) for f in followers) or (self._final and not rest):
                return match.start(), after
            if any(f.startswith(rest) for f in followers):
                if self._final:
                    return match.start(), after
                self._undecided_at = match.start()
                return -1, -1
        return -1, -1

    def _held_in_value(self) -> int:
        """How much of the buffer's end may turn out to be a tag or the value's last newline."""
        text = self._buffer[: self._undecided_at]
        keep = partial_suffix(text, _VALUE_STARTS)
        tail = _OPEN_PARAMETER_TAIL.search(text)
        if tail is not None:
            keep = max(keep, len(text) - tail.start())
        keep = max(keep, partial_suffix(text, ("\n" + PARAMETER_OPEN,)))
        if self._undecided_at < len(self._buffer) and text.endswith("\n"):
            keep = max(keep, 1)
        return keep + len(self._buffer) - self._undecided_at

    def _take_value(self, text: str) -> None:
        if not self._value_begun:
            if not text:
                return
            text = text.removeprefix("\n")
            self._value_begun = True
        self._value += text
        if not self._streams_text:
            return
        if self._value != "" and "null".startswith(self._value):
            return
        if not self._value:
            return
        opened = len(self._value) > len(text) and not "null".startswith(
            self._value[: len(self._value) - len(text)]
        )
        piece = text if opened else self._value
        escaped = json.dumps(piece, ensure_ascii=False)[1:-1]
        self._arguments(escaped if opened else '"' + escaped)

    def _end_value(self) -> None:
        if self._streams_text and self._value and not "null".startswith(self._value):
            self._arguments('"')
            return
        value = convert_value(self._value, self._parameters.get(self._key))
        self._arguments(json.dumps(value, ensure_ascii=False))

    def _cut_off_value(self) -> bool:
        """The text ended inside a value: close it if the model ended by itself."""
        self._take_value(self._buffer.removesuffix("\n") if self._complete else self._buffer)
        self._buffer = ""
        self._step = self._outside
        if self._complete:
            self._end_value()
            self._end_call()
        return False

    def _arguments(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self._index, text))


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

    `[{"name": ..., "parameters": {...}}, ...]`; calls go out at the end.
    """

    def __init__(self) -> None:
        self._text = ""

    def push(self, text: str) -> list[Event]:
        """More text."""
        self._text += text
        return []

    def finish(self, *, complete: bool) -> list[Event]:
        """No more text; a list that was cut off stays text."""
        try:
            calls = json.loads(self._text)
            pairs = [(call["name"], call["parameters"]) for call in calls]
        except (ValueError, TypeError, KeyError):
            return [Content(self._text)] if self._text else []
        events: list[Event] = []
        for index, (name, parameters) in enumerate(pairs):
            events.append(CallStart(index, name))
            events.append(CallArguments(index, json.dumps(parameters, ensure_ascii=False)))
        return events


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


def forced_calls_schema(tools: list[dict[str, Any]], *, name: str | None) -> dict[str, Any]:
    """JSON schema of a forced choice: one call of `name`, or any calls. Raises: KeyError."""
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if name is not None:
        functions = {name: functions[name]}
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": each},
                "parameters": function.get("parameters") or {"type": "object"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for each, function in functions.items()
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if name is not None:
        schema["maxItems"] = 1
    return schema
