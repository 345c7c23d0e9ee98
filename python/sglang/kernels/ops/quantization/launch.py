"""Tiles of block-scaled linear maps, as data: the fastest of ``benchmark/gpu_kernels/sweep.py`` on an H200."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_GROUP = 128


@dataclass(frozen=True)
class GemmTile:
    """Output tile of one program, and how it is run. K goes in steps of one scale block.

    parts          products that a step is split into along N: one part's product waits in registers
                   beside the whole tile's sum, so a tile too large for both goes in parts
    group_m        row tiles that run next to each other before the next column tile's
    descriptors    operands come through tensor descriptors (the copy engine), not through pointers
    weights_first  the product's rows are the weight's: Hopper multiplies FP8 in units of 64 rows
    scales_ahead   the activations' scales are fetched as many steps ahead as the operands
    splits         programs that share a tile, each with its range of K and a result of its own
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    parts: int = 1
    group_m: int = 1024
    descriptors: bool = False
    weights_first: bool = False
    scales_ahead: bool = False
    splits: int = 1


@dataclass(frozen=True)
class HopperTile:
    """Of ``csrc/hopper_products.cu``: 128 rows and two parts of 128 columns, in 4 stages of 48 KB.

    group_m  as above; experts have an order of their own
    watch    a kernel that waits for ever ends with an error; for tests of the kernel
    """

    group_m: int = 8
    watch: bool = False

    @property
    def block_m(self) -> int:
        return 128


MANY_ON_HOPPER: HopperTile | None = HopperTile(group_m=8)
"""For products of more than SMALL_ROWS rows, dense ones and experts', that ``hopper_tile`` finds served: bf16
results in whole tiles on a GPU of compute capability 9.0. None leaves them to the tiles below."""

QUANTIZE_GROUPS = 8
"""Groups of one row that a program quantises: 16 bytes a thread of its warps."""

QUANTIZE_WARPS = 4

SMALL_ROWS = 128
"""Most rows of the table for decode and verify; above the rows of any step of the workloads here."""

_WIDE_COLUMNS = 8192
LONG_DEPTH = 4096


@dataclass(frozen=True)
class GemmTiles:
    """Tiles of one maker's GPUs: of few and many rows, of few rows and a weight of many, gated, and split."""

    few: GemmTile
    few_wide: GemmTile
    many: GemmTile
    gated_few: GemmTile
    gated_many: GemmTile
    split_few: GemmTile


_NVIDIA = GemmTiles(
    few=GemmTile(block_m=64, block_n=32, num_warps=4, num_stages=6, scales_ahead=True),
    few_wide=GemmTile(block_m=64, block_n=64, num_warps=4, num_stages=4),
    many=GemmTile(128, 128, num_warps=8, num_stages=4, group_m=16, descriptors=True),
    gated_few=GemmTile(block_m=64, block_n=256, num_warps=4, num_stages=3, parts=2),
    gated_many=GemmTile(64, 256, num_warps=8, num_stages=3, parts=2, group_m=16, descriptors=True),
    split_few=GemmTile(64, 64, num_warps=4, num_stages=5, descriptors=True, splits=4),
)
_AMD_GATED = GemmTile(block_m=64, block_n=256, num_warps=4, num_stages=2, parts=2)
_AMD = GemmTiles(
    few=GemmTile(block_m=64, block_n=32, num_warps=4, num_stages=2),
    few_wide=GemmTile(block_m=64, block_n=64, num_warps=4, num_stages=2),
    many=GemmTile(block_m=128, block_n=128, num_warps=8, num_stages=2, group_m=16),
    gated_few=_AMD_GATED,
    gated_many=_AMD_GATED,
    split_few=GemmTile(block_m=64, block_n=64, num_warps=4, num_stages=2, splits=4),
)
"""Within 64 KB of shared memory and without descriptors; compiled, never timed."""


def on_amd() -> bool:
    return torch.version.hip is not None


def gemm_tiles(*, amd: bool) -> GemmTiles:
    return _AMD if amd else _NVIDIA


def dense_tile(num_rows: int, num_columns: int) -> GemmTile:
    """For x [num_rows, K] and a weight [num_columns, K]."""
    tiles = gemm_tiles(amd=on_amd())
    if num_rows > SMALL_ROWS:
        return tiles.many
    return tiles.few_wide if num_columns >= _WIDE_COLUMNS else tiles.few


def fits_hopper(num_columns: int, depth: int, *, gated: bool) -> bool:
    """Whether whole tiles make ``num_columns`` results (of a gated product: columns of its gate)."""
    return num_columns % (_GROUP if gated else 2 * _GROUP) == 0 and depth % _GROUP == 0


def gated_tile(num_rows: int) -> GemmTile:
    """For a weight of gate and up rows: two parts of one scale block each."""
    tiles = gemm_tiles(amd=on_amd())
    return tiles.gated_many if num_rows > SMALL_ROWS else tiles.gated_few


def splits_pay(num_rows: int, depth: int) -> bool:
    """Whether a product whose reader can add parts is made in parts: few rows and a long sum."""
    return num_rows <= SMALL_ROWS and depth >= LONG_DEPTH


def split_tile() -> GemmTile:
    return gemm_tiles(amd=on_amd()).split_few


def check_gated(parts: int, block_n: int) -> None:
    """Raises: ValueError unless a tile's parts are a group of gate columns and the same of up columns."""
    if parts != 2 or block_n != 2 * _GROUP:
        raise ValueError(
            f"a gated tile has 2 parts of {_GROUP} columns, not {parts} parts of {block_n} together"
        )


def part_width(parts: int, block_n: int) -> int:
    """Columns of one part of a tile.

    Raises: ValueError unless it divides a scale block: a part's product is scaled by one number a row.
    """
    width = block_n // parts
    if width * parts != block_n or _GROUP % width:
        raise ValueError(
            f"{parts} parts of {block_n} columns: a part must divide a scale block of {_GROUP} columns"
        )
    return width
