"""Triton kernels of block-scaled FP8."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.kernels.launch_overlap_kernels import after_previous
from sglang.kernels.ops.quantization.group_quant import quantize_groups, silu_product


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
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """BLOCK_G groups of one row. Grid (rows, blocks of groups). A group of zeros has scale 1."""
    after_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < num_columns
    x = tl.load(p_x + row * stride_x + column, mask=inside, other=0.0).to(tl.float32)
    scaled, scale = quantize_groups(x)
    tl.store(p_q + row * stride_q + column, scaled.to(p_q.dtype.element_ty), mask=inside)
    tl.store(p_scale + row * stride_scale + group, scale, mask=group < num_groups)


@triton.jit
def tile_of(program, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(row tile, column tile): bands of GROUP_M row tiles, rows fastest, so that neighbours share weights."""
    band = GROUP_M * tiles_n
    first = program // band * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    within = program % band
    return first + within % height, within // height


@triton.jit
def load_block(
    source, p_block, row, i_k, row_ok, depth,
    GROUP: tl.constexpr, EVEN_K: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Step ``i_k`` of an operand's rows: from a descriptor at ``row``, or through pointers to step 0."""
    if DESCRIPTORS:
        block = source.load([row, i_k * GROUP])
    elif EVEN_K:
        block = tl.load(p_block + i_k * GROUP, mask=row_ok[:, None], other=0.0)
    else:
        k_ok = i_k * GROUP + tl.arange(0, GROUP) < depth
        block = tl.load(p_block + i_k * GROUP, mask=row_ok[:, None] & k_ok[None, :], other=0.0)
    return block


@triton.jit
def add_scaled(b_acc, x, w, x_scale, w_scale, WEIGHTS_FIRST: tl.constexpr):
    """b_acc + (x w^T of one scale block) scaled; transposed with WEIGHTS_FIRST."""
    scale = x_scale * w_scale
    if WEIGHTS_FIRST:
        b_acc += tl.dot(w, tl.trans(x)) * scale[None, :]
    else:
        b_acc += tl.dot(x, tl.trans(w)) * scale[:, None]
    return b_acc


@triton.jit
def store_tile(p_out, b_acc, m_ok, n_ok, WEIGHTS_FIRST: tl.constexpr):
    if WEIGHTS_FIRST:
        b_acc = tl.trans(b_acc)
    tl.store(p_out, b_acc.to(p_out.dtype.element_ty), mask=m_ok[:, None] & n_ok[None, :])


@triton.jit
def store_gated(
    p_out, p_scale, b_gate, b_up, m_ok, n_ok, ROUND_TO: tl.constexpr, WEIGHTS_FIRST: tl.constexpr
):
    """silu(gate) * up of one group of columns, quantised; rounded where separate launches would round."""
    if WEIGHTS_FIRST:
        b_gate, b_up = tl.trans(b_gate), tl.trans(b_up)
    gate, up = b_gate.to(ROUND_TO).to(tl.float32), b_up.to(ROUND_TO).to(tl.float32)
    rounded = silu_product(gate, up).to(ROUND_TO).to(tl.float32)
    scaled, scale = quantize_groups(rounded)
    inside = m_ok[:, None] & n_ok[None, :]
    tl.store(p_out, scaled.to(p_out.dtype.element_ty), mask=inside)
    tl.store(p_scale, scale, mask=m_ok)


_VARYING = ("num_rows", "stride_x_scale", "stride_w_scale", "stride_out_scale")
"""Arguments whose divisibility changes no instruction: one compilation serves all their values."""


@triton.jit(do_not_specialize=_VARYING)
def block_scaled_gemm_kernel(
    x,
    p_x_scale,
    w,
    p_w_scale,
    p_out,
    p_out_scale,
    num_rows,
    num_columns,
    depth,
    stride_x,
    stride_x_scale,
    stride_w,
    stride_w_scale,
    stride_out,
    stride_out_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    SCALE_STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    ROUND_TO: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One tile of x W^T, BLOCK_M rows and PARTS (1 or 2) times BLOCK_N columns.

    x and w are descriptors or pointers. K ascends in blocks of GROUP, each scaled in fp32 before it is
    added; BLOCK_N divides GROUP, so that a part lies in one block of scales. GATED: w holds num_columns
    rows of a gate, then as many of an up projection; the parts (BLOCK_N == GROUP) are a group of both, and
    what is stored is silu(gate) * up in e4m3 and its scales. SPLITS: out is [SPLITS, rows, columns], each a
    range of K's blocks; the grid has a second axis for them.
    """
    after_previous(OVERLAP)
    WIDTH: tl.constexpr = BLOCK_N if GATED else BLOCK_N * PARTS
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    i_m, i_n = tile_of(tl.program_id(0), tiles_m, tl.cdiv(num_columns, WIDTH), GROUP_M)
    row = i_m * BLOCK_M
    column = i_n * WIDTH
    second = column + BLOCK_N
    if GATED:
        second = column + num_columns
    m = row + tl.arange(0, BLOCK_M)
    n = column + tl.arange(0, BLOCK_N)
    k = tl.arange(0, GROUP)
    m_ok, n_ok = m < num_rows, n < num_columns
    n2_ok = n_ok
    if not GATED:
        n2_ok = n + BLOCK_N < num_columns
    p_xs = p_x_scale + m.to(tl.int64) * stride_x_scale
    p_ws = p_w_scale + (column // GROUP).to(tl.int64) * stride_w_scale
    p_ws2 = p_w_scale + (second // GROUP).to(tl.int64) * stride_w_scale
    if DESCRIPTORS:
        p_xk, p_wk, p_wk2 = p_xs, p_ws, p_ws2  # not read
    else:
        p_xk = x + m.to(tl.int64)[:, None] * stride_x + k[None, :]
        p_wk = w + n.to(tl.int64)[:, None] * stride_w + k[None, :]
        p_wk2 = p_wk + (second - column).to(tl.int64) * stride_w
    if WEIGHTS_FIRST:
        b_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    b_acc2 = b_acc
    first, last = 0, tl.cdiv(depth, GROUP)
    if SPLITS > 1:
        share = tl.cdiv(last, SPLITS)
        first = tl.program_id(1) * share
        last = tl.minimum(first + share, last)
        p_out += tl.program_id(1).to(tl.int64) * num_rows * stride_out
    for i_k in tl.range(first, last, num_stages=SCALE_STAGES):
        b_x = load_block(x, p_xk, row, i_k, m_ok, depth, GROUP, EVEN_K, DESCRIPTORS)
        b_w = load_block(w, p_wk, column, i_k, n_ok, depth, GROUP, EVEN_K, DESCRIPTORS)
        x_scale = tl.load(p_xs + i_k, mask=m_ok, other=0.0)
        b_acc = add_scaled(b_acc, b_x, b_w, x_scale, tl.load(p_ws + i_k), WEIGHTS_FIRST)
        if PARTS == 2:
            b_w = load_block(w, p_wk2, second, i_k, n2_ok, depth, GROUP, EVEN_K, DESCRIPTORS)
            w_scale = tl.load(p_ws2 + i_k, mask=GATED | (second < num_columns), other=0.0)
            b_acc2 = add_scaled(b_acc2, b_x, b_w, x_scale, w_scale, WEIGHTS_FIRST)
    p_o = p_out + m.to(tl.int64)[:, None] * stride_out + n[None, :]
    if GATED:
        p_os = p_out_scale + m.to(tl.int64) * stride_out_scale + i_n
        store_gated(p_o, p_os, b_acc, b_acc2, m_ok, n_ok, ROUND_TO, WEIGHTS_FIRST)
    else:
        store_tile(p_o, b_acc, m_ok, n_ok, WEIGHTS_FIRST)
        if PARTS == 2:
            store_tile(p_o + BLOCK_N, b_acc2, m_ok, n2_ok, WEIGHTS_FIRST)
