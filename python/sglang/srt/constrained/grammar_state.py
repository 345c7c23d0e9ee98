"""Where one request stands in its grammar."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

BITS = 32
_ALL_ALLOWED = -1


class GrammarState:
    """One request's matcher, and whether its grammar has begun.

    A grammar with ``start_after`` (the tag that closes the reasoning) leaves the output free until that
    text has come; until then only the end of the text is forbidden, so that an answer always follows.
    ``fault`` says why the grammar cannot be followed further, None while it can.
    """

    def __init__(
        self,
        matcher: Any,
        *,
        kind: str,
        vocab_size: int,
        end_ids: Sequence[int],
        token_bytes: Callable[[int], bytes],
        start_after: str | None,
    ) -> None:
        self._matcher = matcher
        self._kind = kind
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._token_bytes = token_bytes
        self._tag = b"" if start_after is None else start_after.encode()
        self._tail = b""
        self._has_begun = not self._tag
        self.fault: str | None = None

    @property
    def num_words(self) -> int:
        """Words of 32 bits in the mask of one row."""
        return (self._vocab_size + BITS - 1) // BITS

    def mask_chain(self, drafts: Sequence[int]) -> np.ndarray:
        """Bits of the tokens allowed after the output and ``drafts[:i]``: [D, words] int32.

        Rows after a draft that is not allowed, or after the end of the grammar, allow everything: no
        token of theirs is ever emitted. Leaves the state as it is.
        """
        mask = self._open_rows(len(drafts) + 1)
        free = 0 if self._has_begun else self._free_rows(mask, drafts)
        if free <= len(drafts):
            self._fill_chain(mask, free, list(drafts[free:]))
        return mask

    def mask_tree(self, paths: Sequence[Sequence[int]]) -> np.ndarray:
        """The same for a tree: row i follows the drafts ``paths[i]`` that lead to it."""
        return np.stack([self.mask_chain(path)[-1] for path in paths])

    def advance(self, token: int) -> bool:
        """Take over an emitted token; True when nothing more may follow it.

        Sets ``fault`` when the grammar does not allow the token.
        """
        if not self._has_begun:
            self._has_begun, self._tail = self._closes(self._tail, token)
            return False
        if not self._matcher.consume_token(token):
            self._note_fault()
            return True
        return self._matcher.is_stopped()

    def _open_rows(self, count: int) -> np.ndarray:
        return np.full((count, self.num_words), _ALL_ALLOWED, dtype=np.int32)

    def _free_rows(self, mask: np.ndarray, drafts: Sequence[int]) -> int:
        """Forbid the end in rows before the grammar begins; return how many rows these are."""
        words, tail = mask.view(np.uint32), self._tail
        for row in range(len(drafts) + 1):
            for token in self._end_ids:
                words[row, token // BITS] &= ~np.uint32(1 << (token % BITS))
            if row < len(drafts):
                closes, tail = self._closes(tail, drafts[row])
                if closes:
                    return row + 1
        return len(drafts) + 1

    def _closes(self, tail: bytes, token: int) -> tuple[bool, bytes]:
        """Whether the tag is complete with ``token``, and the bytes to remember."""
        joined = tail + self._token_bytes(token)
        return self._tag in joined, joined[-(len(self._tag) - 1) :] if len(self._tag) > 1 else b""

    def _fill_chain(self, mask: np.ndarray, first: int, drafts: list[int]) -> None:
        fill, executor = _engine()
        if drafts:
            fill.fill_next_token_bitmask_par_with_draft_tokens(
                executor, [(self._matcher, first, drafts)], mask
            )
        else:
            fill.fill_next_token_bitmask(self._matcher, mask, first)
        if self._matcher.is_error():
            self._note_fault()

    def _note_fault(self) -> None:
        reason = self._matcher.get_error().partition("\n<state>")[0].strip()
        self.fault = f"{self._kind}: the grammar cannot be followed further: {reason}"


@functools.cache
def _engine() -> tuple[ModuleType, Any]:
    """llguidance's functions on numpy arrays, and the executor that some of them want."""
    executor = importlib.import_module("llguidance").LLExecutor(num_threads=1)
    return importlib.import_module("llguidance.numpy"), executor
