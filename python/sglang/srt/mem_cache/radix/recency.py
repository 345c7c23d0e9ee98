"""A queue of tree nodes, least recently used first, in which entries go stale instead of moving."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from sglang.srt.mem_cache.radix.node import TreeNode


class RecencyQueue:
    """Heap of ``(access, node)``; an entry counts only while ``is_current(access, node)`` holds.

    A node must be pushed again whenever its access number changes or it becomes a candidate; the
    older entry is then dropped when it surfaces. Push and pop cost O(log entries).
    """

    def __init__(self, is_current: Callable[[int, TreeNode], bool]) -> None:
        self._is_current = is_current
        self._heap: list[tuple[int, int, TreeNode]] = []
        self._order = itertools.count()
        self._compact_at = 1024

    def push(self, access: int, node: TreeNode) -> None:
        heapq.heappush(self._heap, (access, next(self._order), node))
        if len(self._heap) >= self._compact_at:
            self._compact()

    def pop(self) -> TreeNode | None:
        """Remove and return the oldest candidate, or None when there is none."""
        while self._heap:
            access, _, node = heapq.heappop(self._heap)
            if self._is_current(access, node):
                return node
        return None

    def candidates(self) -> set[int]:
        """``id`` of every node that ``pop`` could still return."""
        return {id(node) for access, _, node in self._heap if self._is_current(access, node)}

    def clear(self) -> None:
        self._heap.clear()

    def _compact(self) -> None:
        seen: set[int] = set()
        kept = []
        for entry in self._heap:
            access, _, node = entry
            if id(node) not in seen and self._is_current(access, node):
                seen.add(id(node))
                kept.append(entry)
        heapq.heapify(kept)
        self._heap = kept
        self._compact_at = max(1024, 4 * len(kept))
