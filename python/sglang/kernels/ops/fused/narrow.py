"""Linear maps of few output rows, as routers and gates have, for decode and verify."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from sglang.kernels import triton_support
from sglang.kernels.launch_overlap import overlapping
from sglang.kernels.ops.quantization.launch import SMALL_ROWS

if triton_support.AVAILABLE:
    from sglang.kernels.ops.fused.narrow_kernel import narrow_linear_kernel


@dataclass(frozen=True)
class NarrowTile:
    """Output tile of one program: small, so that a result of a few hundred columns feeds every core.

    lanes  blocks of K that are multiplied side by side
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    lanes: int = 1


TILE = NarrowTile(block_m=16, block_n=16, block_k=128, num_warps=4, num_stages=3, lanes=4)


def narrow_linear(x: Tensor, weight: Tensor, *, tile: NarrowTile | None = None) -> Tensor:
    """``x W^T`` of x [T, K] and weight [N, K] of one dtype. Returns [T, N].

    Up to SMALL_ROWS rows, or with ``tile``, one kernel whose order of sums is the tile's alone, so that a row
    does not depend on the others; more rows are torch's.
    """
    num_rows, depth = x.shape
    if tile is None and num_rows > SMALL_ROWS:
        return F.linear(x, weight)
    tile = tile or (TILE if x.dtype.itemsize == 2 else replace(TILE, num_stages=2))
    num_columns = weight.shape[0]
    out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    if out.numel():
        grid = (-(-num_rows // tile.block_m), -(-num_columns // tile.block_n))
        narrow_linear_kernel[grid](
            x,
            weight,
            out,
            num_rows,
            num_columns,
            depth,
            x.stride(0),
            weight.stride(0),
            out.stride(0),
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            LANES=tile.lanes,
            EVEN_K=depth % (tile.lanes * tile.block_k) == 0,
            **overlapping(x),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return out
