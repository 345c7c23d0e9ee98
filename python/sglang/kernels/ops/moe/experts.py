"""The routed experts of one layer, and a shared one of their size: two grouped products and an ordered sum."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.kernels import triton_support
from sglang.kernels.launch_overlap import overlapping
from sglang.kernels.ops.fused.rows import silu_mul, silu_mul_quantized
from sglang.kernels.ops.fused.sums import RoutedSum
from sglang.kernels.ops.moe.by_slot import down_by_slot, slot_tile, up_by_slot
from sglang.kernels.ops.moe.launch import ExpertTile, ExpertTiles, expert_tiles
from sglang.kernels.ops.moe.sort import ExpertRows, order_by_expert
from sglang.kernels.ops.quantization.fp8 import (
    can_gate,
    check_block_scales,
    descriptor_of,
    quantize,
)
from sglang.kernels.ops.quantization.launch import HopperTile, check_gated, part_width
from sglang.kernels.ops.quantization.rows import GROUP, QuantizedRows

if triton_support.AVAILABLE:
    from sglang.kernels.ops.moe.grouped_gemm_kernel import grouped_gemm_kernel
    from sglang.kernels.ops.quantization.fp8 import TRITON_TYPES


def grouped_linear(
    x: Tensor | QuantizedRows,
    weight: Tensor,
    weight_scale: Tensor | None,
    rows: ExpertRows,
    tile: ExpertTile,
    *,
    x_by_pair: bool,
) -> Tensor:
    """``W[expert] x[row]`` for every pair of ``rows``.

    x [T, K], or [num_results, K] with ``x_by_pair``, is quantised here if the weight is FP8 and it is not
    yet; weight [E, N, K]; weight_scale [E, ceil(N/128), ceil(K/128)] fp32 for an e4m3 weight, else None.
    Returns [num_results, N] in x's dtype; rows of pairs that the order leaves out are undefined. A row's
    sum does not depend on other rows.
    Raises: ValueError if the scales do not fit.
    """
    out = torch.empty((rows.num_results, weight.shape[1]), dtype=x.dtype, device=x.device)
    if weight_scale is None:
        if isinstance(x, QuantizedRows):
            raise ValueError(f"FP8 rows meet experts of {weight.dtype} without scales")
        _launch(x, weight, weight, weight, out, None, rows, tile, x_by_pair, x.dtype)
        return out
    check_block_scales(weight, weight_scale)
    q = quantize(x) if isinstance(x, Tensor) else x
    _launch(q.values, q.scale, weight, weight_scale, out, None, rows, tile, x_by_pair, q.dtype)
    return out


def grouped_gated(
    x: Tensor | QuantizedRows,
    weight: Tensor,
    weight_scale: Tensor,
    rows: ExpertRows,
    tile: ExpertTile,
) -> QuantizedRows:
    """``silu_mul_quantized`` of ``grouped_linear`` of an FP8 weight [E, 2I, K], in one launch: the same bits.

    Raises: ValueError if the scales do not fit or the tile's parts are not a gate's and an up's.
    """
    check_block_scales(weight, weight_scale)
    check_gated(tile.parts, tile.block_n)
    q = quantize(x) if isinstance(x, Tensor) else x
    inner = weight.shape[1] // 2
    out = QuantizedRows.empty(rows.num_results, inner, dtype=x.dtype, device=x.device)
    _launch(
        q.values, q.scale, weight, weight_scale, out.values, out.scale, rows, tile, False, q.dtype
    )
    return out


def _launch(
    values: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    out: Tensor,
    out_scale: Tensor | None,
    rows: ExpertRows,
    tile: ExpertTile,
    x_by_pair: bool,
    dtype: torch.dtype,
) -> None:
    """FP8 if ``weight_scale`` is not ``weight``; gated and quantised if there is an ``out_scale``."""
    fp8, gated = weight_scale is not weight, out_scale is not None
    out_scales = weight_scale if out_scale is None else out_scale
    depth, num_columns = weight.shape[2], out.shape[1]
    parts = tile.parts if fp8 else 1
    block_n = part_width(parts, tile.block_n) if fp8 else tile.block_n
    block_k = GROUP if fp8 else tile.block_k
    descriptors = tile.descriptors and fp8 and depth % 16 == 0
    order = rows.order
    grid = (rows.num_tiles * -(-num_columns // (block_n if gated else block_n * parts)),)
    grouped_gemm_kernel[grid](
        values,
        scale,
        descriptor_of(weight.flatten(0, 1), block_n) if descriptors else weight,
        weight_scale,
        out,
        out_scales,
        order.pairs,
        order.tile_experts,
        order.num_tiles,
        rows.num_tiles,
        rows.num_pairs,
        rows.shared_rows,
        weight.shape[0] - 1,
        num_columns,
        depth,
        values.stride(0),
        scale.stride(0),
        weight.stride(0),
        weight.stride(1),
        weight_scale.stride(0),
        weight_scale.stride(1),
        out.stride(0),
        out_scales.stride(0),
        TOP_K=rows.top_k,
        X_BY_PAIR=x_by_pair,
        FP8=fp8,
        BLOCK_M=tile.block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        PARTS=parts,
        EVEN_K=depth % block_k == 0,
        DESCRIPTORS=descriptors,
        WEIGHTS_FIRST=tile.weights_first,
        SCALE_STAGES=tile.num_stages if tile.scales_ahead else None,
        GATED=gated,
        ROUND_TO=TRITON_TYPES[dtype],
        **overlapping(values),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def run_experts(
    x: Tensor | QuantizedRows,
    weights: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    last_is_shared: bool = False,
    tiles: ExpertTiles | HopperTile | None = None,
) -> RoutedSum:
    """Routed experts and the gated shared expert's output: parts of a sum [T, H] in x's dtype.

    x [T, H]; weights [T, top_k]; chosen [T, top_k] int32, -1 skips; gate_up [E, 2I, H], gate rows first;
    down [E, H, I]; scales as of ``grouped_linear``; shared, shared_gate as of ``RoutedSum``, but with
    ``last_is_shared`` the last expert of gate_up and down is the shared one, takes every row and is what
    ``shared_gate`` gates; tiles: of the table unless given.
    """
    num_rows, top_k = chosen.shape
    if not num_rows:
        none = torch.empty((0, down.shape[1]), dtype=x.dtype, device=x.device)
        return RoutedSum(none, weights, chosen, none, none)
    fp8 = gate_up_scale is not None
    if tiles is None and fp8:
        tiles = slot_tile(num_rows, gate_up, down, x.dtype)
    tiles = tiles or expert_tiles(num_rows, x.dtype.itemsize, fp8=fp8)
    routed = gate_up.shape[0] - last_is_shared
    rows = ExpertRows(
        order_by_expert(chosen, routed, tiles.block_m),
        num_rows * top_k,
        top_k,
        num_rows if last_is_shared else 0,
    )
    parts = _expert_parts(x, gate_up, down, gate_up_scale, down_scale, rows, tiles)
    if last_is_shared:
        shared = parts[rows.num_pairs :]
    gate = None if shared is None else shared_gate
    return RoutedSum(parts, weights, chosen, shared, gate)


def _expert_parts(
    x: Tensor | QuantizedRows,
    gate_up: Tensor,
    down: Tensor,
    gate_up_scale: Tensor | None,
    down_scale: Tensor | None,
    rows: ExpertRows,
    tiles: ExpertTiles | HopperTile,
) -> Tensor:
    """Every pair's output [num_results, H].

    Raises: ValueError for a HopperTile, which takes rows by slot, and experts that are not FP8.
    """
    if isinstance(tiles, HopperTile):
        if gate_up_scale is None or down_scale is None:
            raise ValueError(f"experts of {gate_up.dtype} without scales have no rows by slot")
        q = quantize(x) if isinstance(x, Tensor) else x
        made = up_by_slot(q, gate_up, gate_up_scale, rows, tiles)
        return down_by_slot(made, down, down_scale, rows, tiles)
    inner: Tensor | QuantizedRows
    if gate_up_scale is not None and tiles.gated and can_gate(down.shape[2]):
        inner = grouped_gated(x, gate_up, gate_up_scale, rows, tiles.up)
    else:
        both = grouped_linear(x, gate_up, gate_up_scale, rows, tiles.up, x_by_pair=False)
        inner = silu_mul(both) if gate_up_scale is None else silu_mul_quantized(both)
    return grouped_linear(inner, down, down_scale, rows, tiles.down, x_by_pair=True)
