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

if triton_support.AVAILABLE:
    from sglang.kernels.ops.quantization.fp8_kernels import (
        block_scaled_gemm_kernel,
        quantize_kernel,
    )

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = 448.0
GROUP = 128
"""Width of a scale block along K (activations and weights) and along N (weights)."""


def num_groups(length: int) -> int:
    return -(-length // GROUP)


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows of x [M, K] in groups of 128 along K.

    Returns: q [M, K] e4m3 and scale [M, ceil(K / 128)] fp32 with x ~ q * scale; scale is max|x| / 448 of
    the group, 1 where all are zero. Columns of x are contiguous, rows may have any stride.
    """
    num_rows, num_columns = x.shape
    q = torch.empty((num_rows, num_columns), dtype=FP8_DTYPE, device=x.device)
    scale = torch.empty((num_rows, num_groups(num_columns)), dtype=torch.float32, device=x.device)
    if q.numel():
        groups = scale.shape[1]
        quantize_kernel[(num_rows, -(-groups // QUANTIZE_GROUPS))](
            x,
            q,
            scale,
            x.stride(0),
            q.stride(0),
            scale.stride(0),
            num_columns,
            groups,
            FP8_MAX=FP8_MAX,
            GROUP=GROUP,
            BLOCK_G=QUANTIZE_GROUPS,
            num_warps=QUANTIZE_WARPS,
        )
    return q, scale


def check_block_scales(weight: Tensor, scale: Tensor) -> None:
    """Raises: ValueError unless ``scale`` [.., ceil(N/128), ceil(K/128)] fits ``weight`` [.., N, K]."""
    wanted = (*weight.shape[:-2], num_groups(weight.shape[-2]), num_groups(weight.shape[-1]))
    if tuple(scale.shape) != wanted:
        raise ValueError(
            f"weight {tuple(weight.shape)} needs block scales {wanted}, got {tuple(scale.shape)}"
        )


def block_scaled_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, *, tile: GemmTile | None = None
) -> Tensor:
    """``x W^T`` with both sides in FP8.

    x [M, K] any float dtype, quantised here; weight [N, K] e4m3; weight_scale [ceil(N/128), ceil(K/128)]
    fp32; tile: of the table unless given. Returns [M, N] in x's dtype. Products of a 128-wide block are summed by the tensor core, scaled
    in fp32 and added in ascending order, so a row does not depend on the other rows of its table.
    Raises: ValueError if the scales do not fit the weight.
    """
    check_block_scales(weight, weight_scale)
    q, scale = quantize_activations(x)
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    (num_rows, depth), num_columns = x.shape, weight.shape[0]
    tile = tile or dense_tile(num_rows, num_columns)
    grid = (-(-num_rows // tile.block_m) * -(-num_columns // tile.block_n),)
    block_scaled_gemm_kernel[grid](
        q,
        scale,
        weight,
        weight_scale,
        out,
        num_rows,
        num_columns,
        depth,
        q.stride(0),
        scale.stride(0),
        weight.stride(0),
        weight_scale.stride(0),
        out.stride(0),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        GROUP=GROUP,
        EVEN_K=depth % GROUP == 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
