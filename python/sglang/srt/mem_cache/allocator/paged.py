"""Host-side allocator of KV slots in whole pages."""

from __future__ import annotations

import numpy as np

from sglang.srt.mem_cache.integrity import IntegrityError


class PagedTokenToKVPoolAllocator:
    """Owner of the KV slots ``page_size .. size + page_size - 1``.

    Slots are handed out and taken back in whole pages; page 0 is padding and never leaves. The same
    slot ids address the target's and the draft's KV tensors.

    Args: ``size`` usable slots (rounded down to whole pages), ``page_size`` slots per page.
    Raises: ValueError when not even one page fits.
    """

    def __init__(self, size: int, page_size: int = 1) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        num_pages = size // page_size
        if num_pages < 1:
            raise ValueError(f"a KV pool of {size} tokens holds no page of {page_size} tokens")
        self.page_size = page_size
        self.num_pages = num_pages
        self.size = num_pages * page_size
        self.clear()

    def clear(self) -> None:
        """Take every page back, whoever holds it."""
        self._free = np.arange(1, self.num_pages + 1, dtype=np.int64)
        self._released: list[np.ndarray] = []
        self._num_released = 0
        self._held = np.zeros(self.num_pages + 1, dtype=bool)

    def available_size(self) -> int:
        """Slots that can be handed out now."""
        return (len(self._free) + self._num_released) * self.page_size

    def held_size(self) -> int:
        """Slots handed out now."""
        return self.size - self.available_size()

    def alloc(self, num_tokens: int) -> np.ndarray | None:
        """Hand out whole pages covering ``num_tokens`` slots.

        Returns: int64 ``[ceil(num_tokens / page_size) * page_size]`` ascending, or None (and nothing
        changes) when too few pages are free.
        """
        if num_tokens < 0:
            raise ValueError(f"cannot allocate {num_tokens} KV slots")
        num_pages = -(-num_tokens // self.page_size)
        if num_pages > len(self._free):
            self._merge_released()
            if num_pages > len(self._free):
                return None
        pages = np.sort(self._free[:num_pages])
        self._free = self._free[num_pages:]
        self._held[pages] = True
        return (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)

    def free(self, slots: np.ndarray) -> None:
        """Take whole pages back.

        ``slots``: integers, any order, every slot of each page exactly once. Raises: IntegrityError
        naming the slot that is not held (double free, never handed out) or the page that is
        incomplete; then nothing is freed.
        """
        slots = np.asarray(slots, dtype=np.int64).reshape(-1)
        if slots.size == 0:
            return
        pages, counts = np.unique(slots // self.page_size, return_counts=True)
        out_of_range = (pages < 1) | (pages > self.num_pages)
        bad = pages[out_of_range] if out_of_range.any() else pages[~self._held[pages]]
        if bad.size:
            slot = int(slots[slots // self.page_size == bad[0]][0])
            raise IntegrityError(f"KV slot {slot} is freed but not held (double free?)")
        if slots.size != pages.size * self.page_size or np.unique(slots).size != slots.size:
            wrong = pages[counts != self.page_size]
            raise IntegrityError(
                f"KV pages must be freed whole, {self.page_size} distinct slots each; look at page "
                f"{int(wrong[0]) if wrong.size else int(pages[0])}"
            )
        self._held[pages] = False
        self._released.append(pages)
        self._num_released += len(pages)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless free + held == total and no page is listed twice."""
        free = np.concatenate([self._free, *self._released])
        unique = np.unique(free)
        if unique.size != free.size:
            raise IntegrityError("a KV page is twice in the free list")
        if free.size and (unique[0] < 1 or unique[-1] > self.num_pages):
            raise IntegrityError("the free list names a KV page outside the pool")
        num_held = int(self._held.sum())
        if free.size + num_held != self.num_pages or self._held[free].any():
            raise IntegrityError(
                f"KV pages: {free.size} free + {num_held} held != {self.num_pages} in all"
            )

    def _merge_released(self) -> None:
        self._free = np.concatenate([self._free, *self._released])
        self._released = []
        self._num_released = 0
