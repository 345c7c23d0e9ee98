"""Pairs of (row, expert) ordered by expert, on the device and without atomics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang.kernels import triton_support
from sglang.kernels.ops.moe.route import next_power_of_two

if triton_support.AVAILABLE:
    from sglang.kernels.ops.moe.moe_kernels import count_kernel, place_kernel

_BLOCK = 1024


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


def order_by_expert(chosen: Tensor, num_experts: int, block_m: int) -> ExpertOrder:
    """Order the pairs of chosen [T, top_k] int32, contiguous; an expert id of -1 is left out.

    The number of tiles is the most that so many pairs can need, so the host learns nothing.
    """
    num_pairs, device = chosen.numel(), chosen.device
    num_tiles = num_pairs // block_m + min(num_pairs, num_experts)
    counts = torch.empty(num_experts, dtype=torch.int32, device=device)
    pairs = torch.empty(num_tiles * block_m, dtype=torch.int32, device=device)
    tile_experts = torch.empty(num_tiles, dtype=torch.int32, device=device)
    if num_pairs:
        count_kernel[(num_experts,)](chosen, counts, num_pairs, BLOCK=_BLOCK)
        place_kernel[(num_experts,)](
            chosen,
            counts,
            pairs,
            tile_experts,
            num_pairs,
            num_experts,
            num_tiles,
            BLOCK=_BLOCK,
            BLOCK_E=next_power_of_two(num_experts),
            BLOCK_M=block_m,
        )
    return ExpertOrder(pairs, tile_experts, block_m)
