"""Triton kernels of block-scaled FP8."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quantize_kernel(
    p_x,
    p_q,
    p_scale,
    stride_x,
    stride_q,
    stride_scale,
    num_columns,
    num_groups,
    FP8_MAX: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """BLOCK_G groups of one row. Grid (rows, blocks of groups). A group of zeros has scale 1."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < num_columns
    x = tl.load(p_x + row * stride_x + column, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), 1)
    top = tl.zeros_like(largest) + FP8_MAX
    scale = tl.where(largest > 0.0, tl.div_rn(largest, top), 1.0)
    scaled = tl.div_rn(x, tl.zeros_like(x) + scale[:, None])
    scaled = tl.minimum(tl.maximum(scaled, -FP8_MAX), FP8_MAX)
    tl.store(p_q + row * stride_q + column, scaled.to(p_q.dtype.element_ty), mask=inside)
    tl.store(p_scale + row * stride_scale + group, scale, mask=group < num_groups)


@triton.jit
def block_scaled_gemm_kernel(
    p_x,
    p_x_scale,
    p_w,
    p_w_scale,
    p_out,
    num_rows,
    num_columns,
    depth,
    stride_x,
    stride_x_scale,
    stride_w,
    stride_w_scale,
    stride_out,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """One tile of x W^T. Grid (row tiles x column tiles), row tiles fastest so that they share weights.

    K ascends in blocks of GROUP, each scaled in fp32 before it is added; BLOCK_N divides GROUP.
    """
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    i_m = tl.program_id(0) % tiles_m
    i_n = tl.program_id(0) // tiles_m
    m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_ok = m < num_rows
    n_ok = n < num_columns
    k = tl.arange(0, GROUP)
    p_xk = p_x + m.to(tl.int64)[:, None] * stride_x + k[None, :]
    p_wk = p_w + n.to(tl.int64)[None, :] * stride_w + k[:, None]
    p_xs = p_x_scale + m.to(tl.int64) * stride_x_scale
    p_ws = p_w_scale + (i_n * BLOCK_N // GROUP).to(tl.int64) * stride_w_scale
    b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i_k in range(tl.cdiv(depth, GROUP)):
        if EVEN_K:
            x = tl.load(p_xk, mask=m_ok[:, None], other=0.0)
            w = tl.load(p_wk, mask=n_ok[None, :], other=0.0)
        else:
            k_ok = i_k * GROUP + k < depth
            x = tl.load(p_xk, mask=m_ok[:, None] & k_ok[None, :], other=0.0)
            w = tl.load(p_wk, mask=n_ok[None, :] & k_ok[:, None], other=0.0)
        x_scale = tl.load(p_xs + i_k, mask=m_ok, other=0.0)
        w_scale = tl.load(p_ws + i_k)
        b_acc += tl.dot(x, w) * (x_scale * w_scale)[:, None]
        p_xk += GROUP
        p_wk += GROUP
    p_o = p_out + m.to(tl.int64)[:, None] * stride_out + n[None, :]
    tl.store(p_o, b_acc.to(p_out.dtype.element_ty), mask=m_ok[:, None] & n_ok[None, :])
