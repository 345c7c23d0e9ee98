"""Tiles of the chunked prefill, as data.

`HALF` is what ``benchmark/gdn_prefill`` measured on an H200 for the 35B model: for 8,192 rows the chunk kernel takes
78 us, the state kernel 142 us for one prompt and 101 us for eight. The others are guesses from tile arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class ChunkTile:
    """One program of the chunk kernel: a chunk and a value head.

    `solve_precision` is that of the products that make the inverse ("fp16": 16-bit operands in all of it; others,
    those of `tl.dot`, merge blocks that substitution has inverted). `block_d`: columns of q and k in a product.
    `max_registers` a thread, None for no bound.
    """

    solve_precision: str
    block_d: int
    num_warps: int
    num_stages: int
    max_registers: int | None


@dataclass(frozen=True)
class StateTile:
    """One program of the state kernel: `block_v` state rows of one value head of one request.

    `copy_engine`: whole chunks are fetched through tensor descriptors. `in_order`: by the kernel for Hopper where
    it serves the rows, whose tile is its own. No field changes a bit of the results.
    """

    block_v: int
    num_warps: int
    num_stages: int
    copy_engine: bool = False
    in_order: bool = False


@dataclass(frozen=True)
class PrefillTiles:
    """`dot_precision` matters to fp32 activations alone."""

    chunk: ChunkTile
    state: StateTile
    dot_precision: str


HALF = PrefillTiles(
    ChunkTile(solve_precision="fp16", block_d=128, num_warps=4, num_stages=1, max_registers=168),
    StateTile(block_v=64, num_warps=4, num_stages=2, copy_engine=True, in_order=True),
    dot_precision="ieee",
)
SINGLE = PrefillTiles(
    ChunkTile(solve_precision="tf32x3", block_d=32, num_warps=4, num_stages=1, max_registers=None),
    StateTile(block_v=16, num_warps=4, num_stages=1),
    dot_precision="tf32x3",
)

# 64 KB of shared memory hold one stage, and AMD has no tf32 everywhere.
AMD_HALF = replace(HALF, state=StateTile(block_v=64, num_warps=4, num_stages=1))
AMD_SINGLE = replace(
    SINGLE, chunk=replace(SINGLE.chunk, solve_precision="ieee"), dot_precision="ieee"
)


def prefill_tiles(element_bytes: int) -> PrefillTiles:
    """For activations of that width.

    By it and the maker of the GPU alone: a tile may change bits, and a batch must not.
    """
    if torch.version.hip is not None:
        return AMD_SINGLE if element_bytes > 2 else AMD_HALF
    return SINGLE if element_bytes > 2 else HALF


def launch_options(tile: ChunkTile | StateTile) -> dict[str, int]:
    """Triton's options of a tile; only its NVIDIA compiler takes a bound on registers."""
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    if isinstance(tile, ChunkTile) and tile.max_registers is not None:
        if torch.version.hip is None:
            options["maxnreg"] = tile.max_registers
    return options
