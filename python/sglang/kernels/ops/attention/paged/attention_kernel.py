"""The Triton kernels behind ``paged_attention``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def paged_attention_kernel(
    p_q,
    p_k,
    p_v,
    p_out,
    p_part,
    p_lse,
    p_table,
    p_rows,
    p_prefix,
    p_start,
    stride_qt,
    stride_qh,
    stride_ks,
    stride_kh,
    stride_vs,
    stride_vh,
    stride_ot,
    stride_oh,
    stride_table,
    num_rows_total,
    num_heads,
    tiles_m,
    scale_log2,
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """One tile of (row, head-in-group) pairs of one request and KV head, over one split of its context.

    Grid (requests, KV heads x tiles_m, splits). SPLIT 0: the whole context in one program, result to
    p_out. Otherwise context tokens [i_split * SPLIT, (i_split + 1) * SPLIT): the split's own result to
    p_part and the log2 of its weight to p_lse. A row index below 0 marks padding.
    """
    i_r = tl.program_id(0)
    i_kv = tl.program_id(1) // tiles_m
    i_m = tl.program_id(1) % tiles_m
    i_split = tl.program_id(2)
    row = tl.load(p_rows + i_r)
    begin = tl.load(p_start + i_r)
    num_rows = tl.load(p_start + i_r + 1) - begin
    prefix = tl.load(p_prefix + i_r)
    if row < 0:
        return
    if i_m * BLOCK_M >= num_rows * GROUP:
        return

    m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    t = m // GROUP
    head = i_kv * GROUP + m % GROUP
    m_ok = t < num_rows
    d = tl.arange(0, BLOCK_D)
    d_ok = d < HEAD_DIM
    q_at = (begin + t).to(tl.int64)[:, None] * stride_qt + head[:, None] * stride_qh + d[None, :]
    q = tl.load(p_q + q_at, mask=m_ok[:, None] & d_ok[None, :], other=0.0)

    context = prefix + num_rows
    low = 0
    high = context
    if IS_CAUSAL:
        last_t = tl.minimum(num_rows - 1, (i_m * BLOCK_M + BLOCK_M - 1) // GROUP)
        high = prefix + last_t + 1
    if HAS_WINDOW:
        first_t = (i_m * BLOCK_M) // GROUP
        low = tl.maximum(0, prefix + first_t - window + 1)
        low = (low // BLOCK_N) * BLOCK_N
    if SPLIT > 0:
        low = tl.maximum(low, i_split * SPLIT)
        high = tl.minimum(high, (i_split + 1) * SPLIT)

    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    position = prefix + t
    p_slots = p_table + row.to(tl.int64) * stride_table
    for n0 in range(low, high, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        n_ok = n < high
        slot = tl.load(p_slots + n, mask=n_ok, other=0).to(tl.int64)
        k_at = slot[None, :] * stride_ks + i_kv * stride_kh + d[:, None]
        k = tl.load(p_k + k_at, mask=n_ok[None, :] & d_ok[:, None], other=0.0).to(q.dtype)
        s = tl.dot(q, k, input_precision="ieee") * scale_log2
        visible = n_ok[None, :] & m_ok[:, None]
        if IS_CAUSAL:
            visible = visible & (n[None, :] <= position[:, None])
        if HAS_WINDOW:
            visible = visible & (position[:, None] - n[None, :] < window)
            visible = visible & (n[None, :] - position[:, None] < window)
        s = tl.where(visible, s, float("-inf"))
        new_max = tl.maximum(b_max, tl.max(s, 1))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(s - safe_max[:, None])
        rescale = tl.exp2(b_max - safe_max)
        b_sum = b_sum * rescale + tl.sum(p, 1)
        v_at = slot[:, None] * stride_vs + i_kv * stride_vh + d[None, :]
        v = tl.load(p_v + v_at, mask=n_ok[:, None] & d_ok[None, :], other=0.0).to(q.dtype)
        b_acc = b_acc * rescale[:, None] + tl.dot(p.to(q.dtype), v, input_precision="ieee")
        b_max = new_max

    store = m_ok[:, None] & d_ok[None, :]
    out = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
    if SPLIT > 0:
        flat = (i_split * num_rows_total + begin + t).to(tl.int64) * num_heads + head
        tl.store(p_part + flat[:, None] * HEAD_DIM + d[None, :], out, mask=store)
        lse = tl.where(b_sum > 0, b_max + tl.log2(b_sum), float("-inf"))
        tl.store(p_lse + flat, lse, mask=m_ok)
    else:
        o_at = (begin + t).to(tl.int64)[:, None] * stride_ot + head[:, None] * stride_oh
        tl.store(p_out + o_at + d[None, :], out.to(p_out.dtype.element_ty), mask=store)


@triton.jit
def combine_splits_kernel(
    p_part,
    p_lse,
    p_out,
    p_rows,
    p_prefix,
    p_start,
    stride_ot,
    stride_oh,
    num_rows_total,
    num_heads,
    num_steps,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """out[t, head] = weighted mean of its splits, in ascending order. Grid (requests x steps, heads)."""
    i_r = tl.program_id(0) // num_steps
    i_t = tl.program_id(0) % num_steps
    head = tl.program_id(1)
    row = tl.load(p_rows + i_r)
    begin = tl.load(p_start + i_r)
    num_rows = tl.load(p_start + i_r + 1) - begin
    if row < 0:
        return
    if i_t >= num_rows:
        return
    num_splits = tl.cdiv(tl.load(p_prefix + i_r) + num_rows, SPLIT)
    d = tl.arange(0, BLOCK_D)
    d_ok = d < HEAD_DIM
    b_max = float("-inf")
    b_sum = 0.0
    b_acc = tl.zeros([BLOCK_D], tl.float32)
    for i in range(num_splits):
        flat = (i * num_rows_total + begin + i_t).to(tl.int64) * num_heads + head
        lse = tl.load(p_lse + flat)
        part = tl.load(p_part + flat * HEAD_DIM + d, mask=d_ok, other=0.0)
        new_max = tl.maximum(b_max, lse)
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp2(lse - safe_max)
        keep = tl.exp2(b_max - safe_max)
        b_acc = b_acc * keep + part * weight
        b_sum = b_sum * keep + weight
        b_max = new_max
    out = b_acc / tl.where(b_sum > 0, b_sum, 1.0)
    o_at = (begin + i_t).to(tl.int64) * stride_ot + head * stride_oh
    tl.store(p_out + o_at + d, out.to(p_out.dtype.element_ty), mask=d_ok)
