"""Pairs of (row, expert) ordered by expert, on the device and without atomics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang.kernels import triton_support
from sglang.kernels.launch_overlap import overlapping
from sglang.kernels.ops.moe.route import next_power_of_two

if triton_support.AVAILABLE:
    from sglang.kernels.ops.moe.sort_kernels import count_kernel, place_kernel

BLOCK = 1024
"""Pairs that are counted together; up to so many are ordered in one launch."""

_COUNT_ROWS = 16


@dataclass(frozen=True)
class PlaceLaunch:
    """Pairs that one program places, and experts or tiles that it pads or marks at once."""

    part: int
    chunk: int
    num_warps: int


FEW = PlaceLaunch(part=16, chunk=8, num_warps=8)
MANY = PlaceLaunch(part=128, chunk=32, num_warps=4)
"""Up to BLOCK pairs, which every program counts itself, and more."""


@dataclass(frozen=True)
class ExpertOrder:
    """Pair t * top_k + j stands for row t and its j-th expert.

    pairs         [num_tiles * block_m] int32, each expert's pairs ascending, -1 padding up to whole tiles
    tile_experts  [num_tiles] int32, the expert of each tile; -1: nobody's, its pairs are undefined
    """

    pairs: Tensor
    tile_experts: Tensor
    block_m: int

    @property
    def num_tiles(self) -> int:
        return self.tile_experts.shape[0]


@dataclass(frozen=True)
class ExpertRows:
    """Which expert takes which row.

    order        of the routed pairs; pair t * top_k + j stands for row t and its j-th expert
    num_pairs    T * top_k
    top_k        experts a row
    shared_rows  T if the last expert is a shared one, whose pair of row t is num_pairs + t, else 0
    """

    order: ExpertOrder
    num_pairs: int
    top_k: int
    shared_rows: int

    @property
    def num_results(self) -> int:
        return self.num_pairs + self.shared_rows

    @property
    def num_tiles(self) -> int:
        return self.order.num_tiles + -(-self.shared_rows // self.order.block_m)


def order_by_expert(chosen: Tensor, num_experts: int, block_m: int) -> ExpertOrder:
    """Order the pairs of chosen [T, top_k] int32, contiguous; an expert id of -1 is left out.

    The number of tiles is the most that so many pairs can need, so the host learns nothing.
    """
    num_pairs, device = chosen.numel(), chosen.device
    num_tiles = num_pairs // block_m + min(num_pairs, num_experts)
    block_e = next_power_of_two(num_experts)
    num_blocks = -(-num_pairs // BLOCK)
    pairs = torch.empty(num_tiles * block_m, dtype=torch.int32, device=device)
    tile_experts = torch.empty(num_tiles, dtype=torch.int32, device=device)
    if not num_pairs:
        return ExpertOrder(pairs, tile_experts, block_m)
    counts = chosen
    if num_blocks > 1:
        counts = torch.empty((num_blocks, block_e), dtype=torch.int32, device=device)
        count_kernel[(num_blocks,)](
            chosen,
            counts,
            num_pairs,
            BLOCK=BLOCK,
            BLOCK_E=block_e,
            **overlapping(chosen),
        )
    launch = MANY if num_blocks > 1 else FEW
    grid = -(-num_pairs // launch.part)
    if num_blocks == 1:
        grid = max(grid, -(-max(num_experts, num_tiles) // launch.chunk))
    place_kernel[(grid,)](
        chosen,
        counts,
        pairs,
        tile_experts,
        num_pairs,
        num_experts,
        num_tiles,
        num_blocks,
        COUNTED=num_blocks > 1,
        BLOCK=BLOCK,
        PART=launch.part,
        BLOCK_E=block_e,
        BLOCK_B=_COUNT_ROWS,
        BLOCK_M=block_m,
        CHUNK=launch.chunk,
        **overlapping(chosen),
        num_warps=launch.num_warps,
    )
    return ExpertOrder(pairs, tile_experts, block_m)
