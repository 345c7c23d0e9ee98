"""A fingerprint of a request's recurrent state, for comparisons between two servers."""

from __future__ import annotations

import hashlib

import torch

from sglang.srt.mem_cache.pool.mamba_pool import MambaPool
from sglang.srt.mem_cache.req_kv import ReqKV

DIGEST_BYTES = 16


def state_digest(pool: MambaPool, kv: ReqKV) -> str | None:
    """Hex digest over all bytes of the request's conv and recurrent state, in every layer.

    Covers the working slot, then length and content of the latest boundary state that the request
    still holds. Waits for the device. None when the request holds no state; never reads scratch, so
    the state must have been committed.
    """
    if kv.mamba_pool_idx is None:
        return None
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    _add_slot(digest, pool, kv.mamba_pool_idx)
    track_slot = _latest_track_slot(kv)
    if track_slot >= 0:
        digest.update(f"track {kv.mamba_last_track_seqlen}".encode())
        _add_slot(digest, pool, track_slot)
    return digest.hexdigest()


def _latest_track_slot(kv: ReqKV) -> int:
    """Slot of the latest boundary state, or -1 once the prefix tree has it or there was none."""
    entry = kv.mamba_last_track_idx
    if kv.mamba_ping_pong_track_buffer is None or entry is None:
        return -1
    if kv.mamba_last_track_seqlen is None:
        return -1
    return kv.mamba_ping_pong_track_buffer[entry]


def _add_slot(digest: hashlib.blake2b, pool: MambaPool, slot: int) -> None:
    conv, temporal = pool.get_cpu_copy(
        torch.tensor([slot], device=pool.mamba_cache.temporal.device)
    )
    for tensor in (*conv, temporal):
        digest.update(tensor.contiguous().view(torch.uint8).numpy())
