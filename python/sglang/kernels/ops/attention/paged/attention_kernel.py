"""The Triton kernels behind ``paged_attention``."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.kernels.launch_overlap_kernels import after_previous


@triton.jit
def split_tokens(context, SPLIT_MIN: tl.constexpr, SPLIT_STEP: tl.constexpr, MAX_SPLITS: tl.constexpr):  # fmt: skip
    """Context tokens of one split: a function of the request's own context and of nothing else.

    At least SPLIT_MIN, a multiple of SPLIT_STEP, and large enough that MAX_SPLITS cover the context.
    """
    per_split = tl.cdiv(context, MAX_SPLITS)
    return tl.maximum(tl.cdiv(per_split, SPLIT_STEP) * SPLIT_STEP, SPLIT_MIN)


@triton.jit
def block_slots(p_slots, n0, high, i_n, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Slot of position n0 if the block lies inside a page, else the slots of positions n0 + i_n."""
    if PAGE % BLOCK_N == 0:
        return tl.load(p_slots + n0, mask=n0 < high, other=0)
    else:
        n = n0 + i_n
        return tl.load(p_slots + n // PAGE * PAGE, mask=n < high, other=0) + n % PAGE


@triton.jit
def attend_blocks(
    q,
    b_max,
    b_sum,
    b_acc,
    p_k,
    p_v,
    p_slots,
    position,
    low,
    high,
    scale_log2,
    window,
    STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Running softmax over positions [low, high), low at a block's edge.

    MASKED: the mask is applied and positions from ``high`` on are not read. Otherwise the caller knows
    that every row sees all of whole blocks. A page of PAGE tokens lies in consecutive slots, so that
    a block inside a page needs one look-up.
    """
    i_n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    # Looked up one block ahead: an address that waits for a load of its own iteration would halve the
    # depth of the pipeline.
    next_slot = block_slots(p_slots, low, high, i_n, PAGE, BLOCK_N)
    for n0 in range(low, high, BLOCK_N):
        n = n0 + i_n
        n_ok = n < high
        slot = next_slot.to(tl.int64)
        next_slot = block_slots(p_slots, n0 + BLOCK_N, high, i_n, PAGE, BLOCK_N)
        if PAGE % BLOCK_N == 0:
            p_kb = p_k + slot * STRIDE_K + (i_n[:, None] * STRIDE_K + d[None, :])
            p_vb = p_v + slot * STRIDE_V + (i_n[:, None] * STRIDE_V + d[None, :])
        else:
            p_kb = p_k + slot[:, None] * STRIDE_K + d[None, :]
            p_vb = p_v + slot[:, None] * STRIDE_V + d[None, :]
        if MASKED:
            kv_ok = n_ok[:, None] & (d < HEAD_DIM)[None, :]
            k = tl.load(p_kb, mask=kv_ok, other=0.0).to(q.dtype)
            v = tl.load(p_vb, mask=kv_ok, other=0.0).to(q.dtype)
        elif HEAD_DIM < BLOCK_D:
            k = tl.load(p_kb, mask=(d < HEAD_DIM)[None, :], other=0.0).to(q.dtype)
            v = tl.load(p_vb, mask=(d < HEAD_DIM)[None, :], other=0.0).to(q.dtype)
        else:
            k = tl.load(p_kb).to(q.dtype)
            v = tl.load(p_vb).to(q.dtype)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            visible = n_ok[None, :]
            if IS_CAUSAL:
                visible = visible & (n[None, :] <= position[:, None])
            if HAS_WINDOW:
                visible = visible & (position[:, None] - n[None, :] < window)
                visible = visible & (n[None, :] - position[:, None] < window)
            s = tl.where(visible, s, float("-inf"))
        new_max = tl.maximum(b_max, tl.max(s, 1) * scale_log2)
        base = new_max
        if MASKED:
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(s * scale_log2 - base[:, None])
        rescale = tl.exp2(b_max - base)
        b_sum = b_sum * rescale + tl.sum(p, 1)
        b_acc = b_acc * rescale[:, None]
        b_acc = tl.dot(p.to(q.dtype), v, b_acc, input_precision="ieee")
        b_max = new_max
    return b_max, b_sum, b_acc


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
    stride_kh,
    stride_vh,
    stride_ot,
    stride_oh,
    stride_table,
    num_kv_heads,
    scale_log2,
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr,
    PAGE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLIT_MIN: tl.constexpr,
    SPLIT_STEP: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One tile of (row, head-in-group) pairs of one request and KV head, over one split of its context.

    MAX_SPLITS 0: grid (tiles, requests x KV heads), the whole context in one program, longest tiles
    first, result to p_out. Otherwise grid (requests x KV heads, tiles, MAX_SPLITS): the split's own result to
    p_part [T, N, MAX_SPLITS, d] and the log2 of its weight to p_lse [T, N, MAX_SPLITS]; -inf means
    that the split saw nothing and wrote no result. A row index below 0 marks padding.
    """
    after_previous(OVERLAP)
    if MAX_SPLITS > 0:
        i_rk = tl.program_id(0)
        i_m = tl.program_id(1)
    else:
        i_rk = tl.program_id(1)
        i_m = tl.num_programs(0) - 1 - tl.program_id(0)
    i_r = i_rk // num_kv_heads
    i_kv = i_rk % num_kv_heads
    row = tl.load(p_rows + i_r)
    if row < 0:
        return
    begin = tl.load(p_start + i_r)
    num_rows = tl.load(p_start + i_r + 1) - begin
    if i_m * BLOCK_M >= num_rows * GROUP:
        return
    prefix = tl.load(p_prefix + i_r).to(tl.int32)
    context = prefix + num_rows
    first_t = (i_m * BLOCK_M) // GROUP
    low = 0
    high = context
    shared = context
    if IS_CAUSAL:
        last_t = tl.minimum(num_rows - 1, (i_m * BLOCK_M + BLOCK_M - 1) // GROUP)
        high = prefix + last_t + 1
        shared = prefix + first_t + 1
    if HAS_WINDOW:
        low = tl.maximum(0, prefix + first_t - window + 1) // BLOCK_N * BLOCK_N
        shared = low
    if MAX_SPLITS > 0:
        i_split = tl.program_id(2)
        size = split_tokens(context, SPLIT_MIN, SPLIT_STEP, MAX_SPLITS)
        if i_split * size >= context:
            return
        low = tl.maximum(low, i_split * size)
        high = tl.minimum(high, (i_split + 1) * size)
    # whole blocks that every row of the tile sees
    shared = low + tl.maximum(tl.minimum(shared, high) - low, 0) // BLOCK_N * BLOCK_N

    m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    t = m // GROUP
    head = i_kv * GROUP + m % GROUP
    m_ok = t < num_rows
    d = tl.arange(0, BLOCK_D)
    inside = m_ok[:, None] & (d < HEAD_DIM)[None, :]
    q_at = (begin + t).to(tl.int64)[:, None] * stride_qt + head[:, None] * stride_qh + d[None, :]
    q = tl.load(p_q + q_at, mask=inside, other=0.0)
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    position = prefix + t
    p_slots = p_table + row.to(tl.int64) * stride_table
    p_kh = p_k + i_kv * stride_kh
    p_vh = p_v + i_kv * stride_vh
    b_max, b_sum, b_acc = attend_blocks(
        q, b_max, b_sum, b_acc, p_kh, p_vh, p_slots, position, low, shared, scale_log2, window,
        STRIDE_K, STRIDE_V, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE, False, IS_CAUSAL, HAS_WINDOW,
    )  # fmt: skip
    b_max, b_sum, b_acc = attend_blocks(
        q, b_max, b_sum, b_acc, p_kh, p_vh, p_slots, position, shared, high, scale_log2, window,
        STRIDE_K, STRIDE_V, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE, True, IS_CAUSAL, HAS_WINDOW,
    )  # fmt: skip
    out = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
    if MAX_SPLITS > 0:
        num_heads = num_kv_heads * GROUP
        flat = ((begin + t).to(tl.int64) * num_heads + head) * MAX_SPLITS + i_split
        p_to = p_part + flat[:, None] * HEAD_DIM + d[None, :]
        tl.store(p_to, out.to(p_part.dtype.element_ty), mask=inside)
        lse = tl.where(b_sum > 0, b_max + tl.log2(b_sum), float("-inf"))
        tl.store(p_lse + flat, lse, mask=m_ok)
    else:
        o_at = (begin + t).to(tl.int64)[:, None] * stride_ot + head[:, None] * stride_oh
        tl.store(p_out + o_at + d[None, :], out.to(p_out.dtype.element_ty), mask=inside)


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
    num_heads,
    num_steps,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLIT_MIN: tl.constexpr,
    SPLIT_STEP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out[t, head] = weighted mean of its splits, all read at once. Grid (requests x steps, heads).

    What is read comes from device memory, evicted by the context's K and V since it was written: loads
    that wait for one another, not bytes, are what this kernel would spend its time on.
    """
    after_previous(OVERLAP)
    i_r = tl.program_id(0) // num_steps
    i_t = tl.program_id(0) % num_steps
    head = tl.program_id(1)
    row = tl.load(p_rows + i_r)
    begin = tl.load(p_start + i_r)
    num_rows = tl.load(p_start + i_r + 1) - begin
    prefix = tl.load(p_prefix + i_r).to(tl.int32)
    if (row < 0) | (i_t >= num_rows):
        return
    context = prefix + num_rows
    size = split_tokens(context, SPLIT_MIN, SPLIT_STEP, MAX_SPLITS)
    s = tl.arange(0, MAX_SPLITS)
    exists = s < tl.cdiv(context, size)
    d = tl.arange(0, BLOCK_D)
    flat = ((begin + i_t).to(tl.int64) * num_heads + head) * MAX_SPLITS
    p_from = p_part + flat * HEAD_DIM + (s[:, None] * HEAD_DIM + d[None, :])
    part = tl.load(p_from, mask=exists[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    lse = tl.load(p_lse + flat + s, mask=exists, other=float("-inf"))
    top = tl.max(lse, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(lse - top)
    total = tl.sum(weight, 0)
    part = tl.where((weight > 0)[:, None], part.to(tl.float32), 0.0)
    out = tl.sum(part * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    o_at = (begin + i_t).to(tl.int64) * stride_ot + head * stride_oh
    tl.store(p_out + o_at + d, out.to(p_out.dtype.element_ty), mask=d < HEAD_DIM)
