"""Request rows and their state slots, as RequestMemory uses them: host integers in, no device sync."""

from __future__ import annotations

import numpy as np

from sglang.srt.mem_cache.pool.req_pool import HasKV, HybridReqToTokenPool, ReqToTokenPool
from sglang.srt.mem_cache.req_kv import ReqKV
from sglang.srt.utils.upload import upload, upload_ids


def held_states(kv: ReqKV) -> list[int]:
    """State slots that a request holds: the working slot, then its track slots."""
    working = [] if kv.mamba_pool_idx is None else [int(kv.mamba_pool_idx)]
    return working + [slot for slot in kv.mamba_ping_pong_track_buffer or () if slot >= 0]


def row_of(kv: ReqKV) -> int:
    """The request's row. Raises: ValueError if it holds none."""
    if kv.req_pool_idx is None:
        raise ValueError("the request was not admitted, or has been released")
    return int(kv.req_pool_idx)


def track_entries(kv: ReqKV) -> tuple[list[int], int]:
    """The request's track slots and the entry written next. Raises: ValueError if it has none."""
    if kv.mamba_ping_pong_track_buffer is None or kv.mamba_next_track_idx is None:
        raise ValueError("the request holds no track slots: it was not admitted, or was released")
    return kv.mamba_ping_pong_track_buffer, kv.mamba_next_track_idx


def working_slot(kv: ReqKV) -> int:
    """The request's working state slot. Raises: ValueError if it has none."""
    if kv.mamba_pool_idx is None:
        raise ValueError("the request holds no working state: it was not admitted, or was released")
    return int(kv.mamba_pool_idx)


class RequestSlots:
    """Thin layer over a request pool, with or without recurrent state."""

    def __init__(self, pool: ReqToTokenPool) -> None:
        self._pool = pool
        self._hybrid = pool if isinstance(pool, HybridReqToTokenPool) else None

    @property
    def _states(self) -> HybridReqToTokenPool:
        if self._hybrid is None:
            raise ValueError("a model without recurrent layers has no state slots")
        return self._hybrid

    @property
    def max_context_len(self) -> int:
        return self._pool.max_context_len

    @property
    def num_free_rows(self) -> int:
        return self._pool.available_size()

    @property
    def num_states(self) -> int:
        """State slots in all; 0 without recurrent layers."""
        return self._hybrid.mamba_allocator.size if self._hybrid is not None else 0

    @property
    def num_free_states(self) -> int:
        return self._hybrid.mamba_allocator.available_size() if self._hybrid is not None else 0

    @property
    def num_track_entries(self) -> int:
        """Track slots a request may hold."""
        return self._hybrid.mamba_ping_pong_track_buffer_size if self._hybrid is not None else 0

    @property
    def states_at_admission(self) -> int:
        """State slots that ``take`` needs for a request that brings none."""
        if self._hybrid is None:
            return 0
        entries = self.num_track_entries
        return 1 + (min(1, entries) if self._hybrid.enable_mamba_extra_buffer_lazy else entries)

    def take(self, req: HasKV, working_slot: int = -1) -> bool:
        """Give ``req`` a row and its state slots, or nothing; ``working_slot`` is one it brings."""
        if working_slot >= 0:
            req.kv.mamba_pool_idx = working_slot
        if self._pool.alloc([req]) is not None:
            return True
        if working_slot >= 0:
            req.kv.mamba_pool_idx = None
        return False

    def give_back(self, req: HasKV) -> None:
        """Free the row and every state slot the request still holds; the row names no slot then."""
        kv = req.kv
        self.write_row(row_of(kv), 0, np.zeros(kv.allocated_len, dtype=np.int64))
        if self._hybrid is not None:
            self._hybrid.free_mamba_cache(req)
        self._pool.free(req)

    def alloc_state(self) -> int:
        """One state slot for the caller, or -1."""
        ids = self._hybrid.mamba_allocator.alloc_ids(1) if self._hybrid is not None else None
        return ids[0] if ids else -1

    def free_state(self, slot: int) -> None:
        self._states.mamba_allocator.free(slot)

    def set_track_entry(self, req: HasKV, entry: int, slot: int) -> None:
        """Put ``slot`` (-1: none) into a track entry; the slot that was there has another owner."""
        self._states.set_mamba_ping_pong_slot(req, entry, slot)

    def copy_state(self, src: int, dst: int) -> None:
        """Copy conv windows and recurrent state, ordered after earlier work on the device's stream."""
        device = self._pool.device
        pair = upload(np.array([[src], [dst]], dtype=np.int64), device)
        self._states.copy_mamba_state(pair[0], pair[1])

    def clear_state(self, slot: int) -> None:
        index = upload_ids([slot], self._pool.device)
        self._states.mamba_pool.clear_slots(index)

    def write_row(self, row: int, start: int, slots: np.ndarray) -> None:
        """KV slots of positions ``start ..`` of one row; a last page may reach past the row's end."""
        slots = slots[: max(0, self.max_context_len - start)]
        values = upload(slots.astype(np.int32), self._pool.device)
        self._pool.write((row, slice(start, start + len(slots))), values)

    def write_positions(self, rows: np.ndarray, positions: np.ndarray, slots: np.ndarray) -> None:
        """KV slots of single positions of many rows, int64 ``[n]`` each, in one write.

        Positions past the end of a row belong to its last page and are left out.
        """
        inside = positions < self.max_context_len
        if not inside.all():
            rows, positions, slots = rows[inside], positions[inside], slots[inside]
        packed = upload(np.stack((rows, positions, slots)), self._pool.device)
        self._pool.write((packed[0], packed[1]), packed[2])

    def read_row(self, row: int, num_tokens: int) -> np.ndarray:
        """KV slots of the first positions of one row, from the device."""
        return self._pool.req_to_token[row, :num_tokens].cpu().numpy()

    def check_integrity(self) -> None:
        self._pool.check_integrity()
