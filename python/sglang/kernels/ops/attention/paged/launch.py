"""Launch settings of paged attention, as data.

Values are guesses from tile arithmetic until ``benchmark/`` holds a measurement for the GPU at hand.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PagedLaunch:
    """Tile of one program: query rows x context tokens; and how it is run."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


SPLIT_TOKENS = 1024
"""Context tokens of one split. Fixed, so that a row's result does not depend on its batch."""


def few_rows(head_dim: int, group_rows: int) -> PagedLaunch:
    """Decode and verify: ``group_rows`` query rows share one KV head."""
    block_m = max(16, 1 << (group_rows - 1).bit_length())
    block_n = 64 if head_dim <= 128 else 32
    return PagedLaunch(min(block_m, 64), block_n, 4, 2)


def many_rows(head_dim: int) -> PagedLaunch:
    """Prompt chunks."""
    return PagedLaunch(128, 64, 8, 2) if head_dim <= 128 else PagedLaunch(64, 64, 8, 2)
