"""Tile shapes of the CUDA C++ verify, as data keyed by batch and draft width."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VerifyTile:
    """Compile-time shape of the kernel; every tile gives the same bits.

    num_warps warps a CTA; rows_per_lane state rows a lane (2 or 4); min_ctas resident CTAs asked of the
    compiler; min_rounds units a CTA works through at least, so that loads overlap arithmetic; pairs runs a
    lane's rows in two halves; pdl lets the launch overlap the end of the kernel before it.
    """

    num_warps: int
    rows_per_lane: int
    min_ctas: int
    min_rounds: int = 1
    pairs: bool = False
    pdl: bool = False

    @property
    def unit_rows(self) -> int:
        return self.num_warps * 4 * self.rows_per_lane


DEFAULT_TILE = VerifyTile(num_warps=4, rows_per_lane=4, min_ctas=3, pdl=True)
DENSE_TILE = VerifyTile(num_warps=4, rows_per_lane=4, min_ctas=4, pairs=True, pdl=True)
LONG_TILE = VerifyTile(num_warps=8, rows_per_lane=4, min_ctas=2, pdl=True)
TABLE_TILES = (DEFAULT_TILE, DENSE_TILE, LONG_TILE)

# Chosen on one H200, 2026-11-29 (benchmark/gdn_verify/results): shared memory lets four DENSE_TILE CTAs stay
# resident up to 8 drafts; past that, and up to one CTA place a head, LONG_TILE prepares each token once.
_LONG_DRAFT = 9
_ONE_WAVE_HEADS = 264


def select_tile(*, num_heads_in_batch: int, draft_tokens: int, deferred: bool) -> VerifyTile:
    """The tile for a launch; num_heads_in_batch is requests times value heads."""
    if draft_tokens >= _LONG_DRAFT:
        return LONG_TILE
    if deferred or num_heads_in_batch <= _ONE_WAVE_HEADS:
        return DENSE_TILE
    return DEFAULT_TILE
