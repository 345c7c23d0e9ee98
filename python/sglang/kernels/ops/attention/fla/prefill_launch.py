"""Tiles of the chunked prefill, as data.

`FEW_HALF` and `MANY_HALF` are what ``benchmark/gdn_prefill`` measured on an H200 for the 35B model: the chunk
kernel takes 107 us for 8,192 rows, the state kernel 210 us for one prompt of them and 109 us for eight. The
others are guesses from tile arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

# Walks of a prompt's value head. Measured at 32 and 256 of them; three stages fill a core's shared memory, two
# leave room for a second program.
_MANY_WALKS = 128


@dataclass(frozen=True)
class ChunkTile:
    """One program of the chunk kernel: a chunk and `heads` value heads that share a key head.

    `base`: size of the diagonal blocks inverted by substitution (2: negated); larger blocks are merged by
    products at `solve_precision` ("fp16": 16-bit operands; "fp16 blocks": diagonal blocks of 16, each a warp's,
    are products as well, and `base` is 16). `block_d`: columns of q and k in a product.
    `max_registers` a thread, None for no bound. `backwards`: the last chunk first, so that the first ones, where
    the state kernel begins, are still in the L2 cache; no bit depends on it.
    """

    heads: int
    base: int
    solve_precision: str
    block_d: int
    num_warps: int
    num_stages: int
    max_registers: int | None
    backwards: bool = False


@dataclass(frozen=True)
class StateTile:
    """One program of the state kernel: `block_v` state rows of one value head of one request.

    `copy_engine`: whole chunks are fetched through tensor descriptors. `in_order`: by the kernel for Hopper,
    where it serves the rows; of the other fields it takes the stages alone. No field changes a bit of the results.
    """

    block_v: int
    num_warps: int
    num_stages: int
    max_registers: int | None
    copy_engine: bool = False
    in_order: bool = False


@dataclass(frozen=True)
class PrefillTiles:
    """`dot_precision` matters to fp32 activations alone."""

    chunk: ChunkTile
    state: StateTile
    dot_precision: str


FEW_HALF = PrefillTiles(
    ChunkTile(
        heads=1,
        base=4,
        solve_precision="fp16",
        block_d=128,
        num_warps=4,
        num_stages=1,
        max_registers=168,
    ),
    StateTile(block_v=64, num_warps=4, num_stages=3, max_registers=None, copy_engine=True),
    dot_precision="ieee",
)
MANY_HALF = replace(FEW_HALF, state=replace(FEW_HALF.state, num_stages=2))
SINGLE = PrefillTiles(
    ChunkTile(
        heads=1,
        base=16,
        solve_precision="tf32x3",
        block_d=32,
        num_warps=4,
        num_stages=1,
        max_registers=None,
    ),
    StateTile(block_v=16, num_warps=4, num_stages=1, max_registers=None),
    dot_precision="tf32x3",
)

# 64 KB of shared memory hold one stage, and AMD has no tf32 everywhere.
AMD_HALF = replace(FEW_HALF, state=replace(FEW_HALF.state, num_stages=1, copy_engine=False))
AMD_SINGLE = replace(
    SINGLE, chunk=replace(SINGLE.chunk, solve_precision="ieee"), dot_precision="ieee"
)


def prefill_tiles(element_bytes: int, walks: int) -> PrefillTiles:
    """For activations of that width and `walks` prompts times value heads.

    The chunk tile goes by the maker and the width alone, so that a batch cannot change a request's bits.
    """
    if torch.version.hip is not None:
        return AMD_SINGLE if element_bytes > 2 else AMD_HALF
    if element_bytes > 2:
        return SINGLE
    return FEW_HALF if walks < _MANY_WALKS else MANY_HALF


def launch_options(tile: ChunkTile | StateTile) -> dict[str, int]:
    """Triton's options of a tile; only its NVIDIA compiler takes a bound on registers."""
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    if tile.max_registers is not None and torch.version.hip is None:
        options["maxnreg"] = tile.max_registers
    return options
