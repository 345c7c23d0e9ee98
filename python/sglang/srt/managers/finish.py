"""When a request ends: stop tokens, stop strings and length, decided token by token.

The rules run over each accepted token in order, so that a stop in the middle of an accepted block
ends the request at exactly that token, whatever the draft width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang.srt.managers.io_struct import FinishReason

Decode = Callable[[list[int], bool], str]


class StopChecker:
    """Finish rules of one request.

    Args:
        stop_token_ids: ids that end the request (model's and request's), empty with ``ignore_eos``
            except for those which the request itself named.
        stop_strings: texts that end the request when they appear in the output's text.
        min_new_tokens: no stop token or string ends the request before this many tokens.
        decode: ``decode(ids, skip_special_tokens) -> str``; needed only with stop strings.
        skip_special_tokens: whether special tokens are part of the text that strings match in.

    Raises: ValueError if stop strings are given and there is no tokenizer to decode with.
    """

    def __init__(
        self,
        *,
        stop_token_ids: frozenset[int],
        stop_strings: Sequence[str] = (),
        min_new_tokens: int = 0,
        decode: Decode | None = None,
        skip_special_tokens: bool = True,
    ) -> None:
        if stop_strings and decode is None:
            raise ValueError(
                "stop: stop strings need a tokenizer, and this server runs without one; "
                "use stop_token_ids"
            )
        self.stop_token_ids = stop_token_ids
        self.stop_strings = tuple(stop_strings)
        self.min_new_tokens = min_new_tokens
        self._decode = decode
        self._skip_special_tokens = skip_special_tokens
        # A token carries at least one byte, so this many tokens cover any match that ends in the
        # newest one, plus room for a character that is cut at the window's start.
        longest = max((len(s.encode()) for s in stop_strings), default=0)
        self._window_tokens = longest + 4

    def check(self, output_ids: list[int], max_new_tokens: int) -> FinishReason | None:
        """Return why the request ends after the last of ``output_ids``, or None."""
        count = len(output_ids)
        if count >= self.min_new_tokens:
            token = output_ids[-1]
            if token in self.stop_token_ids:
                return FinishReason(type="stop", matched=token)
            if self.stop_strings:
                matched = self._match_string(output_ids)
                if matched is not None:
                    return FinishReason(type="stop", matched=matched)
        if count >= max_new_tokens:
            return FinishReason(type="length", matched=max_new_tokens)
        return None

    def _match_string(self, output_ids: list[int]) -> str | None:
        tail = self._decode(output_ids[-self._window_tokens :], self._skip_special_tokens)
        found = [(tail.find(s), s) for s in self.stop_strings if s in tail]
        return min(found)[1] if found else None
