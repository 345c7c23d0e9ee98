"""The only owner of what a request holds: its row, KV pages, state slots and lock on the prefix tree.

Every operation either completes or leaves everything as it was. A request that waits holds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np

from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.integrity import IntegrityError
from sglang.srt.mem_cache.memory_books import HeldRow, MemoryBooks
from sglang.srt.mem_cache.pool.req_pool import HasKV
from sglang.srt.mem_cache.radix.node import TOKEN_BYTES, TreeNode, token_key
from sglang.srt.mem_cache.radix_cache import MatchResult, RadixCache
from sglang.srt.mem_cache.request_slots import RequestSlots, row_of
from sglang.srt.mem_cache.state_tracker import StateTracker
from sglang.srt.mem_cache.track import TrackPolicy

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hierarchical_cache import HierarchicalCache, HostHit


def _tree_that_stays_empty(page_size: int) -> RadixCache:
    """Stands in for the prefix cache when it is disabled: nothing is ever inserted."""
    return RadixCache(
        page_size=page_size,
        checkpoint_tokens=page_size,
        needs_state=True,
        free_kv=lambda slots: None,
        free_state=lambda slot: None,
    )


class RequestMemory:
    """Admission, growth, state tracking and release of requests.

    slots      rows and state slots of requests
    allocator  KV pages
    tree       prefix cache, or None with ``--disable-radix-cache``
    policy     how checkpoint states are kept; None without a tree or without recurrent layers
    host       host tier behind the tree, or None
    """

    def __init__(
        self,
        *,
        slots: RequestSlots,
        allocator: PagedTokenToKVPoolAllocator,
        tree: RadixCache | None,
        policy: TrackPolicy | None,
        host: HierarchicalCache | None = None,
    ) -> None:
        if tree is not None and tree.page_size != allocator.page_size:
            raise ValueError(f"tree pages {tree.page_size} differ from {allocator.page_size}")
        wanted = policy.num_entries if policy is not None else 0
        if slots.num_track_entries != wanted:
            raise ValueError(
                f"the request pool has {slots.num_track_entries} track slots per request, but the "
                f"prefix cache uses {wanted}; build the pool from the same strategy"
            )
        if tree is not None and tree.needs_state and policy is None:
            raise ValueError("a prefix cache of a recurrent model needs a track policy")
        if tree is None and (policy is not None or host is not None):
            raise ValueError("without a prefix cache there is nothing to track or to move to host")
        self._slots = slots
        self._allocator = allocator
        self._caches = tree is not None
        self._tree = tree if tree is not None else _tree_that_stays_empty(allocator.page_size)
        self._tracker = StateTracker(policy, slots, self._tree) if policy is not None else None
        self._host = host
        self._page_size = allocator.page_size
        self._held: dict[int, HeldRow] = {}

    # -- questions: nothing below changes what a later call can see

    def match(self, token_ids: Sequence[int] | np.ndarray, limit: int | None = None) -> MatchResult:
        """Usable prefix of ``token_ids``, at most ``limit`` of them.

        Every token given may come from the cache: the caller leaves out those that must be computed.
        """
        return self._match(token_key(token_ids), limit)

    def _match(self, key: bytes, limit: int | None) -> MatchResult:
        match = self._tree.match(key, limit)
        return match if self._host is None else self._host.extend_match(key, match, limit)

    def num_pages_needed(self, num_tokens: int) -> int:
        """Pages that cover ``num_tokens`` positions."""
        return -(-num_tokens // self._page_size)

    def largest_request(self) -> int:
        """Most tokens, prompt and output together, that one request can ever hold."""
        return min(self._allocator.size, self._slots.max_context_len)

    def can_ever_fit(self, prompt_len: int, max_new_tokens: int) -> bool:
        """True if the request could run alone on an empty pool."""
        enough_states = self._slots.states_at_admission <= self._slots.num_states
        return enough_states and prompt_len + max_new_tokens <= self.largest_request()

    def available_tokens(self) -> int:
        """KV slots that are free or that the tree would give up."""
        return self._allocator.available_size() + self._tree.num_evictable_kv_tokens

    def available_states(self) -> int:
        """State slots that are free or that the tree would give up."""
        return self._slots.num_free_states + self._tree.num_evictable_states

    def mamba_usage(self) -> float:
        """Share of the state slots that requests hold, 0..1."""
        total = self._slots.num_states
        return 1.0 - self.available_states() / total if total else 0.0

    def stats(self) -> dict[str, int]:
        """Gauges: slots in all, held by requests, and kept by the tree, for KV and for states."""
        slots, cached_states = self._slots, self._tree.num_states
        used_states = slots.num_states - slots.num_free_states - cached_states
        return {
            "kv_tokens_total": self._allocator.size,
            "kv_tokens_available": self.available_tokens(),
            "kv_tokens_cached": self._tree.num_kv_tokens,
            "states_total": slots.num_states,
            "states_used": used_states,
            "states_cached": cached_states,
            "requests": len(self._held),
        }

    # -- admission and growth

    def admit(
        self,
        req: HasKV,
        *,
        token_ids: Sequence[int] | np.ndarray,
        num_new_tokens: int,
        limit: int | None = None,
    ) -> bool:
        """Give a waiting request everything its first step needs, or nothing.

        Takes a row, a working state slot, track slots, and pages for the usable prefix and
        ``num_new_tokens`` after it; evicts when short. The matched state is copied into the
        working slot, which is cleared when there is none. On success ``req.kv`` describes what is
        held and ``committed_len == cached_len`` is the length of the prefix.
        """
        if req.kv.req_pool_idx is not None:
            raise ValueError(f"request row {req.kv.req_pool_idx} is admitted already")
        match = self._match(key := token_key(token_ids), limit)
        end = match.usable_len + num_new_tokens
        if end > self._slots.max_context_len:
            raise ValueError(
                f"a request of {end} tokens exceeds the context length "
                f"{self._slots.max_context_len} of a request row"
            )
        if self._host is not None and match.host_len > match.cached_len:
            if not self._load_from_host(self._host, key, match, end):
                return False
            match = self._tree.match(key, limit)
        node = self._tree.end_node(match)
        self._tree.lock(node)
        if not self._take_all(req, match, node, end):
            self._tree.unlock(node)
            return False
        self._tree.touch(node)
        return True

    def _take_all(self, req: HasKV, match: MatchResult, node: TreeNode, end: int) -> bool:
        """Second half of ``admit``: ``node``'s path is locked. False leaves all as before."""
        num_kv = self.num_pages_needed(end) * self._page_size - match.cached_len
        num_states = self._slots.states_at_admission
        if self._slots.num_free_rows < 1 or num_kv > self.available_tokens():
            return False
        if num_states > self.available_states():
            return False
        fresh = self._alloc_pages(num_kv)
        self._take_states(req, node, num_states)
        self._fill(req, match, node, fresh)
        return True

    def _take_states(self, req: HasKV, node: TreeNode, num_states: int) -> None:
        """Give ``req`` its row and slots, the working one with the state of ``node`` or cleared."""
        is_warm = node.state_slot >= 0
        if is_warm:
            self._tree.lock_state(node)
        moved = -1
        if is_warm and num_states > self.available_states():
            # Only the matched state itself is left to give: move it instead of copying it.
            self._tree.unlock_state(node)
            moved = self._tree.take_state(node)
            num_states -= 1
        self._free_up_states(num_states)
        if not self._slots.take(req, moved):
            raise IntegrityError("a row and state slots were promised but cannot be allocated")
        working = req.kv.mamba_pool_idx
        if working is None or moved >= 0:
            return
        if is_warm:
            self._slots.copy_state(node.state_slot, working)
            self._tree.unlock_state(node)
        else:
            self._slots.clear_state(working)

    def _fill(self, req: HasKV, match: MatchResult, node: TreeNode, fresh: np.ndarray) -> None:
        kv, cached = req.kv, match.cached_len
        slots = np.concatenate((self._tree.slots_between(node, 0, cached), fresh))
        row = row_of(kv)
        self._held[row] = HeldRow(req, slots, node, match.branching_len)
        kv.committed_len = kv.cached_len = kv.protected_len = cached
        kv.allocated_len = len(slots)
        kv.node = node
        self._slots.write_row(row, 0, slots)

    def ensure(self, req: HasKV, upto_len: int) -> bool:
        """Hold pages for all positions below ``upto_len``; False (nothing changes) when short."""
        return self.ensure_many([req], [upto_len])

    def ensure_many(self, reqs: Sequence[HasKV], upto_lens: Sequence[int]) -> bool:
        """``ensure`` for a whole batch with one allocation and one write: all of it or nothing.

        Far cheaper than one call per request, which is the way to find out who does not fit.
        """
        page = self._page_size
        growing: list[tuple[HasKV, int]] = []
        total = 0
        for req, upto in zip(reqs, upto_lens):
            missing = upto - req.kv.allocated_len
            if missing > 0:
                if upto > self._slots.max_context_len:
                    raise ValueError(
                        f"position {upto - 1} lies outside a request row of "
                        f"{self._slots.max_context_len} tokens"
                    )
                missing = -(-missing // page) * page
                growing.append((req, missing))
                total += missing
        if not growing:
            return True
        if total > self.available_tokens():
            return False
        self._append_pages(growing, self._alloc_pages(total))
        return True

    def _append_pages(self, growing: list[tuple[HasKV, int]], fresh: np.ndarray) -> None:
        if len(growing) == 1:
            kv = growing[0][0].kv
            self._held[row_of(kv)].append(kv.allocated_len, fresh)
            self._slots.write_row(row_of(kv), kv.allocated_len, fresh)
            kv.allocated_len += len(fresh)
            return
        counts = np.array([count for _, count in growing])
        ends = counts.cumsum()
        starts = np.array([req.kv.allocated_len for req, _ in growing])
        rows = np.repeat([row_of(req.kv) for req, _ in growing], counts)
        positions = np.arange(len(fresh)) + np.repeat(starts - ends + counts, counts)
        at = 0
        for req, count in growing:
            kv = req.kv
            self._held[row_of(kv)].append(kv.allocated_len, fresh[at : at + count])
            kv.allocated_len += count
            at += count
        self._slots.write_positions(rows, positions, fresh)

    def _alloc_pages(self, num_tokens: int) -> np.ndarray:
        """Pages for ``num_tokens`` slots; the caller has checked ``available_tokens``."""
        short = num_tokens - self._allocator.available_size()
        if short > 0:
            self._tree.evict_kv(short)
        slots = self._allocator.alloc(num_tokens)
        if slots is None:
            raise IntegrityError(f"{num_tokens} KV slots were promised but cannot be allocated")
        return slots

    def _free_up_states(self, num_states: int) -> None:
        short = num_states - self._slots.num_free_states
        if short > 0:
            self._tree.evict_states(short)

    # -- checkpoint states

    def track_rows_for_extend(self, req: HasKV, start: int, end: int) -> tuple[int, int]:
        """Where and when to store a state in the prefill chunk ``start .. end-1``.

        Returns ``(state slot, rows)``: store the state after that many rows of the chunk, then call
        ``note_track(req, start + rows)``; ``(-1, -1)`` when there is nothing to store.
        """
        if self._tracker is None:
            return -1, -1
        branching = self._held[row_of(req.kv)].branching_len
        return self._tracker.rows_for_extend(req, start, end, branching)

    def track_slot_for_decode(
        self, req: HasKV, max_tokens: int | None = None, *, is_ahead: bool = False
    ) -> int:
        """State slot for the boundary state that the next decode or verify step may reach, or -1.

        ``max_tokens``: the most that step can commit; the policy's by default. ``note_track`` must follow
        a stored state, also when the request ends in that step, before ``finish``. ``is_ahead``: a step is
        in flight that may have ended the request, so its latest checkpoint must not be overwritten.
        """
        own = self._tracker
        return -1 if own is None else own.slot_for_decode(req, max_tokens, is_ahead=is_ahead)

    def note_track(self, req: HasKV, seqlen: int) -> None:
        """Record that the state of exactly ``seqlen`` tokens was stored in the next-track entry."""
        if self._tracker is None:
            raise ValueError("note_track without a prefix cache of states: nothing can be stored")
        self._tracker.note(req, seqlen)

    # -- handing over to the tree

    def cache_unfinished(self, req: HasKV, token_ids: Sequence[int] | np.ndarray) -> None:
        """After a prefill chunk: share its whole pages and its checkpoint, and keep running.

        Where the tree already had the same tokens, the request's row now points at the tree's
        pages and its own are freed.
        """
        if not self._caches:
            return
        key, final_len = self._final_prefix(req, token_ids)
        self._insert_kv(req, key, final_len)
        if self._tracker is not None:
            self._tracker.donate(req, key, final_len, is_finished=False)

    def finish(self, req: HasKV, token_ids: Sequence[int] | np.ndarray) -> None:
        """Give the tree what later requests can use of ``token_ids``, and free the rest.

        ``token_ids`` are prompt and kept output; ``committed_len`` may be larger when the output was
        cut inside an accepted block.
        """
        if self._caches and req.kv.req_pool_idx is not None:
            key, final_len = self._final_prefix(req, token_ids)
            self._insert_kv(req, key, final_len)
            if self._tracker is not None:
                self._tracker.donate(req, key, final_len, is_finished=True)
        self.release(req)

    def retract(self, req: HasKV, token_ids: Sequence[int] | np.ndarray) -> None:
        """Take a running request's memory away; what it computed stays in the tree to resume from."""
        self.finish(req, token_ids)

    def release(self, req: HasKV) -> None:
        """Free everything the request holds and insert nothing; does nothing if it holds nothing."""
        kv = req.kv
        if kv.req_pool_idx is None:
            return
        held = self._held.pop(row_of(kv))
        self._allocator.free(held.slots[kv.protected_len : kv.allocated_len])
        self._tree.unlock(held.node)
        self._slots.give_back(req)
        for field in fields(kv):
            setattr(kv, field.name, field.default)

    def _final_prefix(self, req: HasKV, token_ids: Sequence[int] | np.ndarray) -> tuple[bytes, int]:
        key = token_key(token_ids)
        return key, min(req.kv.committed_len, len(key) // TOKEN_BYTES)

    def _insert_kv(self, req: HasKV, key: bytes, num_tokens: int) -> None:
        kv = req.kv
        end, start = self._tree.page_floor(num_tokens), kv.protected_len
        if end <= start:
            return
        row = row_of(kv)
        held = self._held[row]
        inserted = self._tree.insert(key, held.slots[:end])
        if inserted.existing_len > start:
            duplicates = held.slots[start : inserted.existing_len].copy()
            kept = self._tree.slots_between(inserted.node, start, inserted.existing_len)
            held.slots[start : inserted.existing_len] = kept
            self._slots.write_row(row, start, kept)
            self._allocator.free(duplicates)
        self._tree.lock(inserted.node)
        self._tree.unlock(held.node)
        held.node = kv.node = inserted.node
        kv.protected_len = end

    # -- host tier

    def _load_from_host(
        self, host: HierarchicalCache, key: bytes, match: MatchResult, end: int
    ) -> bool:
        """Bring the host tier's part of a hit into the tree; False when there is no room for it."""
        tree = self._tree
        start = min(match.kv_matched_len, match.host_len)
        above = tree.node_at(key, start)
        tree.lock(above)
        try:
            num_kv = self.num_pages_needed(end) * self._page_size - start
            if self._slots.num_free_rows < 1 or num_kv > self.available_tokens():
                return False
            if self._slots.states_at_admission > self.available_states():
                return False
            hit = host.fetch(key, start, match)
            if hit is not None:
                self._insert_host_hit(host, key, above, hit)
        finally:
            tree.unlock(above)
        return True

    def _insert_host_hit(
        self, host: HierarchicalCache, key: bytes, above: TreeNode, hit: HostHit
    ) -> None:
        tree = self._tree
        state_slot = -1
        if hit.state is not None:
            self._free_up_states(1)
            state_slot = self._slots.alloc_state()
            if state_slot < 0:
                host.cancel(hit)
                return
        fresh = self._alloc_pages(max(0, hit.length - above.end))
        host.load(hit, fresh, state_slot)
        slots = np.concatenate((tree.slots_between(above, 0, above.end), fresh))
        tree.insert(key, slots[: hit.length])
        if state_slot >= 0 and not tree.attach_state(key, hit.length, state_slot):
            raise IntegrityError(f"no place in the tree for a loaded state of {hit.length} tokens")

    # -- everything at once

    def flush(self) -> bool:
        """Empty the prefix cache and its host tier; False (nothing changes) while requests run."""
        if self._held:
            return False
        self._tree.reset()
        if self._host is not None:
            self._host.clear()
        return True

    def check_integrity(self) -> None:
        """Free + held by requests + kept by the tree == total, for pages and for states.

        Raises: IntegrityError naming the first thing that disagrees.
        """
        MemoryBooks(self._slots, self._allocator, self._tree, self._held).check()
        if self._host is not None:
            self._host.check_integrity()
