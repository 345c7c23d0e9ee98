"""Splits a Qwen3-style answer into reasoning and the rest, however the text is cut."""

from __future__ import annotations

from sglang.srt.parser.events import partial_suffix

OPEN_TAG = "<think>"
CLOSE_TAG = "</think>"
TOOL_TAG = "<tool_call>"
Part = tuple[str, str]
"""("reasoning" or "text", piece)."""


def opens_reasoning(prompt: str) -> bool:
    """Whether the answer to `prompt` begins inside a span of reasoning."""
    return prompt.rstrip().endswith(OPEN_TAG)


class ReasoningSplitter:
    """Feed text with `push`, end with `finish`; both return parts in order.

    Reasoning ends at its closing tag, or just before a tool call. Newlines around the tags belong
    to neither side. Where the prompt does not say (`inside` None), an opening tag at the start of
    the answer decides.
    """

    def __init__(self, *, inside: bool | None) -> None:
        self._buffer = ""
        self._state = {True: "reasoning", False: "text", None: "start"}[inside]
        self._at_start = inside is True
        self._skip_newlines = False

    @classmethod
    def for_prompt(cls, prompt: str) -> ReasoningSplitter:
        """A splitter for an answer to `prompt`, whose end may have opened or closed the span."""
        if opens_reasoning(prompt):
            return cls(inside=True)
        return cls(inside=False if prompt.rstrip().endswith(CLOSE_TAG) else None)

    def push(self, text: str) -> list[Part]:
        """More text."""
        self._buffer += text
        return self._advance(final=False)

    def finish(self) -> list[Part]:
        """No more text."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> list[Part]:
        parts: list[Part] = []
        if self._state == "start":
            self._decide_start(final)
        if self._state == "reasoning":
            parts += self._take_reasoning(final)
        if self._state == "text":
            if self._skip_newlines:
                self._buffer = self._buffer.lstrip("\n")
                self._skip_newlines = not self._buffer
            if self._buffer:
                parts.append(("text", self._buffer))
                self._buffer = ""
        return parts

    def _decide_start(self, final: bool) -> None:
        head = self._buffer.lstrip()
        if head.startswith(OPEN_TAG):
            self._buffer = head[len(OPEN_TAG) :]
            self._state = "reasoning"
            self._at_start = True
        elif final or not OPEN_TAG.startswith(head):
            self._state = "text"

    def _take_reasoning(self, final: bool) -> list[Part]:
        if self._at_start:
            head = self._buffer.lstrip("\n")
            if OPEN_TAG.startswith(head) and not final:
                return []
            self._buffer = head.removeprefix(OPEN_TAG).lstrip("\n")
            self._at_start = not self._buffer
        ends = [at for tag in (CLOSE_TAG, TOOL_TAG) if (at := self._buffer.find(tag)) >= 0]
        if ends:
            at = min(ends)
            piece = self._buffer[:at].rstrip("\n")
            self._buffer = self._buffer[at:].removeprefix(CLOSE_TAG)
            self._state = "text"
            self._skip_newlines = True
        elif final:
            piece, self._buffer = self._buffer, ""
        else:
            keep = partial_suffix(self._buffer, (CLOSE_TAG, TOOL_TAG))
            safe = self._buffer[: len(self._buffer) - keep].rstrip("\n")
            piece, self._buffer = safe, self._buffer[len(safe) :]
        return [("reasoning", piece)] if piece else []
