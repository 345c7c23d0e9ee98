"""The routed experts of one layer: two grouped products and an ordered sum."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.kernels import triton_support
from sglang.kernels.ops.fused.rows import silu_mul
from sglang.kernels.ops.moe.launch import ExpertTile, expert_tile
from sglang.kernels.ops.moe.sort import ExpertOrder, order_by_expert
from sglang.kernels.ops.quantization.fp8 import GROUP, check_block_scales, quantize_activations

if triton_support.AVAILABLE:
    from sglang.kernels.ops.moe.grouped_gemm_kernel import grouped_gemm_kernel
    from sglang.kernels.ops.moe.moe_kernels import combine_kernel

_COMBINE_BLOCK = 1024


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    order: ExpertOrder,
    tile: ExpertTile,
    *,
    num_pairs: int,
) -> Tensor:
    """``W[expert] x[row]`` for every pair of ``order``.

    x [num_pairs / n, K]: n consecutive pairs share a row; weight [E, N, K]; weight_scale
    [E, ceil(N/128), ceil(K/128)] fp32 for an e4m3 weight, else None. Returns [num_pairs, N] in x's dtype;
    rows of pairs that the order leaves out are undefined. A row's sum does not depend on other rows.
    Raises: ValueError if the scales do not fit.
    """
    out = torch.empty((num_pairs, weight.shape[1]), dtype=x.dtype, device=x.device)
    fp8 = weight_scale is not None
    block_k = GROUP if fp8 else tile.block_k
    depth = weight.shape[2]
    values, scale = x, x
    if weight_scale is not None:
        check_block_scales(weight, weight_scale)
        values, scale = quantize_activations(x)
    scales = weight if weight_scale is None else weight_scale
    grid = (order.num_tiles * -(-weight.shape[1] // tile.block_n),)
    grouped_gemm_kernel[grid](
        values,
        scale,
        weight,
        scales,
        out,
        order.pairs,
        order.tile_experts,
        order.num_tiles,
        weight.shape[1],
        depth,
        values.stride(0),
        scale.stride(0),
        weight.stride(0),
        weight.stride(1),
        scales.stride(0),
        scales.stride(1),
        out.stride(0),
        PAIRS_PER_ROW=num_pairs // x.shape[0],
        FP8=fp8,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k,
        EVEN_K=depth % block_k == 0,
        WEIGHTS_FIRST=tile.weights_first,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def combine(
    parts: Tensor,
    weights: Tensor,
    chosen: Tensor,
    *,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """``sum_j weights[t, j] parts[t * top_k + j] + sigmoid(shared_gate[t]) shared[t]`` in fp32.

    parts [T * top_k, H]; weights, chosen [T, top_k] contiguous; an expert id of -1 adds nothing;
    shared [T, H] and shared_gate [T, 1], both or neither. Returns [T, H] in parts' dtype.
    """
    num_rows, top_k = chosen.shape
    size = parts.shape[1]
    out = torch.empty((num_rows, size), dtype=parts.dtype, device=parts.device)
    has_shared = shared is not None and shared_gate is not None
    added = shared if shared is not None else parts
    gate = shared_gate if shared_gate is not None else parts
    combine_kernel[(num_rows, -(-size // _COMBINE_BLOCK))](
        parts,
        weights,
        chosen,
        added,
        gate,
        out,
        parts.stride(0),
        added.stride(0),
        gate.stride(0),
        out.stride(0),
        size,
        TOP_K=top_k,
        HAS_SHARED=has_shared,
        BLOCK=_COMBINE_BLOCK,
    )
    return out


def run_experts(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    tile: ExpertTile | None = None,
) -> Tensor:
    """Routed experts and the gated shared expert's output, [T, H] in x's dtype.

    x [T, H]; weights [T, top_k]; chosen [T, top_k] int32, -1 skips; gate_up [E, 2I, H], gate rows first;
    down [E, H, I]; scales as of ``grouped_linear``; shared, shared_gate as of ``combine``;
    tile: of the table unless given.
    """
    if not x.shape[0]:
        return torch.empty_like(x)
    tile = tile or expert_tile(x.shape[0], x.element_size())
    order = order_by_expert(chosen, gate_up.shape[0], tile.block_m)
    num_pairs = chosen.numel()
    both = grouped_linear(x, gate_up, gate_up_scale, order, tile, num_pairs=num_pairs)
    parts = grouped_linear(silu_mul(both), down, down_scale, order, tile, num_pairs=num_pairs)
    return combine(parts, weights, chosen, shared=shared, shared_gate=shared_gate)
