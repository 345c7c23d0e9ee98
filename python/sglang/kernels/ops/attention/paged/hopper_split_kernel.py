"""Attention of few rows over split contexts on Hopper: one warp group fetches pages, one multiplies.

As in the kernel of prompt chunks, but small enough that two programs share a multiprocessor: one's
first fetch and last write pass beside the other's products.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sglang.kernels.ops.attention.paged.hopper_kernel import (
    clear_rows,
    fetch_blocks,
    release,
    softmax_block,
)


@gluon.jit
def attend_split(
    p_q,
    p_part,
    p_lse,
    stride_qt,
    stride_qh,
    stride_pt,
    stride_ph,
    q_smem,
    k_smem,
    v_smem,
    k_full,
    k_empty,
    v_full,
    v_empty,
    begin,
    num_rows,
    prefix,
    first_m,
    first_head,
    low,
    num_blocks,
    shared_blocks,
    scale_log2,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
):
    """64 (row, head) pairs from ``first_m`` on over the blocks from position ``low`` on.

    The first ``shared_blocks`` need no mask. The result is summed in two halves of the head dim: the
    product of a whole one would take more registers than a program that shares its multiprocessor has.
    """
    M: gl.constexpr = 64
    HALF: gl.constexpr = HEAD_DIM // 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    io_layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)

    m = first_m + gl.arange(0, M, gl.SliceLayout(1, io_layout))
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, io_layout))
    t = m // GROUP
    head = first_head + m % GROUP
    inside = (t < num_rows)[:, None]
    q_at = ((begin + t).to(gl.int64) * stride_qt + head * stride_qh)[:, None] + d[None, :]
    q_smem.store(gl.load(p_q + q_at, mask=inside, other=0.0))
    fence_async_shared()
    gl.thread_barrier()

    context = prefix + num_rows
    position = prefix + (first_m + gl.arange(0, M, s_rows)) // GROUP
    n = low + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
    nothing = gl.zeros([M, BLOCK_N], gl.float32, s_layout)
    b_left = gl.zeros([M, HALF], gl.float32, o_layout)
    b_right = gl.zeros([M, HALF], gl.float32, o_layout)
    b_max = gl.full([M], float("-inf"), gl.float32, s_rows)
    b_sum = gl.zeros([M], gl.float32, s_rows)

    # block 0: its product alone, then per block i the product of i beside that of P and V of i - 1
    mbarrier.wait(k_full.index(0), 0)
    s = warpgroup_mma(
        q_smem, k_smem.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True
    )
    s = warpgroup_mma_wait(0, deps=[s])
    release(k_empty.index(0))
    p, b_max, b_sum, rescale = softmax_block(
        s, b_max, b_sum, n, position, context, scale_log2, shared_blocks < 1, IS_CAUSAL
    )
    mbarrier.wait(k_full.index(1 % STAGES), (1 // STAGES) & 1, pred=num_blocks > 1)
    for i in range(1, num_blocks):
        stage = i % STAGES
        before = (i - 1) % STAGES
        s = warpgroup_mma(
            q_smem, k_smem.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
        weights = gl.convert_layout(p, p_layout)
        v_block = v_smem.index(before)
        b_left = warpgroup_mma(weights, v_block.slice(0, HALF, 1), b_left, is_async=True)
        b_right = warpgroup_mma(weights, v_block.slice(HALF, HALF, 1), b_right, is_async=True)
        s = warpgroup_mma_wait(2, deps=[s])
        release(k_empty.index(stage))
        p, b_max, b_sum, rescale = softmax_block(
            s,
            b_max,
            b_sum,
            i * BLOCK_N + n,
            position,
            context,
            scale_log2,
            i >= shared_blocks,
            IS_CAUSAL,
        )
        # As in the kernel of prompt chunks: keeps the softmax before the wait for the products.
        ahead = i + 1
        mbarrier.wait(k_full.index(ahead % STAGES), (ahead // STAGES) & 1, pred=ahead < num_blocks)
        b_left, b_right = warpgroup_mma_wait(0, deps=[b_left, b_right])
        release(v_empty.index(before))
        factor = gl.convert_layout(rescale, o_rows)[:, None]
        b_left = b_left * factor
        b_right = b_right * factor
    last = num_blocks - 1
    v_last = v_smem.index(last % STAGES)
    mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
    clear_rows(v_last, context - low - last * BLOCK_N, BLOCK_N, HEAD_DIM)
    weights = gl.convert_layout(p, p_layout)
    b_left = warpgroup_mma(weights, v_last.slice(0, HALF, 1), b_left, is_async=True)
    b_right = warpgroup_mma(weights, v_last.slice(HALF, HALF, 1), b_right, is_async=True)
    b_left, b_right = warpgroup_mma_wait(0, deps=[b_left, b_right])

    total = gl.convert_layout(gl.where(b_sum > 0, b_sum, 1.0), o_rows)[:, None]
    q_smem.slice(0, HALF, 1).store((b_left / total).to(gl.bfloat16))
    q_smem.slice(HALF, HALF, 1).store((b_right / total).to(gl.bfloat16))
    gl.thread_barrier()
    p_at = ((begin + t).to(gl.int64) * stride_pt + head * stride_ph)[:, None] + d[None, :]
    gl.store(p_part + p_at, q_smem.load(io_layout), mask=inside)
    lse = gl.where(b_sum > 0, b_max + gl.log2(b_sum), float("-inf"))
    store_lse(
        p_lse, lse, s_rows, stride_pt // HEAD_DIM, stride_ph // HEAD_DIM,
        begin, num_rows, first_m, first_head, GROUP,
    )  # fmt: skip


@gluon.jit
def store_lse(
    p_lse,
    lse,
    layout: gl.constexpr,
    stride_t,
    stride_h,
    begin,
    num_rows,
    first_m,
    first_head,
    GROUP: gl.constexpr,
):
    """One value for each of 64 (row, head) pairs from ``first_m`` on."""
    m = first_m + gl.arange(0, 64, layout)
    t = m // GROUP
    at = (begin + t).to(gl.int64) * stride_t + (first_head + m % GROUP) * stride_h
    gl.store(p_lse + at, lse, mask=t < num_rows)


@gluon.jit
def hopper_split_kernel(
    p_q,
    desc_k,
    desc_v,
    p_part,
    p_lse,
    p_table,
    p_rows,
    p_prefix,
    p_start,
    stride_qt,
    stride_qh,
    stride_pt,
    stride_ph,
    stride_table,
    num_kv_heads,
    scale_log2,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    MAX_SPLITS: gl.constexpr,
    SPLIT_MIN: gl.constexpr,
    SPLIT_STEP: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
):
    """64 (row, head-in-group) pairs of one request and KV head over one split of its context.

    Grid (requests x KV heads, tiles, splits); results as ``paged_attention_kernel`` leaves them in p_part
    and p_lse, whose strides are those of p_part. A row index below 0 marks padding.
    """
    M: gl.constexpr = 64
    i_r = gl.program_id(0) // num_kv_heads
    i_kv = gl.program_id(0) % num_kv_heads
    first_m = gl.program_id(1) * M
    i_split = gl.program_id(2)
    row = gl.load(p_rows + i_r)
    begin = gl.load(p_start + i_r)
    num_rows = gl.load(p_start + i_r + 1) - begin
    prefix = gl.load(p_prefix + i_r).to(gl.int32)
    context = prefix + num_rows
    per_split = gl.cdiv(context, MAX_SPLITS)
    size = gl.maximum(gl.cdiv(per_split, SPLIT_STEP) * SPLIT_STEP, SPLIT_MIN)
    low = i_split * size
    if row < 0:
        return
    if (first_m >= num_rows * GROUP) | (low >= context):
        return
    high = context
    shared = context
    if IS_CAUSAL:
        high = prefix + gl.minimum(num_rows - 1, (first_m + M - 1) // GROUP) + 1
        shared = prefix + first_m // GROUP + 1
    head = i_kv * GROUP
    p_part += i_split * HEAD_DIM
    p_lse += i_split
    if high <= low:
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        store_lse(
            p_lse, gl.full([M], float("-inf"), gl.float32, layout), layout,
            stride_pt // HEAD_DIM, stride_ph // HEAD_DIM, begin, num_rows, first_m, head, GROUP,
        )  # fmt: skip
        return
    num_blocks = gl.cdiv(gl.minimum(high - low, size), BLOCK_N)
    shared_blocks = gl.maximum(shared - low, 0) // BLOCK_N

    kv_layout: gl.constexpr = desc_k.layout
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, HEAD_DIM], kv_layout)
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, HEAD_DIM], kv_layout)
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [M, HEAD_DIM], kv_layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=1)
    fence_async_shared()
    gl.thread_barrier()

    p_slots = p_table + row.to(gl.int64) * stride_table + low
    column = i_kv * HEAD_DIM
    gl.warp_specialize(
        [
            (
                attend_split,
                (
                    p_q, p_part, p_lse, stride_qt, stride_qh, stride_pt, stride_ph,
                    q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                    begin, num_rows, prefix, first_m, head, low, num_blocks, shared_blocks,
                    scale_log2, GROUP, HEAD_DIM, BLOCK_N, STAGES, IS_CAUSAL,
                ),
            ),
            (
                fetch_blocks,
                (
                    desc_k, desc_v, p_slots, column, num_blocks,
                    k_smem, v_smem, k_full, k_empty, v_full, v_empty, BLOCK_N, STAGES,
                ),
            ),
        ],
        worker_num_warps=[4],
        worker_num_regs=[24],
    )  # fmt: skip
