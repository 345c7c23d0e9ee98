"""The routed experts of one layer, and a shared one of their size: two grouped products and an ordered sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang.kernels import triton_support
from sglang.kernels.launch_overlap import overlapping
from sglang.kernels.ops.fused.rows import silu_mul, silu_mul_quantized
from sglang.kernels.ops.fused.sums import RoutedSum
from sglang.kernels.ops.moe.launch import (
    ExpertTile,
    ExpertTiles,
    expert_tiles,
    hopper_expert_tiles,
    slot_expert_tiles,
)
from sglang.kernels.ops.moe.sort import ExpertOrder, order_by_expert
from sglang.kernels.ops.quantization.fp8 import (
    can_gate,
    check_block_scales,
    descriptor_of,
    quantize,
)
from sglang.kernels.ops.quantization.hopper_cuda import CudaTile, fits_shared_rows
from sglang.kernels.ops.quantization.launch import (
    HopperTile,
    check_gated,
    fits_hopper,
    part_width,
)
from sglang.kernels.ops.quantization.rows import GROUP, QuantizedRows

if triton_support.AVAILABLE:
    from sglang.kernels.ops.moe.grouped_gemm_kernel import grouped_gemm_kernel
    from sglang.kernels.ops.quantization.fp8 import TRITON_TYPES


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


def grouped_linear(
    x: Tensor | QuantizedRows,
    weight: Tensor,
    weight_scale: Tensor | None,
    rows: ExpertRows,
    tile: ExpertTile | HopperTile,
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
        if isinstance(x, QuantizedRows) or isinstance(tile, HopperTile):
            raise ValueError(f"FP8 rows meet experts of {weight.dtype} without scales")
        _launch(x, weight, weight, weight, out, None, rows, tile, x_by_pair, x.dtype)
        return out
    check_block_scales(weight, weight_scale)
    q = quantize(x) if isinstance(x, Tensor) else x
    if isinstance(tile, HopperTile):
        _launch_hopper(q, weight, weight_scale, out, None, rows, tile, x_by_pair)
    else:
        _launch(q.values, q.scale, weight, weight_scale, out, None, rows, tile, x_by_pair, q.dtype)
    return out


def grouped_gated(
    x: Tensor | QuantizedRows,
    weight: Tensor,
    weight_scale: Tensor,
    rows: ExpertRows,
    tile: ExpertTile | HopperTile,
) -> QuantizedRows:
    """``silu_mul_quantized`` of ``grouped_linear`` of an FP8 weight [E, 2I, K], in one launch: the same bits.

    Raises: ValueError if the scales do not fit or the tile's parts are not a gate's and an up's.
    """
    check_block_scales(weight, weight_scale)
    if isinstance(tile, ExpertTile):
        check_gated(tile.parts, tile.block_n)
    q = quantize(x) if isinstance(x, Tensor) else x
    inner = weight.shape[1] // 2
    out = QuantizedRows.empty(rows.num_results, inner, dtype=x.dtype, device=x.device)
    if isinstance(tile, HopperTile):
        _launch_hopper(q, weight, weight_scale, out.values, out.scale, rows, tile, False)
        return out
    _launch(
        q.values, q.scale, weight, weight_scale, out.values, out.scale, rows, tile, False, q.dtype
    )
    return out


def _launch_hopper(
    x: QuantizedRows,
    weight: Tensor,
    weight_scale: Tensor,
    out: Tensor,
    out_scale: Tensor | None,
    rows: ExpertRows,
    tile: HopperTile,
    x_by_pair: bool,
) -> None:
    from sglang.kernels.ops.quantization.hopper import GroupedRows, hopper_gemm

    order = rows.order
    grouped = GroupedRows(
        order.pairs,
        order.tile_experts,
        rows.num_tiles,
        rows.num_pairs,
        rows.top_k,
        rows.shared_rows,
        x_by_pair,
    )
    operands = (x.values, x.scale, weight, weight_scale, out, out_scale)
    hopper_gemm(*operands, tile, dtype=x.dtype, grouped=grouped)


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
    tiles: ExpertTiles | None = None,
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
    if tiles is None and fp8 and _fits_hopper(down):
        if x.dtype == torch.bfloat16 and fits_shared_rows(down):
            tiles = slot_expert_tiles(num_rows)
        tiles = tiles or hopper_expert_tiles(num_rows)
    tiles = tiles or expert_tiles(num_rows, x.dtype.itemsize, fp8=fp8)
    routed = gate_up.shape[0] - last_is_shared
    rows = ExpertRows(
        order_by_expert(chosen, routed, tiles.up.block_m),
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
    tiles: ExpertTiles,
) -> Tensor:
    """Every pair's output [num_results, H]."""
    if isinstance(tiles.up, CudaTile) or isinstance(tiles.down, CudaTile):
        return _parts_by_slot(x, gate_up, down, gate_up_scale, down_scale, rows, tiles)
    inner: Tensor | QuantizedRows
    if gate_up_scale is not None and tiles.gated and can_gate(down.shape[2]):
        inner = grouped_gated(x, gate_up, gate_up_scale, rows, tiles.up)
    else:
        both = grouped_linear(x, gate_up, gate_up_scale, rows, tiles.up, x_by_pair=False)
        inner = silu_mul(both) if gate_up_scale is None else silu_mul_quantized(both)
    return grouped_linear(inner, down, down_scale, rows, tiles.down, x_by_pair=True)


def _parts_by_slot(
    x: Tensor | QuantizedRows,
    gate_up: Tensor,
    down: Tensor,
    gate_up_scale: Tensor | None,
    down_scale: Tensor | None,
    rows: ExpertRows,
    tiles: ExpertTiles,
) -> Tensor:
    """Raises: ValueError unless the experts are FP8 and both tiles take rows by slot."""
    from sglang.kernels.ops.moe.by_slot import down_by_slot, up_by_slot

    up, last = tiles.up, tiles.down
    if gate_up_scale is None or down_scale is None:
        raise ValueError(f"experts of {gate_up.dtype} without scales have no rows by slot")
    if not isinstance(up, CudaTile) or not isinstance(last, CudaTile):
        raise ValueError(f"rows by slot need two tiles of the CUDA kernel, not {up} and {last}")
    q = quantize(x) if isinstance(x, Tensor) else x
    inner = up_by_slot(q, gate_up, gate_up_scale, rows, up)
    return down_by_slot(inner, down, down_scale, rows, last)


def _fits_hopper(down: Tensor) -> bool:
    """Whether the Hopper kernel serves experts of a ``down`` [E, H, I]."""
    size, inner = down.shape[1:]
    fits = fits_hopper(inner, size, gated=True) and fits_hopper(size, inner, gated=False)
    return fits and triton_support.runs_on_hopper(down.device)
