"""Block-scaled FP8 activations and linear maps on an accelerator."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.kernels import triton_support
from sglang.kernels.ops.quantization.launch import (
    QUANTIZE_GROUPS,
    QUANTIZE_WARPS,
    GemmTile,
    dense_tile,
)
from sglang.kernels.ops.quantization.rows import GROUP, QuantizedRows, num_groups

if triton_support.AVAILABLE:
    from triton.tools.tensor_descriptor import TensorDescriptor

    from sglang.kernels.ops.quantization.fp8_kernels import (
        block_scaled_gemm_kernel,
        quantize_kernel,
    )


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
    tile: GemmTile | None = None,
) -> Tensor:
    """``x W^T`` with both sides in FP8.

    x [M, K], quantised here if it is not yet; weight [N, K] e4m3; weight_scale [ceil(N/128), ceil(K/128)]
    fp32; tile: of the table unless given. Returns [M, N] in x's dtype. Products of a 128-wide block are
    summed by the tensor core, scaled in fp32 and added in ascending order, so a row does not depend on
    the other rows of its table.
    Raises: ValueError if the scales do not fit the weight.
    """
    check_block_scales(weight, weight_scale)
    rows = quantize(x) if isinstance(x, Tensor) else x
    (num_rows, depth), num_columns = rows.shape, weight.shape[0]
    out = torch.empty((num_rows, num_columns), dtype=rows.dtype, device=rows.device)
    if not out.numel():
        return out
    tile = tile or dense_tile(num_rows, num_columns)
    grid = (-(-num_rows // tile.block_m) * -(-num_columns // tile.block_n),)
    part = tile.block_n // tile.parts
    descriptors = tile.descriptors and depth % 16 == 0
    block_scaled_gemm_kernel[grid](
        descriptor_of(rows.values, tile.block_m) if descriptors else rows.values,
        rows.scale,
        descriptor_of(weight, part) if descriptors else weight,
        weight_scale,
        out,
        num_rows,
        num_columns,
        depth,
        rows.values.stride(0),
        rows.scale.stride(0),
        weight.stride(0),
        weight_scale.stride(0),
        out.stride(0),
        BLOCK_M=tile.block_m,
        BLOCK_N=part,
        PARTS=tile.parts,
        GROUP=GROUP,
        GROUP_M=tile.group_m,
        EVEN_K=depth % GROUP == 0,
        DESCRIPTORS=descriptors,
        WEIGHTS_FIRST=tile.weights_first,
        SCALE_STAGES=tile.num_stages if tile.scales_ahead else None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def descriptor_of(matrix: Tensor, rows: int) -> TensorDescriptor:
    """For loads of [rows, 128] of ``matrix`` [R, K] by the copy engine, zero beyond its edges."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, GROUP])
