"""What one request holds in the memory pools; hangs on ``req.kv``.

Only ``RequestMemory`` and the request pool write these fields. All indices are plain host integers,
so that the scheduler never waits for a device to learn what a request owns.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ReqKV:
    """Memory held by one request.

    Lengths count tokens from the start of the request. Slot fields hold pool indices; ``None`` means
    nothing is held, and ``-1`` inside the ping-pong buffer means that entry is empty.
    """

    req_pool_idx: int | None = None
    committed_len: int = 0
    """Tokens whose KV and recurrent state are final."""
    allocated_len: int = 0
    """Positions covered by held pages; a multiple of the page size while pages are held."""
    cached_len: int = 0
    """Leading tokens that came from the prefix cache at admission."""
    protected_len: int = 0
    """Leading positions whose pages belong to the prefix tree, not to the request."""
    node: object | None = None
    """Locked prefix-tree node."""

    mamba_pool_idx: int | None = None
    """Working state slot."""
    mamba_ping_pong_track_buffer: list[int] | None = None
    """One or two track slots; the pair is swapped each time a boundary state is stored."""
    mamba_next_track_idx: int | None = None
    """Position in the buffer (0 or 1) that the next boundary state is written to."""
    mamba_last_track_idx: int | None = None
    """Position in the buffer of the latest boundary state."""
    mamba_last_track_seqlen: int | None = None
    """Length of the latest boundary state, in tokens."""
    mamba_prev_track_seqlen: int | None = None
    """Length of the boundary state before it."""

    @property
    def holds_mamba(self) -> bool:
        """True while the request owns a working state slot."""
        return self.mamba_pool_idx is not None
