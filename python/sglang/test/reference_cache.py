"""A slow, obvious prefix cache: dictionaries of prefixes. The radix tree must behave like it.

Every page is stored under the whole prefix that ends with it, so that nothing is ever split or
merged. Which page or state goes first under pressure is not computed here: the reference is told
what the tree freed and raises if that was locked, still needed, or not the oldest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Prefix = tuple[int, ...]


class ReferenceMismatch(AssertionError):
    """The tree did something that the reference does not allow."""


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ReferenceMismatch(message)


@dataclass
class _Page:
    slots: tuple[int, ...]
    access: int
    locks: int = 0


@dataclass
class _State:
    slot: int
    access: int
    locks: int = 0


class ReferenceCache:
    """See ``RadixCache``; prefixes are given as token sequences instead of nodes."""

    def __init__(self, *, page_size: int, checkpoint_tokens: int, needs_state: bool) -> None:
        self.page_size = page_size
        self.checkpoint_tokens = checkpoint_tokens
        self.needs_state = needs_state
        self.pages: dict[Prefix, _Page] = {}
        self.states: dict[Prefix, _State] = {}
        self._clock = 0
        self._evicting = ""
        self._orphans: set[Prefix] = set()

    def _ends(self, tokens: Sequence[int], length: int) -> list[Prefix]:
        return [tuple(tokens[:n]) for n in range(self.page_size, length + 1, self.page_size)]

    def match(self, tokens: Sequence[int], limit: int) -> tuple[int, int, int]:
        """``(cached_len, kv_matched_len, branching_len)``."""
        kv_len = state_len = 0
        for prefix in self._ends(tokens, min(limit, len(tokens))):
            if prefix not in self.pages:
                break
            kv_len = len(prefix)
            if prefix in self.states:
                state_len = kv_len
        if not self.needs_state:
            return kv_len, kv_len, -1
        branching = -1
        for length in range(self.checkpoint_tokens, kv_len + 1, self.checkpoint_tokens):
            if length > state_len:
                branching = length
        return state_len, kv_len, branching

    def slots(self, tokens: Sequence[int], length: int) -> list[int]:
        """KV slots of the first ``length`` tokens."""
        return [slot for prefix in self._ends(tokens, length) for slot in self.pages[prefix].slots]

    def touch(self, tokens: Sequence[int], length: int) -> None:
        self._touch_kv(tokens, length)
        state = self.states.get(tuple(tokens[:length]))
        if state is not None:
            state.access = self._clock

    def _touch_kv(self, tokens: Sequence[int], length: int) -> None:
        self._clock += 1
        for prefix in self._ends(tokens, length):
            self.pages[prefix].access = self._clock

    def insert(self, tokens: Sequence[int], slots: Sequence[int]) -> int:
        """Add KV; return how many leading tokens were there already."""
        existing = 0
        for prefix in self._ends(tokens, len(slots)):
            end = len(prefix)
            if prefix in self.pages:
                existing = end
            else:
                self.pages[prefix] = _Page(
                    tuple(int(s) for s in slots[end - self.page_size : end]), 0
                )
        self._touch_kv(tokens, len(slots))
        return existing

    def attach_state(self, tokens: Sequence[int], length: int, slot: int) -> bool:
        prefix = tuple(tokens[:length])
        if prefix not in self.pages:
            return False
        self.touch(tokens, length)
        if prefix in self.states:
            return False
        self.states[prefix] = _State(slot, self._clock)
        return True

    def take_state(self, tokens: Sequence[int], length: int) -> int:
        return self.states.pop(tuple(tokens[:length])).slot

    def lock(self, tokens: Sequence[int], length: int) -> None:
        for prefix in self._ends(tokens, length):
            self.pages[prefix].locks += 1

    def unlock(self, tokens: Sequence[int], length: int) -> None:
        for prefix in self._ends(tokens, length):
            self.pages[prefix].locks -= 1

    def lock_state(self, tokens: Sequence[int], length: int) -> None:
        self.states[tuple(tokens[:length])].locks += 1

    def unlock_state(self, tokens: Sequence[int], length: int) -> None:
        self.states[tuple(tokens[:length])].locks -= 1

    # -- eviction, as told by the tree

    def begin_evict(self, kind: str) -> None:
        """``kind``: "kv" or "states"; what is freed until ``end_evict`` is judged by it."""
        self._evicting = kind

    def end_evict(self) -> None:
        _require(not self._orphans, f"states freed without their KV: {self._orphans}")
        self._evicting = ""

    def on_free_state(self, slot: int) -> None:
        owners = [prefix for prefix, state in self.states.items() if state.slot == slot]
        _require(len(owners) == 1, f"state slot {slot} freed, held under {len(owners)} prefixes")
        state = self.states.pop(owners[0])
        _require(state.locks == 0, f"locked state of {len(owners[0])} tokens was freed")
        if self._evicting == "kv":
            self._orphans.add(owners[0])
            return
        _require(self._evicting == "states", "a state was freed outside of eviction")
        older = [s for s in self.states.values() if s.locks == 0 and s.access < state.access]
        _require(not older, f"state slot {slot} was freed although {len(older)} are older")

    def on_free_kv(self, slots: np.ndarray) -> None:
        _require(self._evicting == "kv", "KV was freed outside of eviction")
        by_slots = {page.slots: prefix for prefix, page in self.pages.items()}
        freed = []
        for at in range(0, len(slots), self.page_size):
            page = tuple(int(s) for s in slots[at : at + self.page_size])
            _require(page in by_slots, f"page {page} was freed but is not in the cache")
            freed.append(by_slots[page])
        leaf_access = self.pages[max(freed, key=len)].access
        oldest = min(self.pages[prefix].access for prefix in self._evictable_leaves())
        _require(leaf_access == oldest, "KV was freed although an older leaf was there")
        for prefix in freed:
            _require(self.pages.pop(prefix).locks == 0, f"locked KV of {len(prefix)} tokens freed")
            _require(prefix not in self.states, f"state of {len(prefix)} tokens outlives its KV")
            self._orphans.discard(prefix)
        for prefix in freed:
            longer = [p for p in self.pages if p[: len(prefix)] == prefix]
            _require(
                not longer, f"KV of {len(prefix)} tokens freed below {len(longer)} longer ones"
            )

    def _evictable_leaves(self) -> list[Prefix]:
        parents = {prefix[: -self.page_size] for prefix in self.pages}
        return [p for p, page in self.pages.items() if p not in parents and page.locks == 0]

    # -- totals

    def counts(self) -> tuple[int, int, int, int]:
        """KV tokens, evictable KV tokens, states, evictable states."""
        return (
            len(self.pages) * self.page_size,
            sum(page.locks == 0 for page in self.pages.values()) * self.page_size,
            len(self.states),
            sum(state.locks == 0 for state in self.states.values()),
        )
