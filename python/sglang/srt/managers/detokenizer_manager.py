"""The text of a running request: characters are whole, stop strings are held back and cut."""

from __future__ import annotations

from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.managers.tokenizer import IncrementalDecoder


class DetokenizerState:
    """Turns the ids of one request into text, id by id, whatever pieces they arrive in.

    `text` is what the user may see. Text that could be the start of a stop string waits until the
    next id decides; at the end it is dropped if it was a stop, and shown if it was not.
    """

    def __init__(
        self, decoder: IncrementalDecoder, *, stop_strings: list[str], no_stop_trim: bool
    ) -> None:
        self._decoder = decoder
        self._stops = tuple(stop_strings)
        self._no_stop_trim = no_stop_trim
        self._max_held = max((len(stop) for stop in stop_strings), default=1) - 1
        self._held = ""
        self._taken = 0
        self.text = ""

    def push(self, token_ids: list[int], finish: FinishReason | None) -> None:
        """Append new ids; with `finish`, bring the text to its final form."""
        last = len(token_ids) - 1
        step = self._decoder.step
        if finish is None and not self._stops:
            self.text += "".join([step(token_id) for token_id in token_ids])
            return
        for index, token_id in enumerate(token_ids):
            if finish is not None and index == last:
                self._push_last(token_id, finish)
            else:
                self._release(self._held + step(token_id))
        if finish is not None and not token_ids:
            self._release_all(self._held + self._decoder.finish())

    def take_delta(self) -> str:
        """Text that was added since the last call."""
        delta = self.text[self._taken :]
        self._taken = len(self.text)
        return delta

    def _push_last(self, token_id: int, finish: FinishReason) -> None:
        stopped = finish.type == "stop"
        if stopped and isinstance(finish.matched, int) and not self._no_stop_trim:
            self._release_all(self._held + self._decoder.finish())
            return
        before = len(self._held)
        tail = self._held + self._decoder.step(token_id) + self._decoder.finish()
        if stopped and isinstance(finish.matched, str):
            tail = self._cut(tail, finish.matched, before)
        self._release_all(tail)

    def _cut(self, tail: str, stop: str, before: int) -> str:
        """`tail` without the stop string that its last token completed."""
        at = tail.find(stop, max(0, before - len(stop) + 1))
        if at < 0:
            at = tail.rfind(stop)
        if at < 0:
            return tail
        return tail[: at + len(stop)] if self._no_stop_trim else tail[:at]

    def _release(self, tail: str) -> None:
        keep = self._possible_stop_chars(tail)
        self.text += tail[: len(tail) - keep]
        self._held = tail[len(tail) - keep :]

    def _release_all(self, tail: str) -> None:
        self.text += tail
        self._held = ""

    def _possible_stop_chars(self, tail: str) -> int:
        """Length of the longest end of `tail` that begins a stop string."""
        for size in range(min(self._max_held, len(tail)), 0, -1):
            end = tail[-size:]
            if any(stop.startswith(end) for stop in self._stops if len(stop) > size):
                return size
        return 0
