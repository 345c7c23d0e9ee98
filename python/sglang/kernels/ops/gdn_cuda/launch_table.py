"""Tile shapes of the CUDA C++ verify, as data keyed by compute capability and draft width."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VerifyTile:
    """Compile-time shape of the kernel.

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


# Compiled without spills on sm_90.
DEFAULT_TILE = VerifyTile(num_warps=4, rows_per_lane=4, min_ctas=3)


def select_tile(*, num_heads_in_batch: int, draft_tokens: int) -> VerifyTile:
    """The tile for a launch; num_heads_in_batch is requests times value heads."""
    return DEFAULT_TILE
