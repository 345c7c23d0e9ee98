"""Tiles of the prompt convolution, as data.

Values are guesses from tile arithmetic until ``benchmark/gdn_prefill`` holds a measurement for the GPU at hand.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ConvTile:
    """One program: `block_t` tokens of `block` channels, `rows` tokens loaded at a time."""

    block_t: int
    rows: int
    block: int
    num_warps: int


PREFILL_TILE = ConvTile(block_t=32, rows=4, block=1024, num_warps=4)
