"""The Triton kernel of matrix products with one weight per expert."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.kernels.launch_overlap_kernels import after_previous
from sglang.kernels.ops.quantization.fp8_kernels import (
    add_scaled,
    load_block,
    store_gated,
    store_tile,
)


@triton.jit
def pairs_of_tile(
    p_pairs, p_tile_experts, i_tile, routed_tiles, num_pairs, shared_rows, shared_expert,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """(expert or -1, its pairs or -1). Tiles after the routed ones hold the shared expert's pairs: all rows."""
    slot = tl.arange(0, BLOCK_M)
    if i_tile < routed_tiles:
        expert = tl.load(p_tile_experts + i_tile)
        pair = tl.load(p_pairs + i_tile * BLOCK_M + slot)
    else:
        expert = shared_expert
        row = (i_tile - routed_tiles) * BLOCK_M + slot
        pair = tl.where(row < shared_rows, num_pairs + row, -1)
    return expert, pair


@triton.jit
def add_product(b_acc, x, w, WEIGHTS_FIRST: tl.constexpr):
    """b_acc + x w^T of unscaled operands; transposed with WEIGHTS_FIRST."""
    w = w.to(x.dtype)
    if WEIGHTS_FIRST:
        b_acc = tl.dot(w, tl.trans(x), b_acc, input_precision="ieee")
    else:
        b_acc = tl.dot(x, tl.trans(w), b_acc, input_precision="ieee")
    return b_acc


_VARYING = (
    "routed_tiles",
    "num_tiles",
    "num_pairs",
    "shared_rows",
    "shared_expert",
    "stride_x_scale",
    "stride_ws_expert",
    "stride_ws",
    "stride_out_scale",
)
"""Arguments whose divisibility changes no instruction: one compilation serves all their values."""


@triton.jit(do_not_specialize=_VARYING)
def grouped_gemm_kernel(
    p_x,
    p_x_scale,
    w,
    p_w_scale,
    p_out,
    p_out_scale,
    p_pairs,
    p_tile_experts,
    routed_tiles,
    num_tiles,
    num_pairs,
    shared_rows,
    shared_expert,
    num_columns,
    depth,
    stride_x,
    stride_x_scale,
    stride_w_expert,
    stride_w,
    stride_ws_expert,
    stride_ws,
    stride_out,
    stride_out_scale,
    TOP_K: tl.constexpr,
    X_BY_PAIR: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    SCALE_STAGES: tl.constexpr,
    GATED: tl.constexpr,
    ROUND_TO: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out[pair] = W[expert] x[row of pair], PARTS (1 or 2) times BLOCK_N columns. Tiles run fastest.

    w is a descriptor of all experts' rows or a pointer. x has a row a pair (X_BY_PAIR) or a token. K ascends
    in blocks of BLOCK_K; with FP8 that is one scale block, and a part lies in one block of scales.
    WEIGHTS_FIRST computes W x^T, so that the 64 rows a warp group's product needs are weight rows and a
    tile of 16 pairs still runs as FP8. GATED as of ``block_scaled_gemm_kernel``.
    """
    after_previous(OVERLAP)
    WIDTH: tl.constexpr = BLOCK_N if GATED else BLOCK_N * PARTS
    i_tile = tl.program_id(0) % num_tiles
    i_n = tl.program_id(0) // num_tiles
    column = i_n * WIDTH
    expert, pair = pairs_of_tile(
        p_pairs, p_tile_experts, i_tile, routed_tiles, num_pairs, shared_rows, shared_expert, BLOCK_M
    )  # fmt: skip
    if expert < 0:
        return
    m_ok = pair >= 0
    row = pair.to(tl.int64)
    if not X_BY_PAIR:
        row = tl.where(pair < num_pairs, pair // TOP_K, pair - num_pairs).to(tl.int64)
    n = column + tl.arange(0, BLOCK_N)
    n_ok = n < num_columns
    n2_ok, apart, weight_rows = n_ok, num_columns, 2 * num_columns
    if not GATED:
        n2_ok, apart, weight_rows = n + BLOCK_N < num_columns, BLOCK_N, num_columns
    k = tl.arange(0, BLOCK_K)
    p_xk = p_x + row[:, None] * stride_x + k[None, :]
    p_xs = p_x_scale + row * stride_x_scale
    p_ws = p_w_scale + expert.to(tl.int64) * stride_ws_expert
    p_ws2 = p_ws + (column + apart) // BLOCK_K * stride_ws
    p_ws += column // BLOCK_K * stride_ws
    at = column
    if DESCRIPTORS:
        at += expert * weight_rows
        p_wk, p_wk2 = p_xk, p_xk  # not read
    else:
        p_wk = w + expert.to(tl.int64) * stride_w_expert
        p_wk += n.to(tl.int64)[:, None] * stride_w + k[None, :]
        p_wk2 = p_wk + apart * stride_w
    if WEIGHTS_FIRST:
        b_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    b_acc2 = b_acc
    for i_k in tl.range(0, tl.cdiv(depth, BLOCK_K), num_stages=SCALE_STAGES):
        b_x = load_block(p_x, p_xk, 0, i_k, m_ok, depth, BLOCK_K, EVEN_K, False)
        b_w = load_block(w, p_wk, at, i_k, n_ok, depth, BLOCK_K, EVEN_K, DESCRIPTORS)
        if FP8:
            x_scale = tl.load(p_xs + i_k, mask=m_ok, other=0.0)
            b_acc = add_scaled(b_acc, b_x, b_w, x_scale, tl.load(p_ws + i_k), WEIGHTS_FIRST)
            if PARTS == 2:
                b_w = load_block(
                    w, p_wk2, at + apart, i_k, n2_ok, depth, BLOCK_K, EVEN_K, DESCRIPTORS
                )
                w_scale = tl.load(p_ws2 + i_k, mask=column + apart < weight_rows, other=0.0)
                b_acc2 = add_scaled(b_acc2, b_x, b_w, x_scale, w_scale, WEIGHTS_FIRST)
        else:
            b_acc = add_product(b_acc, b_x, b_w, WEIGHTS_FIRST)
    p_o = p_out + pair.to(tl.int64)[:, None] * stride_out + n[None, :]
    if GATED:
        p_os = p_out_scale + pair.to(tl.int64) * stride_out_scale + i_n
        store_gated(p_o, p_os, b_acc, b_acc2, m_ok, n_ok, ROUND_TO, WEIGHTS_FIRST)
    else:
        store_tile(p_o, b_acc, m_ok, n_ok, WEIGHTS_FIRST)
        if PARTS == 2:
            store_tile(p_o + BLOCK_N, b_acc2, m_ok, n2_ok, WEIGHTS_FIRST)
