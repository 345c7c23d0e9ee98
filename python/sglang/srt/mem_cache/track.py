"""Where recurrent states are stored for the prefix cache, and which of a request's entries holds one.

Two grids exist. Prefill may store a state at every *checkpoint* length; decode and verify store one
at every *track* length, a multiple of the former. Lengths count the tokens a state has consumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sglang.srt.mem_cache.req_kv import ReqKV

STATE_CHUNK_TOKENS = 64
STRATEGIES = ("no_buffer", "extra_buffer", "extra_buffer_lazy")


@dataclass(frozen=True)
class TrackGrids:
    """``checkpoint_tokens`` for prefill and branching points, ``track_tokens`` for decode and verify."""

    page_size: int
    checkpoint_tokens: int
    track_tokens: int

    @staticmethod
    def resolve(
        *, page_size: int, track_interval: int, state_chunk: int = STATE_CHUNK_TOKENS
    ) -> TrackGrids:
        """Derive both grids; raises ValueError for an interval that does not fit the pages."""
        if page_size < 1:
            raise ValueError(f"--page-size must be at least 1, got {page_size}")
        if track_interval < 1 or track_interval % page_size:
            raise ValueError(
                f"--mamba-track-interval {track_interval} must be a positive multiple of "
                f"--page-size {page_size}; choose such a value"
            )
        checkpoint = lcm(max(state_chunk, page_size), page_size)
        return TrackGrids(page_size, checkpoint, lcm(checkpoint, track_interval))


@dataclass(frozen=True)
class TrackPolicy:
    """How a request keeps checkpoint states.

    ``num_entries`` is the size of the request's set of track slots: 0 for ``no_buffer``, else 1 or
    2 (2 lets the previous checkpoint survive while the next is written). ``max_step_tokens`` is the
    most tokens one decode or verify step can commit.
    """

    strategy: str
    grids: TrackGrids
    num_entries: int
    max_step_tokens: int = 1

    @staticmethod
    def resolve(
        *, strategy: str, grids: TrackGrids, overlap_schedule: bool, max_step_tokens: int = 1
    ) -> TrackPolicy:
        """Check the combination and size the set; raises ValueError naming the flag to change."""
        if strategy not in STRATEGIES:
            raise ValueError(
                f"--mamba-radix-cache-strategy {strategy!r} is not one of {', '.join(STRATEGIES)} "
                "(auto is resolved before)"
            )
        if strategy == "no_buffer":
            if grids.page_size != 1 or overlap_schedule:
                raise ValueError(
                    "--mamba-radix-cache-strategy no_buffer needs --page-size 1 (got "
                    f"{grids.page_size}) and --disable-overlap-schedule; or choose extra_buffer"
                )
            return TrackPolicy(strategy, grids, 0, max_step_tokens)
        if grids.track_tokens < max_step_tokens:
            raise ValueError(
                f"--mamba-track-interval gives a grid of {grids.track_tokens} tokens, below the "
                f"{max_step_tokens} tokens one step can commit; raise it"
            )
        lazy = strategy == "extra_buffer_lazy"
        return TrackPolicy(strategy, grids, 2 if overlap_schedule or lazy else 1, max_step_tokens)

    @property
    def is_lazy(self) -> bool:
        return self.strategy == "extra_buffer_lazy"


def decode_track_rows(length_after: int, grid: int) -> int:
    """Row count for a one-token step that ends at ``length_after`` tokens: 1 on a boundary, else -1."""
    return 1 if length_after % grid == 0 else -1


def crossing_step(length_before: int, num_accepted: int, grid: int) -> int:
    """Draft step whose state holds exactly the last boundary reached by a verify, or -1.

    ``num_accepted`` includes the bonus token; the result is at most ``num_accepted - 1``.
    """
    after = length_before + num_accepted
    if length_before // grid == after // grid:
        return -1
    return after // grid * grid - length_before - 1


def crossing_steps(length_before: np.ndarray, num_accepted: np.ndarray, grid: int) -> np.ndarray:
    """``crossing_step`` for integer arrays of equal shape; rows with nothing accepted give -1."""
    after = length_before + num_accepted
    steps = after // grid * grid - length_before - 1
    return np.where(length_before // grid == after // grid, -1, steps)


def prefill_track_rows(start: int, end: int, grids: TrackGrids, branching_len: int = -1) -> int:
    """Rows of the chunk ``start .. end-1`` after which a state is stored, or -1.

    A branching point inside the chunk wins; otherwise it is the last multiple of the checkpoint grid,
    counted from ``start``, because a chunked kernel has states only there. A length that does not
    end on a page could never be looked up, so it is not stored.
    """
    grid = grids.checkpoint_tokens
    if start < branching_len <= end and (branching_len - start) % grid == 0:
        return branching_len - start
    rows = (end - start) // grid * grid
    return rows if rows and (start + rows) % grids.page_size == 0 else -1


def branching_point(kv_len: int, state_len: int, checkpoint_tokens: int) -> int:
    """Last checkpoint length inside the KV hit and beyond the matched state, or -1."""
    point = kv_len // checkpoint_tokens * checkpoint_tokens
    return point if point > state_len else -1


def note_checkpoint(kv: ReqKV, seqlen: int, num_entries: int) -> None:
    """Record that entry ``mamba_next_track_idx`` now holds the state of ``seqlen`` tokens, and swap."""
    entry = kv.mamba_next_track_idx
    if entry is None:
        raise ValueError("the request holds no track slots")
    kv.mamba_prev_track_seqlen = (
        kv.mamba_last_track_seqlen if entry != kv.mamba_last_track_idx else None
    )
    kv.mamba_last_track_idx = entry
    kv.mamba_last_track_seqlen = seqlen
    kv.mamba_next_track_idx = (entry + 1) % num_entries


def forget_checkpoints(kv: ReqKV) -> None:
    """Drop both checkpoints; the entries themselves stay."""
    kv.mamba_last_track_idx = None
    kv.mamba_last_track_seqlen = None
    kv.mamba_prev_track_seqlen = None


def best_checkpoint(kv: ReqKV, max_len: int) -> tuple[int, int] | None:
    """``(entry, length)`` of the longest held checkpoint of at most ``max_len`` tokens, or None."""
    entry, last, prev = (
        kv.mamba_last_track_idx,
        kv.mamba_last_track_seqlen,
        kv.mamba_prev_track_seqlen,
    )
    if entry is None or last is None:
        return None
    if last <= max_len:
        return entry, last
    return None if prev is None or prev > max_len else (1 - entry, prev)
