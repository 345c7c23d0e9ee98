"""Tiles of the chunked prefill, as data.

`PRODUCTS_HALF` is what ``benchmark/gdn_prefill`` measured on an H200 for the 35B model: 220 us and 232 us for one prompt of
8,192 rows, 219 us and 260 us for eight of 1,024. The others are guesses from tile arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class ChunkTile:
    """One program of the chunk kernel: a chunk and `heads` value heads that share a key head.

    `base`: size of the diagonal blocks inverted by substitution (the lean kernel negates at 2); larger blocks are
    merged by products at `solve_precision` ("fp16", the lean kernel alone: 16-bit operands). `block_d`: columns of q, k, v in a product. `max_registers` a thread, None for no bound.
    """

    heads: int
    base: int
    solve_precision: str
    block_d: int
    num_warps: int
    num_stages: int
    max_registers: int | None


@dataclass(frozen=True)
class StateTile:
    """One program of the state kernel: `block_v` state rows of one value head of one request.

    `copy_engine`: whole chunks are fetched through tensor descriptors; the lean kernels alone can.
    """

    block_v: int
    num_warps: int
    num_stages: int
    max_registers: int | None
    copy_engine: bool = False


@dataclass(frozen=True)
class PrefillTiles:
    """`dot_precision` matters to fp32 activations alone. `lean`: the kernels that hand on the inverse."""

    chunk: ChunkTile
    state: StateTile
    dot_precision: str
    lean: bool = False


PRODUCTS_HALF = PrefillTiles(
    ChunkTile(
        heads=1,
        base=16,
        solve_precision="tf32",
        block_d=64,
        num_warps=4,
        num_stages=1,
        max_registers=168,
    ),
    StateTile(block_v=32, num_warps=4, num_stages=3, max_registers=None),
    dot_precision="tf32",
)
_SINGLE = PrefillTiles(
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


LEAN_HALF = PrefillTiles(
    ChunkTile(
        heads=1,
        base=2,
        solve_precision="fp16",
        block_d=128,
        num_warps=4,
        num_stages=1,
        max_registers=168,
    ),
    StateTile(block_v=64, num_warps=4, num_stages=3, max_registers=None, copy_engine=True),
    dot_precision="ieee",
    lean=True,
)

# 64 KB of shared memory hold one stage, and AMD has no tf32 everywhere.
_AMD_HALF = replace(
    PRODUCTS_HALF,
    chunk=replace(PRODUCTS_HALF.chunk, solve_precision="ieee"),
    state=replace(PRODUCTS_HALF.state, num_stages=1),
    dot_precision="ieee",
)
_AMD_SINGLE = replace(
    _SINGLE, chunk=replace(_SINGLE.chunk, solve_precision="ieee"), dot_precision="ieee"
)


def prefill_tiles(element_bytes: int) -> PrefillTiles:
    """Chosen by the maker and the width of the activations alone, so that a batch cannot change a request's bits."""
    if torch.version.hip is not None:
        return _AMD_SINGLE if element_bytes > 2 else _AMD_HALF
    return _SINGLE if element_bytes > 2 else PRODUCTS_HALF


def launch_options(tile: ChunkTile | StateTile) -> dict[str, int]:
    """Triton's options of a tile; only its NVIDIA compiler takes a bound on registers."""
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    if tile.max_registers is not None and torch.version.hip is None:
        options["maxnreg"] = tile.max_registers
    return options
