"""The Triton kernel of linear maps of few output rows."""

from __future__ import annotations

import triton
import triton.language as tl


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
    EVEN_K: tl.constexpr,
):
    """One tile of x W^T; K ascends in blocks of BLOCK_K. Grid (row tiles, column tiles)."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_ok, n_ok = m < num_rows, n < num_columns
    p_xk = p_x + m.to(tl.int64)[:, None] * stride_x + k[None, :]
    p_wk = p_w + n.to(tl.int64)[:, None] * stride_w + k[None, :]
    b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i_k in range(tl.cdiv(depth, BLOCK_K)):
        if EVEN_K:
            x = tl.load(p_xk + i_k * BLOCK_K, mask=m_ok[:, None], other=0.0)
            w = tl.load(p_wk + i_k * BLOCK_K, mask=n_ok[:, None], other=0.0)
        else:
            k_ok = i_k * BLOCK_K + k < depth
            x = tl.load(p_xk + i_k * BLOCK_K, mask=m_ok[:, None] & k_ok[None, :], other=0.0)
            w = tl.load(p_wk + i_k * BLOCK_K, mask=n_ok[:, None] & k_ok[None, :], other=0.0)
        b_acc = tl.dot(x, tl.trans(w), b_acc, input_precision="ieee")
    p_to = p_out + m.to(tl.int64)[:, None] * stride_out + n[None, :]
    tl.store(p_to, b_acc.to(p_out.dtype.element_ty), mask=m_ok[:, None] & n_ok[None, :])
