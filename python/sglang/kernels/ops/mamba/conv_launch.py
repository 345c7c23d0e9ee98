"""Tiles of the prompt convolution, as data.

Measured on an H200 with ``benchmark/gdn_prefill``: 84 us for 8,192 rows of 8,192 channels, 1.35 times the time that
the bytes take; 512 channels a program beat 1,024 (106 us), and the number of tokens hardly matters.
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


PREFILL_TILE = ConvTile(block_t=32, rows=4, block=512, num_warps=4)
