"""Tool calls written as tags, read while they stream (Qwen3-Coder, Qwen3.5 and later)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from sglang.srt.parser.events import CallArguments, CallStart, Content, Event, partial_suffix
from sglang.srt.parser.tool_values import convert_value, parameter_schemas, types_of

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
        self._text_opened = False
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
        self._text_opened = False
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
                followers: tuple[str, ...] = _AFTER_VALUE
                after = match.end()
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
        # A value that is or may become `null` waits: it could be JSON's null instead of a text.
        if not self._streams_text or "null".startswith(self._value):
            return
        piece = text if self._text_opened else self._value
        escaped = json.dumps(piece, ensure_ascii=False)[1:-1]
        self._arguments(escaped if self._text_opened else '"' + escaped)
        self._text_opened = True

    def _end_value(self) -> None:
        if self._text_opened:
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
