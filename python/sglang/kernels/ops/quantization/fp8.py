"""Block-scaled FP8 activations and linear maps on an accelerator."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.kernels import triton_support
from sglang.kernels.launch_overlap import overlapping
from sglang.kernels.ops.quantization.hopper_cuda import hopper_product, hopper_tile
from sglang.kernels.ops.quantization.launch import (
    QUANTIZE_GROUPS,
    QUANTIZE_WARPS,
    GemmTile,
    HopperTile,
    check_gated,
    dense_tile,
    gated_tile,
    part_width,
    split_tile,
)
from sglang.kernels.ops.quantization.rows import GROUP, QuantizedRows, num_groups

if triton_support.AVAILABLE:
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    from sglang.kernels.ops.quantization.fp8_kernels import (
        block_scaled_gemm_kernel,
        quantize_kernel,
    )

    TRITON_TYPES = {
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
        torch.float32: tl.float32,
    }


def quantize(x: Tensor) -> QuantizedRows:
    """Quantise rows of x [M, K] in groups of 128 along K; columns are contiguous, rows have any stride."""
    num_rows, num_columns = x.shape
    out = QuantizedRows.empty(num_rows, num_columns, dtype=x.dtype, device=x.device)
    if out.values.numel():
        groups = out.scale.shape[1]
        quantize_kernel[(num_rows, -(-groups // QUANTIZE_GROUPS))](
            x,
            out.values,
            out.scale,
            x.stride(0),
            out.values.stride(0),
            out.scale.stride(0),
            num_columns,
            groups,
            GROUP=GROUP,
            BLOCK_G=QUANTIZE_GROUPS,
            **overlapping(x),
            num_warps=QUANTIZE_WARPS,
        )
    return out


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """The two tensors of ``quantize``: q [M, K] e4m3 and scale [M, ceil(K / 128)] fp32."""
    rows = quantize(x)
    return rows.values, rows.scale


def check_block_scales(weight: Tensor, scale: Tensor) -> None:
    """Raises: ValueError unless ``scale`` [.., ceil(N/128), ceil(K/128)] fits ``weight`` [.., N, K]."""
    wanted = (*weight.shape[:-2], num_groups(weight.shape[-2]), num_groups(weight.shape[-1]))
    if tuple(scale.shape) != wanted:
        raise ValueError(
            f"weight {tuple(weight.shape)} needs block scales {wanted}, got {tuple(scale.shape)}"
        )


def block_scaled_linear(
    x: Tensor | QuantizedRows,
    weight: Tensor,
    weight_scale: Tensor,
    *,
    tile: GemmTile | HopperTile | None = None,
) -> Tensor:
    """``x W^T`` with both sides in FP8.

    x [M, K], quantised here if it is not yet; weight [N, K] e4m3; weight_scale [ceil(N/128), ceil(K/128)]
    fp32; tile: of the table unless given. Returns [M, N] in x's dtype. Products of a 128-wide block are
    summed by the tensor core, scaled in fp32 and added in ascending order, so a row does not depend on
    the other rows of its table.
    Raises: ValueError if the scales do not fit the weight.
    """
    rows = quantize(x) if isinstance(x, Tensor) else x
    num_rows, num_columns = rows.shape[0], weight.shape[0]
    out = torch.empty((num_rows, num_columns), dtype=rows.dtype, device=rows.device)
    tile = tile or hopper_tile(num_rows, weight, rows.dtype, gated=False)
    tile = tile or dense_tile(num_rows, num_columns)
    _launch_gemm(rows, weight, weight_scale, out, None, tile)
    return out


def block_scaled_gated(
    x: Tensor | QuantizedRows,
    weight: Tensor,
    weight_scale: Tensor,
    *,
    tile: GemmTile | HopperTile | None = None,
) -> QuantizedRows:
    """``silu(x G^T) * (x U^T)`` quantised, in one launch.

    As ``block_scaled_linear`` of weight [2I, K], whose first half is G and second half U, then
    ``silu_mul_quantized``: the same bits. Returns rows [M, I]; ``can_gate(I)`` must hold.
    Raises: ValueError if the scales do not fit the weight or halves share a scale block.
    """
    rows = quantize(x) if isinstance(x, Tensor) else x
    num_rows, inner = rows.shape[0], weight.shape[0] // 2
    if not can_gate(inner):
        raise ValueError(f"halves of {inner} rows share a scale block of {GROUP}")
    out = QuantizedRows.empty(num_rows, inner, dtype=rows.dtype, device=rows.device)
    tile = tile or hopper_tile(num_rows, weight, rows.dtype, gated=True) or gated_tile(num_rows)
    _launch_gemm(rows, weight, weight_scale, out.values, out.scale, tile)
    return out


def block_scaled_split(
    x: Tensor | QuantizedRows,
    weight: Tensor,
    weight_scale: Tensor,
    *,
    tile: GemmTile | None = None,
) -> Tensor:
    """``x W^T`` in parts [splits, M, N] fp32, each over its range of K; to be added in ascending order.

    Arguments as of ``block_scaled_linear``; the number of splits is the tile's, so it does not depend on
    the rows beside a row.
    Raises: ValueError if the scales do not fit the weight.
    """
    rows = quantize(x) if isinstance(x, Tensor) else x
    num_rows, num_columns = rows.shape[0], weight.shape[0]
    tile = tile or split_tile()
    shape = (tile.splits, num_rows, num_columns)
    out = torch.empty(shape, dtype=torch.float32, device=rows.device)
    _launch_gemm(rows, weight, weight_scale, out, None, tile)
    return out


def can_gate(inner: int) -> bool:
    """Whether gate and up rows of ``inner`` columns each meet at a scale block's edge."""
    return inner % GROUP == 0


def _launch_gemm(
    rows: QuantizedRows,
    weight: Tensor,
    weight_scale: Tensor,
    out: Tensor,
    out_scale: Tensor | None,
    tile: GemmTile | HopperTile,
) -> None:
    """``out_scale``: the product is gated and quantised."""
    check_block_scales(weight, weight_scale)
    (num_rows, depth), num_columns = rows.shape, out.shape[-1]
    if not out.numel():
        return
    if isinstance(tile, HopperTile):
        hopper_product(rows, weight, weight_scale, out, out_scale, tile)
        return
    gated = out_scale is not None
    if gated:
        check_gated(tile.parts, tile.block_n)
    if tile.splits != (out.shape[0] if out.dim() == 3 else 1):
        raise ValueError(f"a tile of {tile.splits} splits cannot fill a result {tuple(out.shape)}")
    part = part_width(tile.parts, tile.block_n)
    scales = weight_scale if out_scale is None else out_scale
    width = part if gated else tile.block_n
    grid = (-(-num_rows // tile.block_m) * -(-num_columns // width), tile.splits)
    descriptors = tile.descriptors and depth % 16 == 0
    block_scaled_gemm_kernel[grid](
        descriptor_of(rows.values, tile.block_m) if descriptors else rows.values,
        rows.scale,
        descriptor_of(weight, part) if descriptors else weight,
        weight_scale,
        out,
        scales,
        num_rows,
        num_columns,
        depth,
        rows.values.stride(0),
        rows.scale.stride(0),
        weight.stride(0),
        weight_scale.stride(0),
        out.stride(-2),
        scales.stride(0),
        BLOCK_M=tile.block_m,
        BLOCK_N=part,
        PARTS=tile.parts,
        GROUP=GROUP,
        GROUP_M=tile.group_m,
        EVEN_K=depth % GROUP == 0,
        DESCRIPTORS=descriptors,
        WEIGHTS_FIRST=tile.weights_first,
        SCALE_STAGES=tile.num_stages if tile.scales_ahead else None,
        SPLITS=tile.splits,
        GATED=gated,
        ROUND_TO=TRITON_TYPES[rows.dtype],
        **overlapping(out),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def descriptor_of(matrix: Tensor, rows: int) -> TensorDescriptor:
    """For loads of [rows, 128] of ``matrix`` [R, K] by the copy engine, zero beyond its edges."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, GROUP])
