"""The books of request memory: every page and state slot is free, held once, or cached once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.integrity import IntegrityError
from sglang.srt.mem_cache.pool.req_pool import HasKV
from sglang.srt.mem_cache.radix.node import TreeNode
from sglang.srt.mem_cache.radix_cache import NO_SLOTS, RadixCache, has_repeats
from sglang.srt.mem_cache.request_slots import RequestSlots, held_states


@dataclass
class HeldRow:
    """Host side of a request's row: ``slots[:allocated_len]`` are its KV slots, ``node`` its lock."""

    req: HasKV
    slots: np.ndarray
    node: TreeNode
    branching_len: int

    def append(self, at: int, slots: np.ndarray) -> None:
        end = at + len(slots)
        if end > len(self.slots):
            grown = np.empty(max(end, 2 * len(self.slots)), dtype=np.int64)
            grown[:at] = self.slots[:at]
            self.slots = grown
        self.slots[at:end] = slots


@dataclass(frozen=True)
class MemoryBooks:
    """Everyone who can own a slot."""

    slots: RequestSlots
    allocator: PagedTokenToKVPoolAllocator
    tree: RadixCache
    held: dict[int, HeldRow]

    def check(self) -> None:
        """Raise IntegrityError naming the first thing that disagrees."""
        self.allocator.check_integrity()
        self.slots.check_integrity()
        self.tree.check_integrity()
        self._check_pages()
        self._check_states()
        for row, held in self.held.items():
            self._check_request(row, held)

    def _check_pages(self) -> None:
        pieces = [
            held.slots[held.req.kv.protected_len : held.req.kv.allocated_len]
            for held in self.held.values()
        ]
        pieces += [node.slots for node in self.tree.nodes()]
        slots = np.concatenate(pieces) if pieces else NO_SLOTS
        if has_repeats(slots):
            raise IntegrityError("a KV slot is held twice")
        free = self.allocator.available_size()
        if free + len(slots) != self.allocator.size:
            raise IntegrityError(
                f"KV slots: {free} free + {len(slots)} held or cached != {self.allocator.size}"
            )

    def _check_states(self) -> None:
        slots = [slot for held in self.held.values() for slot in held_states(held.req.kv)]
        slots += [node.state_slot for node in self.tree.nodes() if node.state_slot >= 0]
        if len(set(slots)) != len(slots):
            raise IntegrityError("a state slot is held twice")
        free = self.slots.num_free_states
        if free + len(slots) != self.slots.num_states:
            raise IntegrityError(
                f"state slots: {free} free + {len(slots)} held or cached != {self.slots.num_states}"
            )

    def _check_request(self, row: int, held: HeldRow) -> None:
        kv = held.req.kv
        where = f"request row {row}"
        if kv.req_pool_idx != row:
            raise IntegrityError(f"{where} is recorded for a request that holds {kv.req_pool_idx}")
        ordered = kv.cached_len <= kv.protected_len <= kv.allocated_len
        if not ordered or kv.allocated_len % self.allocator.page_size:
            raise IntegrityError(f"{where}: lengths disagree: {kv}")
        mine = held.slots[: kv.allocated_len]
        on_device = self.slots.read_row(row, kv.allocated_len)
        if not np.array_equal(on_device, mine[: len(on_device)]):
            raise IntegrityError(f"{where}: the device row differs from the host copy")
        shared = self.tree.slots_between(held.node, 0, kv.protected_len)
        is_at_end = kv.node is held.node and held.node.end == kv.protected_len
        if not is_at_end or not np.array_equal(shared, mine[: len(shared)]):
            raise IntegrityError(f"{where} does not read the tree's pages below protected_len")
        if self.tree.root.kv_lock != 1 + len(self.held):
            raise IntegrityError("locks on the tree differ from the number of requests")
