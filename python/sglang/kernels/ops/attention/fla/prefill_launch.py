"""Tiles of the chunked prefill, as data.

Values are guesses from tile arithmetic until ``benchmark/gdn_prefill`` holds a measurement for the GPU at hand.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ChunkTile:
    """One program of the chunk kernel: a chunk and `heads` value heads that share a key head.

    `base`: size of the diagonal blocks inverted by substitution; larger blocks are merged by products at
    `solve_precision`.
    """

    heads: int
    base: int
    solve_precision: str
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class StateTile:
    """One program of the state kernel: `block_v` state rows of one value head of one request."""

    block_v: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class PrefillTiles:
    """`dot_precision` matters to fp32 activations alone."""

    chunk: ChunkTile
    state: StateTile
    dot_precision: str


_HALF = PrefillTiles(
    ChunkTile(heads=1, base=16, solve_precision="tf32", num_warps=4, num_stages=1),
    StateTile(block_v=64, num_warps=4, num_stages=3),
    dot_precision="tf32",
)
_SINGLE = PrefillTiles(
    ChunkTile(heads=1, base=16, solve_precision="ieee", num_warps=8, num_stages=1),
    StateTile(block_v=32, num_warps=4, num_stages=1),
    dot_precision="ieee",
)


def prefill_tiles(element_bytes: int) -> PrefillTiles:
    """Chosen by the width of the activations alone, so that a batch cannot change a request's bits."""
    return _SINGLE if element_bytes > 2 else _HALF
