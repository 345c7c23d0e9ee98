"""Launch of the Hopper kernel of FP8 products; needs Triton's Gluon and compute capability 9.0."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sglang.kernels.ops.quantization.hopper_kernel import hopper_gemm_kernel
from sglang.kernels.ops.quantization.launch import HopperTile, fits_hopper
from sglang.kernels.ops.quantization.rows import GROUP

_HALF = 64  # rows of one multiplying group, as hopper_gemm_kernel has them
_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@dataclass(frozen=True)
class GroupedRows:
    """Which expert takes which row, in tiles of 128 rows; of the fields see ``ExpertRows``."""

    pairs: Tensor
    tile_experts: Tensor
    num_tiles: int
    num_pairs: int
    top_k: int
    shared_rows: int
    x_by_pair: bool


@cache
def num_cores(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _descriptor(matrix: Tensor, rows: int) -> TensorDescriptor:
    """For loads of [rows, 128] of ``matrix`` [R, K] e4m3, zero beyond its edges."""
    block = [rows, GROUP]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float8e4nv)
    return TensorDescriptor.from_tensor(matrix, block, layout)


def hopper_gemm(
    values: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    out: Tensor,
    out_scale: Tensor | None,
    tile: HopperTile,
    *,
    dtype: torch.dtype,
    grouped: GroupedRows | None = None,
) -> None:
    """``values weight^T`` into ``out``, gated and quantised if there is an ``out_scale``.

    values [M, K] e4m3 and scale [M, K / 128]; weight [N, K], or [E, N, K] with ``grouped``, and its block
    scales; dtype: what the three separate launches of a gated product would round to.
    Raises: ValueError if ``fits_hopper`` does not hold.
    """
    gated, depth, num_columns = out_scale is not None, weight.shape[-1], out.shape[1]
    if not fits_hopper(num_columns, depth, gated=gated):
        raise ValueError(f"columns of {num_columns} and depth {depth} do not make whole tiles")
    block_m = tile.block_m
    width = GROUP if gated else 2 * GROUP
    rows, routed_tiles, experts = grouped, 0, 1
    tiles_m, extra_rows = -(-values.shape[0] // block_m), values.shape[0]
    if rows is not None:
        routed_tiles, tiles_m, extra_rows = len(rows.tile_experts), rows.num_tiles, rows.shared_rows
        experts = weight.shape[0]
    tiles_n = num_columns // width
    programs = min(tiles_m * tiles_n, num_cores(values.device))
    scales = weight_scale if out_scale is None else out_scale
    hopper_gemm_kernel[(programs,)](
        _descriptor(values, _HALF) if rows is None else values,
        scale,
        _descriptor(weight.flatten(0, -2), GROUP),
        weight_scale,
        out,
        scales,
        weight_scale if rows is None else rows.pairs,
        weight_scale if rows is None else rows.tile_experts,
        values.stride(0),
        scale.stride(0),
        weight_scale.stride(0) if rows is not None else 0,
        weight_scale.stride(-2),
        out.stride(0),
        scales.stride(0),
        tiles_m,
        tiles_n,
        routed_tiles,
        experts - 1,
        0 if rows is None else rows.num_pairs,
        extra_rows,
        num_columns,
        depth // GROUP,
        TOP_K=1 if rows is None else rows.top_k,
        X_BY_PAIR=rows is None or rows.x_by_pair,
        GROUPED=rows is not None,
        GROUP_M=tile.group_m,
        GATED=gated,
        ROUND_TO=_TYPES[dtype],
        STAGES=tile.num_stages,
        num_warps=4,
    )
