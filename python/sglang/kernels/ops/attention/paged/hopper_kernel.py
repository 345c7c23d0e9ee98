"""Attention of prompt chunks on Hopper: one warp group fetches pages, two multiply.

The copy engine fills K and V buffers ahead of their use, and each multiplying warp group runs the
softmax of a block while the tensor cores finish the block before it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def fetch_blocks(
    desc_k,
    desc_v,
    p_slots,
    column,
    num_blocks,
    k_smem,
    v_smem,
    k_full,
    k_empty,
    v_full,
    v_empty,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Copy K and V of blocks 0 .. num_blocks - 1 into the rings; each block lies inside a page."""
    slot = gl.load(p_slots)
    for i in range(num_blocks):
        stage = i % STAGES
        free = ((i // STAGES) & 1) ^ 1
        following = gl.minimum(i + 1, num_blocks - 1)
        next_slot = gl.load(p_slots + following * BLOCK_N)
        mbarrier.wait(k_empty.index(stage), free)
        mbarrier.expect(k_full.index(stage), desc_k.block_type.nbytes)
        tma.async_copy_global_to_shared(
            desc_k, [slot, column], k_full.index(stage), k_smem.index(stage)
        )
        mbarrier.wait(v_empty.index(stage), free)
        mbarrier.expect(v_full.index(stage), desc_v.block_type.nbytes)
        tma.async_copy_global_to_shared(
            desc_v, [slot, column], v_full.index(stage), v_smem.index(stage)
        )
        slot = next_slot


@gluon.jit
def release(barrier):
    """Tell the fetching warp that every warp of this group is done with a buffer."""
    gl.thread_barrier()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def attend_rows(
    p_q,
    p_out,
    stride_qt,
    stride_qh,
    stride_ot,
    stride_oh,
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
    num_blocks,
    shared_blocks,
    scale_log2,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
):
    """64 (row, head) pairs from ``first_m`` on over all blocks; the first ``shared_blocks`` need no mask."""
    M: gl.constexpr = 64
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    io_layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)

    m = first_m + gl.arange(0, M, gl.SliceLayout(1, io_layout))
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, io_layout))
    t = m // GROUP
    head = first_head + m % GROUP
    inside = (t < num_rows)[:, None]
    row = (begin + t).to(gl.int64)
    q_at = (row * stride_qt + head * stride_qh)[:, None] + d[None, :]
    q_smem.store(gl.load(p_q + q_at, mask=inside, other=0.0))
    fence_async_shared()
    gl.thread_barrier()

    context = prefix + num_rows
    position = prefix + (first_m + gl.arange(0, M, s_rows)) // GROUP
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
    nothing = gl.zeros([M, BLOCK_N], gl.float32, s_layout)
    b_acc = gl.zeros([M, HEAD_DIM], gl.float32, o_layout)
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
        b_acc = warpgroup_mma(
            gl.convert_layout(p, p_layout), v_smem.index(before), b_acc, is_async=True
        )
        s = warpgroup_mma_wait(1, deps=[s])
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
        # This wait belongs to the next turn. Here, it keeps the compiler from moving the softmax
        # behind the wait for the product, which it would not overlap with then.
        ahead = i + 1
        mbarrier.wait(k_full.index(ahead % STAGES), (ahead // STAGES) & 1, pred=ahead < num_blocks)
        b_acc = warpgroup_mma_wait(0, deps=[b_acc])
        release(v_empty.index(before))
        b_acc = b_acc * gl.convert_layout(rescale, o_rows)[:, None]
    last = num_blocks - 1
    v_last = v_smem.index(last % STAGES)
    mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
    clear_rows(v_last, context - last * BLOCK_N, BLOCK_N, HEAD_DIM)
    b_acc = warpgroup_mma(gl.convert_layout(p, p_layout), v_last, b_acc, is_async=True)
    b_acc = warpgroup_mma_wait(0, deps=[b_acc])

    total = gl.convert_layout(gl.where(b_sum > 0, b_sum, 1.0), o_rows)
    q_smem.store((b_acc / total[:, None]).to(p_out.dtype.element_ty))
    gl.thread_barrier()
    o_at = (row * stride_ot + head * stride_oh)[:, None] + d[None, :]
    gl.store(p_out + o_at, q_smem.load(io_layout), mask=inside)


@gluon.jit
def softmax_block(s, b_max, b_sum, n, position, context, scale_log2, masked, IS_CAUSAL: gl.constexpr):  # fmt: skip
    """(bf16 weights, new maximum, new sum, factor for what was summed before) of one block of scores."""
    if masked:
        visible = (n < context)[None, :]
        if IS_CAUSAL:
            visible = visible & (n[None, :] <= position[:, None])
        s = gl.where(visible, s, float("-inf"))
    new_max = gl.maximum(b_max, gl.max(s, 1) * scale_log2)
    base = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(s * scale_log2 - base[:, None])
    rescale = gl.exp2(b_max - base)
    b_sum = b_sum * rescale + gl.sum(p, 1)
    return p.to(gl.bfloat16), new_max, b_sum, rescale


@gluon.jit
def clear_rows(v_block, num_live, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Zero rows from ``num_live`` on, which hold what an earlier owner of the page left, maybe NaN.

    Both warp groups do it; what they write is equal, so their order does not matter.
    """
    STEP: gl.constexpr = 16
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    if num_live < BLOCK_N:
        rows = gl.arange(0, STEP, gl.SliceLayout(1, layout))
        for at in gl.static_range(0, BLOCK_N, STEP):
            part = v_block.slice(at, STEP)
            kept = part.load(layout)
            live = (at + rows < num_live)[:, None]
            part.store(gl.where(live, kept, gl.zeros_like(kept)))
        fence_async_shared()
        gl.thread_barrier()


@gluon.jit
def hopper_prefill_kernel(
    p_q,
    desc_k,
    desc_v,
    p_out,
    p_table,
    p_rows,
    p_prefix,
    p_start,
    stride_qt,
    stride_qh,
    stride_ot,
    stride_oh,
    stride_table,
    num_kv_heads,
    scale_log2,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
):
    """128 (row, head-in-group) pairs of one request and KV head over the whole context.

    Grid (tiles, requests x KV heads), longest tiles first. A row index below 0 marks padding.
    """
    M: gl.constexpr = 64
    i_m = gl.num_programs(0) - 1 - gl.program_id(0)
    i_r = gl.program_id(1) // num_kv_heads
    i_kv = gl.program_id(1) % num_kv_heads
    row = gl.load(p_rows + i_r)
    begin = gl.load(p_start + i_r)
    num_rows = gl.load(p_start + i_r + 1) - begin
    prefix = gl.load(p_prefix + i_r).to(gl.int32)
    first_m = i_m * 2 * M
    if row < 0:
        return
    if first_m >= num_rows * GROUP:
        return
    high = prefix + num_rows
    shared = high
    if IS_CAUSAL:
        high = prefix + gl.minimum(num_rows - 1, (first_m + 2 * M - 1) // GROUP) + 1
        shared = prefix + first_m // GROUP + 1
    num_blocks = gl.cdiv(high, BLOCK_N)
    shared_blocks = shared // BLOCK_N

    kv_layout: gl.constexpr = desc_k.layout
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, HEAD_DIM], kv_layout)
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, HEAD_DIM], kv_layout)
    q_low = gl.allocate_shared_memory(gl.bfloat16, [M, HEAD_DIM], kv_layout)
    q_high = gl.allocate_shared_memory(gl.bfloat16, [M, HEAD_DIM], kv_layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    gl.thread_barrier()

    head = i_kv * GROUP
    p_slots = p_table + row.to(gl.int64) * stride_table
    column = i_kv * HEAD_DIM
    gl.warp_specialize(
        [
            (
                attend_rows,
                (
                    p_q, p_out, stride_qt, stride_qh, stride_ot, stride_oh,
                    q_low, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                    begin, num_rows, prefix, first_m, head, num_blocks, shared_blocks, scale_log2,
                    GROUP, HEAD_DIM, BLOCK_N, STAGES, IS_CAUSAL,
                ),
            ),
            (
                attend_rows,
                (
                    p_q, p_out, stride_qt, stride_qh, stride_ot, stride_oh,
                    q_high, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                    begin, num_rows, prefix, first_m + M, head, num_blocks, shared_blocks, scale_log2,
                    GROUP, HEAD_DIM, BLOCK_N, STAGES, IS_CAUSAL,
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
        worker_num_warps=[4, 4],
        worker_num_regs=[240, 24],
    )  # fmt: skip
