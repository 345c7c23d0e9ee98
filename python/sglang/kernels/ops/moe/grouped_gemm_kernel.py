"""The Triton kernel of matrix products with one weight per expert."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grouped_gemm_kernel(
    p_x,
    p_x_scale,
    p_w,
    p_w_scale,
    p_out,
    p_pairs,
    p_tile_experts,
    num_tiles,
    num_columns,
    depth,
    stride_x,
    stride_x_scale,
    stride_w_expert,
    stride_w,
    stride_ws_expert,
    stride_ws,
    stride_out,
    PAIRS_PER_ROW: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
):
    """out[pair] = W[expert] x[pair // PAIRS_PER_ROW]. Grid (tiles x column tiles), tiles fastest.

    K ascends in blocks of BLOCK_K; with FP8 that is one scale block, which BLOCK_N divides.
    WEIGHTS_FIRST computes W x^T, so that the 64 rows a warp group's product needs are weight rows and a
    tile of 16 pairs still runs as FP8.
    """
    i_tile = tl.program_id(0) % num_tiles
    i_n = tl.program_id(0) // num_tiles
    expert = tl.load(p_tile_experts + i_tile)
    if expert < 0:
        return
    pair = tl.load(p_pairs + i_tile * BLOCK_M + tl.arange(0, BLOCK_M))
    m_ok = pair >= 0
    row = (pair // PAIRS_PER_ROW).to(tl.int64)
    n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    n_ok = n < num_columns
    k = tl.arange(0, BLOCK_K)
    p_xk = p_x + row[:, None] * stride_x + k[None, :]
    p_wk = p_w + expert.to(tl.int64) * stride_w_expert
    p_wk += n.to(tl.int64)[:, None] * stride_w + k[None, :]
    if FP8:
        p_xs = p_x_scale + row * stride_x_scale
        p_ws = p_w_scale + expert.to(tl.int64) * stride_ws_expert
        p_ws += (i_n * BLOCK_N // BLOCK_K).to(tl.int64) * stride_ws
    if WEIGHTS_FIRST:
        b_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i_k in range(tl.cdiv(depth, BLOCK_K)):
        if EVEN_K:
            x = tl.load(p_xk, mask=m_ok[:, None], other=0.0)
            w = tl.load(p_wk, mask=n_ok[:, None], other=0.0)
        else:
            k_ok = i_k * BLOCK_K + k < depth
            x = tl.load(p_xk, mask=m_ok[:, None] & k_ok[None, :], other=0.0)
            w = tl.load(p_wk, mask=n_ok[:, None] & k_ok[None, :], other=0.0)
        if FP8:
            scale = tl.load(p_xs + i_k, mask=m_ok, other=0.0) * tl.load(p_ws + i_k)
            if WEIGHTS_FIRST:
                b_acc += tl.dot(w, tl.trans(x)) * scale[None, :]
            else:
                b_acc += tl.dot(x, tl.trans(w)) * scale[:, None]
        else:
            w = w.to(x.dtype)
            if WEIGHTS_FIRST:
                b_acc = tl.dot(w, tl.trans(x), b_acc, input_precision="ieee")
            else:
                b_acc = tl.dot(x, tl.trans(w), b_acc, input_precision="ieee")
        p_xk += BLOCK_K
        p_wk += BLOCK_K
    if WEIGHTS_FIRST:
        b_acc = tl.trans(b_acc)
    p_o = p_out + pair.to(tl.int64)[:, None] * stride_out + n[None, :]
    tl.store(p_o, b_acc.to(p_out.dtype.element_ty), mask=m_ok[:, None] & n_ok[None, :])
