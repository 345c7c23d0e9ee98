"""Which state slot a request's next checkpoint goes to, and how checkpoints reach the prefix tree."""

from __future__ import annotations

from sglang.srt.mem_cache.integrity import IntegrityError
from sglang.srt.mem_cache.pool.req_pool import HasKV
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.request_slots import RequestSlots, track_entries, working_slot
from sglang.srt.mem_cache.track import (
    TrackPolicy,
    best_checkpoint,
    forget_checkpoints,
    note_checkpoint,
    prefill_track_rows,
)


class StateTracker:
    """Keeps a request's track entries; hands their slots to the tree.

    Without track entries (``no_buffer``) the working state itself is what the tree gets.
    """

    def __init__(self, policy: TrackPolicy, slots: RequestSlots, tree: RadixCache) -> None:
        self._policy = policy
        self._slots = slots
        self._tree = tree

    def alloc_state(self) -> int:
        """One state slot, evicting from the tree if needed, or -1."""
        if self._slots.num_free_states < 1:
            self._tree.evict_states(1)
        return self._slots.alloc_state()

    def rows_for_extend(
        self, req: HasKV, start: int, end: int, branching_len: int
    ) -> tuple[int, int]:
        """See ``RequestMemory.track_rows_for_extend``."""
        if self._policy.num_entries == 0:
            return -1, -1
        rows = prefill_track_rows(start, end, self._policy.grids, branching_len)
        slot = self._destination(req) if rows > 0 else -1
        return (slot, rows) if slot >= 0 else (-1, -1)

    def slot_for_decode(self, req: HasKV, max_tokens: int | None, *, is_ahead: bool) -> int:
        """See ``RequestMemory.track_slot_for_decode``."""
        policy = self._policy
        reach = policy.max_step_tokens if max_tokens is None else max_tokens
        grid = policy.grids.track_tokens
        if policy.num_entries == 0 or req.kv.committed_len % grid + reach < grid:
            return -1
        return self._destination(req, keeps_latest=is_ahead)

    def _destination(self, req: HasKV, *, keeps_latest: bool = False) -> int:
        """Slot of the entry written next; an empty entry is filled, or the other one is reused.

        ``keeps_latest``: -1 rather than the slot of the latest checkpoint.
        """
        entries, entry = track_entries(req.kv)
        latest = req.kv.mamba_last_track_idx if keeps_latest else None
        if entries[entry] >= 0:
            return -1 if entry == latest else entries[entry]
        slot = self.alloc_state()
        if slot >= 0:
            self._slots.set_track_entry(req, entry, slot)
            return slot
        for other, held in enumerate(entries):
            if held >= 0 and other != latest:
                req.kv.mamba_next_track_idx = other
                return held
        return -1

    def note(self, req: HasKV, seqlen: int) -> None:
        """See ``RequestMemory.note_track``."""
        kv, policy = req.kv, self._policy
        if policy.num_entries == 0 or seqlen % policy.grids.page_size:
            raise ValueError(
                f"cannot note a checkpoint of {seqlen} tokens: it must be whole pages of "
                f"{policy.grids.page_size}, and strategy {policy.strategy} has "
                f"{policy.num_entries} track slots"
            )
        note_checkpoint(kv, seqlen, policy.num_entries)
        if policy.is_lazy:
            self._drop_previous(req)

    def _drop_previous(self, req: HasKV) -> None:
        entries, entry = track_entries(req.kv)
        slot = entries[entry]
        req.kv.mamba_prev_track_seqlen = None
        if slot >= 0:
            self._slots.set_track_entry(req, entry, -1)
            self._slots.free_state(slot)

    def donate(self, req: HasKV, key: bytes, final_len: int, *, is_finished: bool) -> None:
        """Give the tree the longest state of at most ``final_len`` tokens; their KV is there."""
        if self._policy.num_entries:
            keep_entry = not is_finished and not self._policy.is_lazy
            self._donate_checkpoint(req, key, final_len, keep_entry)
        elif final_len and final_len == req.kv.committed_len:
            if is_finished:
                self._donate_working_state(req, key, final_len)
            else:
                self._donate_copy(req, key, final_len)

    def _donate_checkpoint(self, req: HasKV, key: bytes, max_len: int, keep_entry: bool) -> None:
        """Move the longest fitting checkpoint into the tree under exactly its length.

        With ``keep_entry`` a fresh slot takes its place; when none can be had, the request keeps the
        checkpoint for later.
        """
        kv = req.kv
        best = best_checkpoint(kv, max_len)
        if best is None:
            return
        entry, length = best
        if self._tree.match(key, length).cached_len == length:
            forget_checkpoints(kv)
            return
        fresh = self.alloc_state() if keep_entry else -1
        if keep_entry and fresh < 0:
            return
        slot = track_entries(kv)[0][entry]
        if not self._tree.attach_state(key, length, slot):
            raise IntegrityError(f"no place in the tree for a state of {length} tokens")
        self._slots.set_track_entry(req, entry, fresh)
        forget_checkpoints(kv)

    def _donate_copy(self, req: HasKV, key: bytes, length: int) -> None:
        if self._tree.match(key, length).cached_len == length:
            return
        slot = self.alloc_state()
        if slot < 0:
            return
        self._slots.copy_state(working_slot(req.kv), slot)
        if not self._tree.attach_state(key, length, slot):
            raise IntegrityError(f"no place in the tree for a state of {length} tokens")

    def _donate_working_state(self, req: HasKV, key: bytes, length: int) -> None:
        if self._tree.attach_state(key, length, working_slot(req.kv)):
            req.kv.mamba_pool_idx = None
