"""What followed before: an index of token sequences that finds earlier occurrences of a context.

Tokens of all sequences get consecutive entry numbers. For each order n (the length of the n-gram that
ends at a token) entries with the same hash are chained, newest first, as in LZ77. A lookup walks a few
links and compares tokens, so its cost depends on neither the context's length nor the index's size.
The trie of continuations that drafts are taken from is built from the occurrences found
(``ngram_tree.py``); it is never stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ORDERS = (4, 2, 1)
_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1
_MAX_BUCKET_BITS = 20
_SCALAR_LIMIT = 16
_MAX_LINKS = 96


@dataclass(frozen=True)
class Occurrence:
    """An earlier place where the last ``length`` tokens of the context occur.

    ``entry`` grows with recency; ``following`` are the tokens after it, at least one.
    """

    length: int
    entry: int
    following: list[int]


class _Tokens:
    """A growing int32 array; ``last_entry`` says when all of its entries have left the index."""

    def __init__(self) -> None:
        self.data = np.empty(256, dtype=np.int32)
        self.size = 0
        self.last_entry = -1

    def append(self, ids: np.ndarray) -> None:
        needed = self.size + len(ids)
        if needed > len(self.data):
            grown = np.empty(max(needed, 2 * len(self.data)), dtype=np.int32)
            grown[: self.size] = self.data[: self.size]
            self.data = grown
        self.data[self.size : needed] = ids
        self.size = needed


class NgramIndex:
    """Index over at most ``capacity`` tokens, the newest ones; contexts match up to ``max_depth``.

    Raises: ValueError if a size is not positive.
    """

    def __init__(self, *, capacity: int, max_depth: int) -> None:
        if capacity < 1 or max_depth < 1:
            raise ValueError(f"capacity={capacity} and max_depth={max_depth} must be positive")
        self.capacity = capacity
        self.max_depth = max_depth
        self.num_entries = 0
        self._orders = tuple(n for n in ORDERS if n <= max_depth)
        bits = min(_MAX_BUCKET_BITS, max(8, capacity.bit_length()))
        self._shift = 64 - bits
        # Zeroed memory is not touched until used, so a large capacity costs nothing at first.
        self._sequence = np.zeros(capacity, dtype=np.int32)
        self._position = np.zeros(capacity, dtype=np.int32)
        self._back = {n: np.zeros(capacity, dtype=np.int32) for n in self._orders}
        self._newest = {n: np.zeros(1 << bits, dtype=np.int64) for n in self._orders}
        self._tokens: dict[int, _Tokens] = {}
        self._next_sequence = 0

    @property
    def num_sequences(self) -> int:
        return len(self._tokens)

    def open_sequence(self) -> int:
        """Start a sequence and return its number."""
        number = self._next_sequence
        self._next_sequence += 1
        self._tokens[number] = _Tokens()
        return number

    def length(self, sequence: int) -> int:
        """Tokens of a sequence; 0 if it has left the index."""
        tokens = self._tokens.get(sequence)
        return 0 if tokens is None else tokens.size

    def append(self, sequence: int, ids: Sequence[int]) -> None:
        """Add tokens to the end of a sequence. Raises: KeyError if it has left the index."""
        tokens = self._tokens[sequence]
        new = np.asarray(ids, dtype=np.int32)
        if len(new) == 0:
            return
        if len(new) > self.capacity // 2:
            for piece in np.array_split(new, 2 * len(new) // self.capacity + 1):
                self._add(sequence, tokens, piece)
        else:
            self._add(sequence, tokens, new)
        self._forget()

    def lookup(self, sequence: int, *, width: int, limit: int) -> list[Occurrence]:
        """Earlier occurrences of the end of ``sequence``, longest first and then newest first.

        At most ``limit`` of them, each with up to ``width`` following tokens.
        """
        tokens = self._tokens.get(sequence)
        if tokens is None or tokens.size == 0:
            return []
        context = tokens.data[max(0, tokens.size - self.max_depth) : tokens.size]
        oldest = self.num_entries - self.capacity
        found: dict[int, Occurrence] = {}
        for order in self._orders:
            if tokens.size < order or len(found) >= limit:
                continue
            back = self._back[order]
            entry = int(self._newest[order][self._bucket(context[-order:])]) - 1
            for _ in range(_MAX_LINKS):
                if entry < max(oldest, 0) or len(found) >= limit:
                    break
                if entry not in found:
                    occurrence = self._compare(entry, context, order, width, tokens)
                    if occurrence is not None:
                        found[entry] = occurrence
                step = int(back[entry % self.capacity])
                if step == 0:
                    break
                entry -= step
        return sorted(found.values(), key=lambda o: (-o.length, -o.entry))

    def _compare(
        self, entry: int, context: np.ndarray, order: int, width: int, own: _Tokens
    ) -> Occurrence | None:
        """The occurrence at ``entry`` if at least ``order`` tokens match and something follows.

        In the context's own sequence the text after it may end before ``width`` tokens; then it repeats
        with the period that it has had so far.
        """
        place = entry % self.capacity
        tokens = self._tokens.get(int(self._sequence[place]))
        if tokens is None:
            return None
        position = int(self._position[place])
        if position + 1 >= tokens.size:
            return None
        depth = min(len(context), position + 1)
        same = tokens.data[position + 1 - depth : position + 1] == context[-depth:]
        length = depth if same.all() else int(same[::-1].argmin())
        if length < order:
            return None
        following = tokens.data[position + 1 : min(position + 1 + width, tokens.size)].tolist()
        if tokens is own and len(following) < width:
            following = (following * (width // len(following) + 1))[:width]
        return Occurrence(length, entry, following)

    def _add(self, sequence: int, tokens: _Tokens, new: np.ndarray) -> None:
        start, first = tokens.size, self.num_entries
        tokens.append(new)
        self.num_entries += len(new)
        tokens.last_entry = self.num_entries - 1
        entries = np.arange(first, self.num_entries)
        places = entries % self.capacity
        self._sequence[places] = sequence
        self._position[places] = np.arange(start, start + len(new))
        link = self._link_few if len(new) <= _SCALAR_LIMIT else self._link_many
        for order in self._orders:
            skipped = max(0, order - 1 - start)
            self._back[order][places[:skipped]] = 0
            if skipped < len(new):
                text = tokens.data[start + skipped - order + 1 : tokens.size]
                link(order, text, first + skipped)

    def _link_few(self, order: int, text: np.ndarray, first: int) -> None:
        newest, back = self._newest[order], self._back[order]
        for i in range(len(text) - order + 1):
            bucket, entry = self._bucket(text[i : i + order]), first + i
            back[entry % self.capacity] = self._step(entry, int(newest[bucket]) - 1)
            newest[bucket] = entry + 1

    def _link_many(self, order: int, text: np.ndarray, first: int) -> None:
        """The same for many entries at once: chain equal buckets within the batch, then to the past."""
        newest, back = self._newest[order], self._back[order]
        buckets = self._buckets(order, text)
        entries = np.arange(first, first + len(buckets))
        by_bucket = np.argsort(buckets, kind="stable")
        sorted_buckets, sorted_entries = buckets[by_bucket], entries[by_bucket]
        is_first = np.ones(len(buckets), dtype=bool)
        is_first[1:] = sorted_buckets[1:] != sorted_buckets[:-1]
        previous = np.empty_like(sorted_entries)
        previous[1:] = sorted_entries[:-1]
        previous[is_first] = newest[sorted_buckets[is_first]] - 1
        steps = sorted_entries - previous
        steps[(previous < 0) | (steps >= self.capacity)] = 0
        back[sorted_entries % self.capacity] = steps
        is_last = np.ones(len(buckets), dtype=bool)
        is_last[:-1] = is_first[1:]
        newest[sorted_buckets[is_last]] = sorted_entries[is_last] + 1

    def _step(self, entry: int, previous: int) -> int:
        step = entry - previous
        return step if previous >= 0 and step < self.capacity else 0

    def _bucket(self, gram: np.ndarray) -> int:
        value = 0
        for token in gram.tolist():
            value = ((value + token + 1) * _MULTIPLIER) & _MASK64
        return value >> self._shift

    def _buckets(self, order: int, text: np.ndarray) -> np.ndarray:
        count = len(text) - order + 1
        value = np.zeros(count, dtype=np.uint64)
        for offset in range(order):
            value += text[offset : offset + count].astype(np.uint64) + np.uint64(1)
            value *= np.uint64(_MULTIPLIER)
        return (value >> np.uint64(self._shift)).astype(np.int64)

    def _forget(self) -> None:
        """Drop sequences whose last token has left the index; the oldest come first."""
        oldest = self.num_entries - self.capacity
        for number in [n for n, t in self._tokens.items() if 0 <= t.last_entry < oldest]:
            del self._tokens[number]
