"""The Triton kernel of linear maps of few output rows."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.kernels.launch_overlap_kernels import after_previous


@triton.jit(do_not_specialize=("num_rows",))
def narrow_linear_kernel(
    p_x,
    p_w,
    p_out,
    num_rows,
    num_columns,
    depth,
    stride_x,
    stride_w,
    stride_out,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
    EVEN_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One tile of x W^T. Grid (row tiles, column tiles).

    K is cut into blocks of BLOCK_K; LANES consecutive blocks are multiplied at once, each by its own
    warps and onto its own sum, and the sums are added at the end. Neither order depends on the rows.
    """
    after_previous(OVERLAP)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_ok, n_ok = m < num_rows, n < num_columns
    if LANES == 1:
        k = tl.arange(0, BLOCK_K)
        p_xk = p_x + m.to(tl.int64)[:, None] * stride_x + k[None, :]
        p_wk = p_w + n.to(tl.int64)[:, None] * stride_w + k[None, :]
        x_ok, w_ok, k_at = m_ok[:, None], n_ok[:, None], k[None, :]
        b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    else:
        k = tl.arange(0, LANES)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        p_xk = p_x + m.to(tl.int64)[None, :, None] * stride_x + k[:, None, :]
        p_wk = p_w + n.to(tl.int64)[None, :, None] * stride_w + k[:, None, :]
        x_ok, w_ok, k_at = m_ok[None, :, None], n_ok[None, :, None], k[:, None, :]
        b_acc = tl.zeros([LANES, BLOCK_M, BLOCK_N], tl.float32)
    for i_k in range(tl.cdiv(depth, LANES * BLOCK_K)):
        at = i_k * LANES * BLOCK_K
        if EVEN_K:
            x = tl.load(p_xk + at, mask=x_ok, other=0.0)
            w = tl.load(p_wk + at, mask=w_ok, other=0.0)
        else:
            inside = at + k_at < depth
            x = tl.load(p_xk + at, mask=x_ok & inside, other=0.0)
            w = tl.load(p_wk + at, mask=w_ok & inside, other=0.0)
        if LANES == 1:
            b_acc = tl.dot(x, tl.trans(w), b_acc, input_precision="ieee")
        else:
            b_acc = tl.dot(x, tl.permute(w, (0, 2, 1)), b_acc, input_precision="ieee")
    if LANES > 1:
        b_acc = tl.sum(b_acc, 0)
    p_to = p_out + m.to(tl.int64)[:, None] * stride_out + n[None, :]
    tl.store(p_to, b_acc.to(p_out.dtype.element_ty), mask=m_ok[:, None] & n_ok[None, :])
