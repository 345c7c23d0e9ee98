"""Log probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.io_struct import TokenLogprob
from sglang.srt.managers.tokenizer import NoTokenizer, Tokenizer

_FLOOR = -9999.0
"""JSON has no -inf; OpenAI uses this number for "impossible"."""


def finite(value: float) -> float:
    """`value`, or the floor for -inf."""
    return max(value, _FLOOR)


class LogprobWriter:
    """Writes positions for clients; needs the tokenizer for the tokens' texts."""

    def __init__(self, tokenizer: Tokenizer | NoTokenizer) -> None:
        self._tokenizer = tokenizer

    def chat(self, positions: list[TokenLogprob], *, num_top: int) -> dict[str, Any]:
        """`{"content": [{token, bytes, logprob, top_logprobs}]}`."""
        return {"content": [self._chat_position(position, num_top) for position in positions]}

    def _chat_position(self, position: TokenLogprob, num_top: int) -> dict[str, Any]:
        entry = self._entry(position.token_id, position.logprob or 0.0)
        entry["top_logprobs"] = [
            self._entry(token_id, value) for value, token_id in (position.top or [])[:num_top]
        ]
        return entry

    def _entry(self, token_id: int, value: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id)
        return {
            "token": raw.decode("utf-8", "replace"),
            "bytes": list(raw),
            "logprob": finite(value),
        }

    def completion(
        self, positions: list[TokenLogprob], *, num_top: int, offset: int
    ) -> dict[str, Any]:
        """`{tokens, token_logprobs, top_logprobs, text_offset}`; `offset` is where the first
        position's text begins."""
        tokens = [self._tokenizer.token_text(position.token_id) for position in positions]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [
                None if position.logprob is None else finite(position.logprob)
                for position in positions
            ],
            "top_logprobs": [self._completion_top(position, num_top) for position in positions],
            "text_offset": offsets,
        }

    def _completion_top(self, position: TokenLogprob, num_top: int) -> dict[str, float] | None:
        if position.logprob is None:
            return None
        top: dict[str, float] = {}
        for value, token_id in (position.top or [])[:num_top]:
            top.setdefault(self._tokenizer.token_text(token_id), finite(value))
        top.setdefault(self._tokenizer.token_text(position.token_id), finite(position.logprob))
        return top
