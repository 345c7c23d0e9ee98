"""Turns the text of a chat answer into content, reasoning and tool calls."""

from __future__ import annotations

from sglang.srt.parser.events import Content, Event, Reasoning
from sglang.srt.parser.reasoning import Part, ReasoningSplitter
from sglang.srt.parser.tool_calls import ToolCallParser


class ChatOutputParser:
    """The parsers of one answer in a row; either may be absent.

    stream_reasoning False holds reasoning back until it has ended.
    """

    def __init__(
        self,
        *,
        splitter: ReasoningSplitter | None,
        tools: ToolCallParser | None,
        stream_reasoning: bool = True,
    ) -> None:
        self._splitter = splitter
        self._tools = tools
        self._stream_reasoning = stream_reasoning
        self._held_reasoning = ""

    def push(self, text: str) -> list[Event]:
        """More text."""
        if self._splitter is None:
            return self._text(text)
        return self._parts(self._splitter.push(text), final=False)

    def finish(self, *, complete: bool) -> list[Event]:
        """No more text; `complete` False if the model was cut off."""
        parts = self._splitter.finish() if self._splitter is not None else []
        events = self._parts(parts, final=True)
        if self._tools is not None:
            events += self._tools.finish(complete=complete)
        return events

    def _parts(self, parts: list[Part], *, final: bool) -> list[Event]:
        events: list[Event] = []
        for kind, text in parts:
            if kind == "reasoning" and self._stream_reasoning:
                events.append(Reasoning(text))
            elif kind == "reasoning":
                self._held_reasoning += text
            else:
                events += self._flush_reasoning()
                events += self._text(text)
        if final:
            events += self._flush_reasoning()
        return events

    def _flush_reasoning(self) -> list[Event]:
        text, self._held_reasoning = self._held_reasoning, ""
        return [Reasoning(text)] if text else []

    def _text(self, text: str) -> list[Event]:
        if self._tools is None:
            return [Content(text)] if text else []
        return self._tools.push(text)
