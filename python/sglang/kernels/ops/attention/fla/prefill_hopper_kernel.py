"""The walk of the chunked gated delta rule on Hopper: two warps fetch, a warp group multiplies.

`prefill_kernels.prefill_state_kernel` says what is computed; products and roundings here are the same. There,
each product waits for the one before. Here, the tensor cores sum the output while the operands of the chain from
state to state are rounded.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ARRIVALS: gl.constexpr = gl.constexpr(33)
"""At a full stage: the copy engine's, and each lane's of the warp that copies factors."""


@gluon.jit
def chunk_rows(i, row, cut, end, before, C: gl.constexpr):
    """(first row, rows) of a request's chunk i; ``before`` of its chunks lie before the cut."""
    early = i < before
    low = gl.where(early, row + i * C, cut + (i - before) * C)
    return low, gl.minimum(gl.where(early, cut, end) - low, C)


@gluon.jit
def fetch_for_state(
    desc_k, desc_v, desc_x, k, v, k_coef, s_coef, decay, k_smem, v_smem, x_smem, kc_smem, sc_smem,
    fade_smem, full, empty, column_k, column_v, i_h, row, cut, end, chunk, before, total,
    stride_k: gl.constexpr, stride_v: gl.constexpr, HV: gl.constexpr, K: gl.constexpr,
    C: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What the chain needs of every chunk, into a ring.

    The copy engine knows nothing of where a chunk ends; the rows of a short one are copied by this warp.
    """
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    o_c = gl.arange(0, C, layout)
    o_v = gl.arange(0, BV, layout)
    for i in range(total):
        stage = i % STAGES
        ready = full.index(stage)
        low, count = chunk_rows(i, row, cut, end, before, C)
        place = (chunk + i) * HV + i_h
        k_tile = k_smem.index(stage)
        v_tile = v_smem.index(stage)
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        if count == C:
            mbarrier.expect(
                ready,
                desc_k.block_type.nbytes + desc_v.block_type.nbytes + desc_x.block_type.nbytes,
            )
            tma.async_copy_global_to_shared(desc_k, [low, column_k], ready, k_tile)
            tma.async_copy_global_to_shared(desc_v, [low, column_v], ready, v_tile)
        else:
            mbarrier.expect(ready, desc_x.block_type.nbytes)
            first = low.to(gl.int64)
            copy_rows(k_tile, k + first * stride_k + column_k, stride_k, count, C, K)
            copy_rows(v_tile, v + first * stride_v + column_v, stride_v, count, C, BV)
        tma.async_copy_global_to_shared(desc_x, [place * C, 0], ready, x_smem.index(stage))
        at = place.to(gl.int64) * C + o_c
        async_copy.async_copy_global_to_shared(kc_smem.index(stage), k_coef + at)
        async_copy.async_copy_global_to_shared(sc_smem.index(stage), s_coef + at)
        # One factor for the whole state, but a vector is what is loaded without a wait.
        fades = decay + (place + o_v * 0)
        async_copy.async_copy_global_to_shared(fade_smem.index(stage), fades)
        async_copy.mbarrier_arrive(ready, increment_count=False)


@gluon.jit
def fetch_for_output(
    desc_q, desc_a, q_coef, q_smem, a_smem, qc_smem, full, empty,
    column_q, i_h, row, cut, end, chunk, before, total,
    HV: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What the output needs besides, into another ring."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    o_c = gl.arange(0, C, layout)
    for i in range(total):
        stage = i % STAGES
        ready = full.index(stage)
        low, _ = chunk_rows(i, row, cut, end, before, C)
        place = (chunk + i) * HV + i_h
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(ready, desc_q.block_type.nbytes + desc_a.block_type.nbytes)
        tma.async_copy_global_to_shared(desc_q, [low, column_q], ready, q_smem.index(stage))
        tma.async_copy_global_to_shared(desc_a, [place * C, 0], ready, a_smem.index(stage))
        at = place.to(gl.int64) * C + o_c
        async_copy.async_copy_global_to_shared(qc_smem.index(stage), q_coef + at)
        async_copy.mbarrier_arrive(ready, increment_count=False)


@gluon.jit
def copy_rows(tile, p_rows, stride: gl.constexpr, count, C: gl.constexpr, WIDTH: gl.constexpr):
    """The first ``count`` rows of a tile by one warp; the others become zeros."""
    STEP: gl.constexpr = 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // WIDTH, WIDTH // 8], [1, 1], [1, 0])
    rows = gl.arange(0, STEP, gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    for at in gl.static_range(0, C, STEP):
        async_copy.async_copy_global_to_shared(
            tile.slice(at, STEP), p_rows + (at + rows) * stride + columns, at + rows < count
        )


@gluon.jit
def await_chunk(own_full, i, row, cut, end, before, total, C: gl.constexpr, STAGES: gl.constexpr):
    """Until k, v and the inverse of chunk i are there. Nothing if there is no such chunk."""
    mbarrier.wait(own_full.index(i % STAGES), (i // STAGES) & 1, pred=i < total)
    _, count = chunk_rows(i, row, cut, end, before, C)
    if count < C:
        fence_async_shared()


@gluon.jit
def half_state(p_head, first_v, first_k: gl.constexpr, K: gl.constexpr, BV: gl.constexpr):
    """Pointers to half of the columns of a program's state rows [BV, K / 2] in slot 0."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K // 2, 16])
    o_v = first_v + gl.arange(0, BV, gl.SliceLayout(1, layout))
    o_k = first_k + gl.arange(0, K // 2, gl.SliceLayout(0, layout))
    return p_head + (o_v[:, None] * K + o_k[None, :])


@gluon.jit
def load_state(p_low, p_high, slot, num_slots, stride_slot):
    """Both halves, fp32; zeros of a slot outside the pool."""
    layout: gl.constexpr = p_low.type.layout
    low = gl.zeros(p_low.shape, gl.float32, layout)
    high = gl.zeros(p_high.shape, gl.float32, layout)
    if (slot >= 0) & (slot < num_slots):
        low = gl.load(p_low + slot * stride_slot).to(gl.float32)
        high = gl.load(p_high + slot * stride_slot).to(gl.float32)
    return low, high


@gluon.jit
def store_state(p_low, p_high, low, high, slot, num_slots, stride_slot):
    if (slot >= 0) & (slot < num_slots):
        gl.store(p_low + slot * stride_slot, low.to(p_low.dtype.element_ty))
        gl.store(p_high + slot * stride_slot, high.to(p_high.dtype.element_ty))


@gluon.jit
def open_chunk(
    s_low, s_high, b_o, desc_out, out, o_smem, k_smem, v_smem, x_smem, kc_smem,
    sc_smem, fade_smem, own_empty, q_smem, out_full, out_empty, column_out, i, row, cut, end, before,
    STRIDE: gl.constexpr, K: gl.constexpr, C: gl.constexpr, BV: gl.constexpr,
    STAGES: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Chunk i up to what each row adds: (both halves of the state faded, rows, their factors, output).

    The output is the state's part before its factor, and is still being summed. Unless FIRST, b_o is the
    output of the chunk before, and is written on the way.
    """
    HALF: gl.constexpr = K // 2
    y_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    a_of_y: gl.constexpr = gl.DotOperandLayout(0, y_layout, 2)
    columns: gl.constexpr = gl.SliceLayout(0, y_layout)
    s_layout: gl.constexpr = s_low.type.layout
    element: gl.constexpr = k_smem.dtype
    stage = i % STAGES
    phase = (i // STAGES) & 1
    nothing = gl.zeros([BV, C], gl.float32, y_layout)
    k_tile = k_smem.index(stage)
    q_tile = q_smem.index(stage)
    v_tile = v_smem.index(stage)
    k_low = k_tile.slice(0, HALF, 1).permute((1, 0))
    k_high = k_tile.slice(HALF, HALF, 1).permute((1, 0))
    a_low = gl.convert_layout(s_low.to(element), a_of_y)
    b_y = warpgroup_mma(a_low, k_low, nothing, use_acc=False, is_async=True)
    a_high = gl.convert_layout(s_high.to(element), a_of_y)
    b_y = warpgroup_mma(a_high, k_high, b_y, is_async=True)
    mbarrier.wait(out_full.index(stage), phase)
    q_low = q_tile.slice(0, HALF, 1).permute((1, 0))
    q_high = q_tile.slice(HALF, HALF, 1).permute((1, 0))
    b_p = warpgroup_mma(a_low, q_low, nothing, use_acc=False, is_async=True)
    if not FIRST:
        low, rows = chunk_rows(i - 1, row, cut, end, before, C)
        write_columns(desc_out, out, o_smem.index(i & 1), b_o, low, rows, column_out, STRIDE, C, BV)
        mbarrier.arrive(own_empty.index((i - 1) % STAGES), count=1)
        mbarrier.arrive(out_empty.index((i - 1) % STAGES), count=1)
    b_v = v_tile.permute((1, 0)).load(y_layout).to(gl.float32)
    b_kc = kc_smem.index(stage).load(columns)
    fade = fade_smem.index(stage).load(gl.SliceLayout(1, s_layout))
    s_low = s_low * fade[:, None]
    s_high = s_high * fade[:, None]
    b_y = warpgroup_mma_wait(1, deps=[b_y])
    missed = gl.convert_layout((b_v - b_y * b_kc[None, :]).to(element), a_of_y)
    b_n = warpgroup_mma(
        missed, x_smem.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True
    )
    b_p = warpgroup_mma(a_high, q_high, b_p, is_async=True)
    b_sc = sc_smem.index(stage).load(columns)
    b_n = warpgroup_mma_wait(1, deps=[b_n])
    return s_low, s_high, b_n, b_sc, b_p


@gluon.jit
def close_chunk(
    s_low, s_high, b_n, b_sc, b_p, k_smem, a_smem, qc_smem, own_full,
    i, row, cut, end, before, total, K: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """(both halves of the state after chunk i, the chunk's output); nothing is in flight, and the next is there."""
    HALF: gl.constexpr = K // 2
    y_layout: gl.constexpr = b_n.type.layout
    s_layout: gl.constexpr = s_low.type.layout
    element: gl.constexpr = k_smem.dtype
    stage = i % STAGES
    k_tile = k_smem.index(stage)
    grown = gl.convert_layout(
        (b_n * b_sc[None, :]).to(element), gl.DotOperandLayout(0, s_layout, 2)
    )
    s_low = warpgroup_mma(grown, k_tile.slice(0, HALF, 1), s_low, is_async=True)
    b_qc = qc_smem.index(stage).load(gl.SliceLayout(0, y_layout))
    b_p = warpgroup_mma_wait(1, deps=[b_p])
    b_o = warpgroup_mma(
        gl.convert_layout(b_n.to(element), gl.DotOperandLayout(0, y_layout, 2)),
        a_smem.index(stage).permute((1, 0)),
        b_p * b_qc[None, :],
        is_async=True,
    )
    s_high = warpgroup_mma(grown, k_tile.slice(HALF, HALF, 1), s_high, is_async=True)
    await_chunk(own_full, i + 1, row, cut, end, before, total, C, STAGES)
    s_low, s_high, b_o = warpgroup_mma_wait(0, deps=[s_low, s_high, b_o])
    return s_low, s_high, b_o


@gluon.jit
def walk_in_order(
    desc_out, out, p_head, k_smem, v_smem, x_smem, kc_smem, sc_smem, fade_smem,
    own_full, own_empty, q_smem, a_smem, qc_smem, out_full, out_empty, o_smem,
    column_out, first_v, row, cut, end, before, total,
    slot, dest, num_slots, stride_slot,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BV: gl.constexpr,
    STAGES: gl.constexpr, HAS_DESTS: gl.constexpr,
):  # fmt: skip
    """State and output of all chunks by one group; see `prefill_kernels._advance` for the products.

    The state is kept as two halves of its columns, so that products are of one size: y, y, p, n, p, s, o, s,
    where y, n, s are the chain and p, o the output. While the chain's operands are rounded, the tensor cores
    sum the output; they wait where a chunk ends alone.
    """
    p_low = half_state(p_head, first_v, 0, K, BV)
    p_high = half_state(p_head, first_v, K // 2, K, BV)
    s_low, s_high = load_state(p_low, p_high, slot, num_slots, stride_slot)
    if total > 0:
        await_chunk(own_full, 0, row, cut, end, before, total, C, STAGES)
        s_low, s_high, b_n, b_sc, b_p = open_chunk(
            s_low, s_high, s_low, desc_out, out, o_smem, k_smem, v_smem, x_smem,
            kc_smem, sc_smem, fade_smem, own_empty, q_smem, out_full, out_empty, column_out, 0,
            row, cut, end, before, HV * V, K, C, BV, STAGES, True,
        )  # fmt: skip
        s_low, s_high, b_o = close_chunk(
            s_low, s_high, b_n, b_sc, b_p, k_smem, a_smem, qc_smem, own_full,
            0, row, cut, end, before, total, K, C, STAGES,
        )  # fmt: skip
        for i in range(1, total):
            if HAS_DESTS:
                if i == before:
                    store_state(p_low, p_high, s_low, s_high, dest, num_slots, stride_slot)
            s_low, s_high, b_n, b_sc, b_p = open_chunk(
                s_low, s_high, b_o, desc_out, out, o_smem, k_smem, v_smem, x_smem,
                kc_smem, sc_smem, fade_smem, own_empty, q_smem, out_full, out_empty, column_out, i,
                row, cut, end, before, HV * V, K, C, BV, STAGES, False,
            )  # fmt: skip
            s_low, s_high, b_o = close_chunk(
                s_low, s_high, b_n, b_sc, b_p, k_smem, a_smem, qc_smem, own_full,
                i, row, cut, end, before, total, K, C, STAGES,
            )  # fmt: skip
        if HAS_DESTS:
            if total == before:
                store_state(p_low, p_high, s_low, s_high, dest, num_slots, stride_slot)
        low, rows = chunk_rows(total - 1, row, cut, end, before, C)
        write_columns(desc_out, out, o_smem.index(total & 1), b_o, low, rows, column_out, HV * V, C, BV)  # fmt: skip
        tma.store_wait(0)
    store_state(p_low, p_high, s_low, s_high, slot, num_slots, stride_slot)


@gluon.jit
def write_columns(
    desc_out, out, tile, b_o, low, count, column, stride: gl.constexpr, C: gl.constexpr, BV: gl.constexpr
):  # fmt: skip
    """Output [BV, rows] of a chunk to its rows. Every warp has passed its barrier when this returns.

    The tile used two calls before is free: the barrier follows the wait for the copy of the call before.
    """
    layout: gl.constexpr = b_o.type.layout
    rounded = b_o.to(desc_out.dtype)
    if count == C:
        tile.permute((1, 0)).store(rounded)
        fence_async_shared()
        tma.store_wait(0)
        gl.thread_barrier()
        tma.async_copy_shared_to_global(desc_out, [low, column], tile)
    else:
        o_c = gl.arange(0, C, gl.SliceLayout(0, layout))
        o_v = gl.arange(0, BV, gl.SliceLayout(1, layout))
        at = (low + o_c).to(gl.int64)[None, :] * stride + (column + o_v)[:, None]
        gl.store(out + at, rounded, mask=(o_c < count)[None, :])
        tma.store_wait(0)
        gl.thread_barrier()


@gluon.jit
def prefill_state_hopper_kernel(
    desc_q, desc_k, desc_v, desc_x, desc_a, desc_out, k, v, q_coef, k_coef, s_coef, decay, out,
    pool, slots, dests, requests, num_slots, stride_slot,
    stride_k_token: gl.constexpr, stride_v_token: gl.constexpr,
    stride_q_head: gl.constexpr, stride_k_head: gl.constexpr, stride_v_head: gl.constexpr,
    HV: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr,
    BV: gl.constexpr, STAGES: gl.constexpr, HAS_DESTS: gl.constexpr,
):  # fmt: skip
    """As `prefill_state_kernel`, grid (V / BV, HV, requests)."""
    i_h = gl.program_id(1)
    i_n = gl.program_id(2)
    row = gl.load(requests + i_n * 4)
    cut = gl.load(requests + i_n * 4 + 1)
    end = gl.load(requests + i_n * 4 + 2)
    chunk = gl.load(requests + i_n * 4 + 3)
    slot = gl.load(slots + i_n).to(gl.int64)
    dest = slot
    if HAS_DESTS:
        dest = gl.load(dests + i_n).to(gl.int64)
    before = gl.cdiv(cut - row, C)
    total = before + gl.cdiv(end - cut, C)
    first_v = gl.program_id(0) * BV
    column_q = i_h // GROUP * stride_q_head
    column_k = i_h // GROUP * stride_k_head
    column_v = i_h * stride_v_head + first_v
    column_out = i_h * V + first_v
    p_head = pool + i_h * V * K

    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    element: gl.constexpr = desc_k.dtype
    k_smem = gl.allocate_shared_memory(element, [STAGES, C, K], desc_k.layout)
    v_smem = gl.allocate_shared_memory(element, [STAGES, C, BV], desc_v.layout)
    x_smem = gl.allocate_shared_memory(element, [STAGES, C, C], desc_x.layout)
    q_smem = gl.allocate_shared_memory(element, [STAGES, C, K], desc_q.layout)
    a_smem = gl.allocate_shared_memory(element, [STAGES, C, C], desc_a.layout)
    o_smem = gl.allocate_shared_memory(element, [2, C, BV], desc_out.layout)
    kc_smem = gl.allocate_shared_memory(gl.float32, [STAGES, C], flat)
    sc_smem = gl.allocate_shared_memory(gl.float32, [STAGES, C], flat)
    fade_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BV], flat)
    qc_smem = gl.allocate_shared_memory(gl.float32, [STAGES, C], flat)
    own_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    own_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    out_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    out_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    for stage in gl.static_range(STAGES):
        mbarrier.init(own_full.index(stage), count=ARRIVALS)
        mbarrier.init(own_empty.index(stage), count=1)
        mbarrier.init(out_full.index(stage), count=ARRIVALS)
        mbarrier.init(out_empty.index(stage), count=1)
    fence_async_shared()
    gl.thread_barrier()

    gl.warp_specialize(
        [
            (
                walk_in_order,
                (
                    desc_out, out, p_head, k_smem, v_smem, x_smem, kc_smem, sc_smem, fade_smem,
                    own_full, own_empty, q_smem, a_smem, qc_smem, out_full, out_empty, o_smem,
                    column_out, first_v, row, cut, end, before, total,
                    slot, dest, num_slots, stride_slot, HV, K, V, C, BV, STAGES, HAS_DESTS,
                ),
            ),
            (
                fetch_for_state,
                (
                    desc_k, desc_v, desc_x, k, v, k_coef, s_coef, decay, k_smem, v_smem, x_smem,
                    kc_smem, sc_smem, fade_smem, own_full, own_empty, column_k, column_v, i_h,
                    row, cut, end, chunk, before, total,
                    stride_k_token, stride_v_token, HV, K, C, BV, STAGES,
                ),
            ),
            (
                fetch_for_output,
                (
                    desc_q, desc_a, q_coef, q_smem, a_smem, qc_smem, out_full, out_empty,
                    column_q, i_h, row, cut, end, chunk, before, total, HV, C, STAGES,
                ),
            ),
        ],
        worker_num_warps=[1, 1],
        worker_num_regs=[40, 40],
    )  # fmt: skip
