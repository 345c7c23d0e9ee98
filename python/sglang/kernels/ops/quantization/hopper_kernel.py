"""Block-scaled FP8 products of many rows on Hopper: one warp group fetches, two multiply.

Programs stay and take tile after tile, so that the fetching group fills the ring for a tile while the others
still store the one before. While one multiplying group scales and adds a block's product, the tensor cores
work for the other.
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

HALF: gl.constexpr = gl.constexpr(64)
"""Rows of one multiplying group; a tile has two."""

GROUP: gl.constexpr = gl.constexpr(128)
"""Width of a scale block, a step along K, and of one of a tile's two column parts."""

MAGNITUDE: gl.constexpr = gl.constexpr(448.0)


@gluon.jit
def place_of(i, tiles_m, tiles_n, GROUP_M: gl.constexpr, GROUPED: gl.constexpr):
    """(row tile, column tile) of work item ``i``. GROUPED: columns fastest, so that an expert's items meet
    in time; otherwise bands of GROUP_M row tiles, rows fastest."""
    if GROUPED:
        i_m = i // tiles_n
        i_n = i % tiles_n
    else:
        band = GROUP_M * tiles_n
        first = i // band * GROUP_M
        height = gl.minimum(tiles_m - first, GROUP_M)
        i_m = first + i % band % height
        i_n = i % band // height
    return i_m, i_n


@gluon.jit
def expert_of(p_tile_experts, i_m, routed_tiles, shared_expert, GROUPED: gl.constexpr):
    """The expert of a row tile, -1 for none; 0 of a single weight."""
    expert = 0
    if GROUPED:
        expert = shared_expert
        if i_m < routed_tiles:
            expert = gl.load(p_tile_experts + i_m)
    return expert


@gluon.jit
def results_of(
    p_pairs, i_m, start: gl.constexpr, routed_tiles, num_pairs, extra_rows,
    GROUPED: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Result rows, or -1, of the HALF rows from ``start`` on of a row tile: pairs, or rows themselves."""
    slot = start + gl.arange(0, HALF, layout)
    if GROUPED:
        if i_m < routed_tiles:
            result = gl.load(p_pairs + i_m * 2 * HALF + slot)
        else:
            row = (i_m - routed_tiles) * 2 * HALF + slot
            result = gl.where(row < extra_rows, num_pairs + row, -1)
    else:
        row = i_m * 2 * HALF + slot
        result = gl.where(row < extra_rows, row, -1)
    return result


@gluon.jit
def is_live(
    p_pairs, i_m, start: gl.constexpr, routed_tiles, extra_rows, GROUPED: gl.constexpr
):  # fmt: skip
    """Whether any of ``results_of`` exists: padding comes last."""
    if GROUPED:
        live = (i_m - routed_tiles) * 2 * HALF + start < extra_rows
        if i_m < routed_tiles:
            live = gl.load(p_pairs + i_m * 2 * HALF + start) >= 0
    else:
        live = i_m * 2 * HALF + start < extra_rows
    return live


@gluon.jit
def source_of(result, num_pairs, TOP_K: gl.constexpr, X_BY_PAIR: gl.constexpr):
    """Rows of x that results are made of."""
    if X_BY_PAIR:
        source = result
    else:
        source = gl.where(result < num_pairs, result // TOP_K, result - num_pairs)
    return source.to(gl.int64)


@gluon.jit
def gather_rows(
    p_x, stride_x, result, num_pairs, layout: gl.constexpr, TOP_K: gl.constexpr, X_BY_PAIR: gl.constexpr
):  # fmt: skip
    """(pointers to step 0 of the HALF rows that make ``result``, which of them exist)."""
    row = source_of(result, num_pairs, TOP_K, X_BY_PAIR)
    k = gl.arange(0, GROUP, gl.SliceLayout(0, layout))
    return p_x + (row * stride_x)[:, None] + k[None, :], (result >= 0)[:, None]


@gluon.jit
def fetch_tiles(
    x, desc_w, p_pairs, p_tile_experts, x_smem, w_smem, full, empty,
    stride_x, total, tiles_m, tiles_n, routed_tiles, shared_expert, num_pairs, extra_rows, num_columns, num_steps,
    TOP_K: gl.constexpr, X_BY_PAIR: gl.constexpr, GROUPED: gl.constexpr, GROUP_M: gl.constexpr,
    GATED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Both operands of every step of every item into the ring. x is a descriptor, or with GROUPED a pointer.

    Here and below, where an item lies is read while the one before it is worked on.
    """
    WIDTH: gl.constexpr = GROUP if GATED else 2 * GROUP
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    next_m, next_n = place_of(gl.program_id(0), tiles_m, tiles_n, GROUP_M, GROUPED)
    next_expert = expert_of(p_tile_experts, next_m, routed_tiles, shared_expert, GROUPED)
    if GROUPED:
        next_low = results_of(p_pairs, next_m, 0, routed_tiles, num_pairs, extra_rows, True, rows)
        next_high = results_of(
            p_pairs, next_m, HALF, routed_tiles, num_pairs, extra_rows, True, rows
        )
    step = 0
    for i in range(gl.program_id(0), total, gl.num_programs(0)):
        i_m, i_n, expert = next_m, next_n, next_expert
        following = gl.minimum(i + gl.num_programs(0), total - 1)
        next_m, next_n = place_of(following, tiles_m, tiles_n, GROUP_M, GROUPED)
        next_expert = expert_of(p_tile_experts, next_m, routed_tiles, shared_expert, GROUPED)
        if GROUPED:
            p_low, low_ok = gather_rows(x, stride_x, next_low, num_pairs, layout, TOP_K, X_BY_PAIR)
            p_high, high_ok = gather_rows(
                x, stride_x, next_high, num_pairs, layout, TOP_K, X_BY_PAIR
            )
            next_low = results_of(
                p_pairs, next_m, 0, routed_tiles, num_pairs, extra_rows, True, rows
            )
            next_high = results_of(
                p_pairs, next_m, HALF, routed_tiles, num_pairs, extra_rows, True, rows
            )
        if expert >= 0:
            apart = num_columns if GATED else GROUP
            weight_rows = 2 * num_columns if GATED else num_columns
            at = expert * weight_rows + i_n * WIDTH
            for i_k in range(num_steps):
                stage = step % STAGES
                ready = full.index(stage)
                mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
                if GROUPED:
                    mbarrier.expect(ready, 2 * desc_w.block_type.nbytes)
                else:
                    mbarrier.expect(ready, 2 * desc_w.block_type.nbytes + 2 * x.block_type.nbytes)
                k = i_k * GROUP
                low = x_smem.index(2 * stage)
                high = x_smem.index(2 * stage + 1)
                tma.async_copy_global_to_shared(desc_w, [at, k], ready, w_smem.index(2 * stage))
                tma.async_copy_global_to_shared(
                    desc_w, [at + apart, k], ready, w_smem.index(2 * stage + 1)
                )
                if GROUPED:
                    async_copy.async_copy_global_to_shared(low, p_low + k, low_ok)
                    async_copy.async_copy_global_to_shared(high, p_high + k, high_ok)
                    async_copy.mbarrier_arrive(ready, increment_count=False)
                else:
                    row = i_m * 2 * HALF
                    tma.async_copy_global_to_shared(x, [row, k], ready, low)
                    tma.async_copy_global_to_shared(x, [row + HALF, k], ready, high)
                step += 1


@gluon.jit
def release(barrier):
    """Tell the fetching group that every warp of this group is done with a stage."""
    gl.thread_barrier()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def store_plain(p_out, b_acc, column, result, stride_out, layout: gl.constexpr):
    n = column + gl.arange(0, GROUP, gl.SliceLayout(0, layout))
    rows = gl.convert_layout(b_acc.to(p_out.dtype.element_ty), layout)
    at = (result.to(gl.int64) * stride_out)[:, None] + n[None, :]
    gl.store(p_out + at, rows, mask=(result >= 0)[:, None])


@gluon.jit
def gate_and_quantise(b_gate, b_up, ROUND_TO: gl.constexpr):
    """(silu(gate) * up over its scale, the scale): what separate launches would round is rounded."""
    gate = b_gate.to(ROUND_TO).to(gl.float32)
    up = b_up.to(ROUND_TO).to(gl.float32)
    x = (gate / (1.0 + gl.exp(-gate)) * up).to(ROUND_TO).to(gl.float32)
    largest = gl.max(gl.abs(x), 1)
    scale = gl.where(largest > 0.0, gl.div_rn(largest, gl.full_like(largest, MAGNITUDE)), 1.0)
    x = gl.div_rn(x, gl.zeros_like(x) + scale[:, None])
    return gl.minimum(gl.maximum(x, -MAGNITUDE), MAGNITUDE), scale


@gluon.jit
def multiply_tiles(
    p_x_scale, p_w_scale, p_out, p_out_scale, p_pairs, p_tile_experts, x_smem, w_smem, full, empty,
    stride_x_scale, stride_ws_expert, stride_ws, stride_out, stride_out_scale,
    total, tiles_m, tiles_n, routed_tiles, shared_expert, num_pairs, extra_rows, num_columns, num_steps,
    SIDE: gl.constexpr, TOP_K: gl.constexpr, X_BY_PAIR: gl.constexpr, GROUPED: gl.constexpr,
    GROUP_M: gl.constexpr, GATED: gl.constexpr, ROUND_TO: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Half SIDE (0 or 1) of every item's rows; a half of padding only lets its stages go."""
    WIDTH: gl.constexpr = GROUP if GATED else 2 * GROUP
    START: gl.constexpr = SIDE * HALF
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    io: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, mma)
    nothing = gl.zeros([HALF, GROUP], gl.float32, mma)
    next_m, next_n = place_of(gl.program_id(0), tiles_m, tiles_n, GROUP_M, GROUPED)
    next_expert = expert_of(p_tile_experts, next_m, routed_tiles, shared_expert, GROUPED)
    next_live = is_live(p_pairs, next_m, START, routed_tiles, extra_rows, GROUPED)
    next_result = results_of(
        p_pairs, next_m, START, routed_tiles, num_pairs, extra_rows, GROUPED, rows
    )
    step = 0
    for i in range(gl.program_id(0), total, gl.num_programs(0)):
        i_m, i_n, expert, live, result = next_m, next_n, next_expert, next_live, next_result
        following = gl.minimum(i + gl.num_programs(0), total - 1)
        next_m, next_n = place_of(following, tiles_m, tiles_n, GROUP_M, GROUPED)
        next_expert = expert_of(p_tile_experts, next_m, routed_tiles, shared_expert, GROUPED)
        next_live = is_live(p_pairs, next_m, START, routed_tiles, extra_rows, GROUPED)
        next_result = results_of(
            p_pairs, next_m, START, routed_tiles, num_pairs, extra_rows, GROUPED, rows
        )
        if expert >= 0:
            if live:
                ok = result >= 0
                column = i_n * WIDTH
                apart = num_columns if GATED else GROUP
                p_xs = p_x_scale + source_of(result, num_pairs, TOP_K, X_BY_PAIR) * stride_x_scale
                p_ws = p_w_scale + gl.to_tensor(expert).to(gl.int64) * stride_ws_expert
                p_ws2 = p_ws + (column + apart) // GROUP * stride_ws
                p_ws += column // GROUP * stride_ws
                b_acc = gl.zeros([HALF, GROUP], gl.float32, mma)
                b_acc2 = gl.zeros([HALF, GROUP], gl.float32, mma)
                x_scale = gl.load(p_xs, mask=ok, other=0.0)
                w_scale = gl.load(p_ws)
                w_scale2 = gl.load(p_ws2)
                for i_k in range(num_steps):
                    stage = step % STAGES
                    mbarrier.wait(full.index(stage), (step // STAGES) & 1)
                    if GROUPED:
                        fence_async_shared()  # gathered rows were not written by the copy engine
                    x = x_smem.index(2 * stage + SIDE)
                    w = w_smem.index(2 * stage).permute((1, 0))
                    part = warpgroup_mma(x, w, nothing, use_acc=False, is_async=True)
                    scale, scale2 = x_scale * w_scale, x_scale * w_scale2
                    following = gl.minimum(i_k + 1, num_steps - 1)
                    x_scale = gl.load(p_xs + following, mask=ok, other=0.0)
                    w_scale = gl.load(p_ws + following)
                    w_scale2 = gl.load(p_ws2 + following)
                    part = warpgroup_mma_wait(0, deps=[part])
                    b_acc += part * scale[:, None]
                    w = w_smem.index(2 * stage + 1).permute((1, 0))
                    part = warpgroup_mma(x, w, nothing, use_acc=False, is_async=True)
                    part = warpgroup_mma_wait(0, deps=[part])
                    release(empty.index(stage))
                    b_acc2 += part * scale2[:, None]
                    step += 1
                out_row = results_of(
                    p_pairs, i_m, START, routed_tiles, num_pairs, extra_rows, GROUPED,
                    gl.SliceLayout(1, io),
                )  # fmt: skip
                if GATED:
                    made, made_scale = gate_and_quantise(b_acc, b_acc2, ROUND_TO)
                    store_plain(p_out, made, column, out_row, stride_out, io)
                    p_os = p_out_scale + result.to(gl.int64) * stride_out_scale + i_n
                    gl.store(p_os, made_scale, mask=ok)
                else:
                    store_plain(p_out, b_acc, column, out_row, stride_out, io)
                    store_plain(p_out, b_acc2, column + GROUP, out_row, stride_out, io)
            else:
                for _ in range(num_steps):
                    mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
                    release(empty.index(step % STAGES))
                    step += 1


_VARYING = (
    "stride_x_scale",
    "stride_ws_expert",
    "stride_ws",
    "stride_out_scale",
    "tiles_m",
    "tiles_n",
    "routed_tiles",
    "shared_expert",
    "num_pairs",
    "extra_rows",
    "num_steps",
)
"""Arguments whose divisibility changes no instruction: one compilation serves all their values."""


@gluon.jit(do_not_specialize=_VARYING)
def hopper_gemm_kernel(
    x,
    p_x_scale,
    desc_w,
    p_w_scale,
    p_out,
    p_out_scale,
    p_pairs,
    p_tile_experts,
    stride_x,
    stride_x_scale,
    stride_ws_expert,
    stride_ws,
    stride_out,
    stride_out_scale,
    tiles_m,
    tiles_n,
    routed_tiles,
    shared_expert,
    num_pairs,
    extra_rows,
    num_columns,
    num_steps,
    TOP_K: gl.constexpr,
    X_BY_PAIR: gl.constexpr,
    GROUPED: gl.constexpr,
    GROUP_M: gl.constexpr,
    GATED: gl.constexpr,
    ROUND_TO: gl.constexpr,
    STAGES: gl.constexpr,
):
    """x W^T of 128 rows and 256 columns an item: as ``block_scaled_gemm_kernel``, or GROUPED as
    ``grouped_gemm_kernel``, with two parts of 128 columns. Grid (programs,): each takes every so many-th item.

    x is a descriptor of [64, 128] bytes, or with GROUPED a pointer whose rows are gathered; desc_w
    [128, 128] of all experts' rows. num_columns is a multiple of what an item stores; num_steps blocks of K.
    extra_rows: GROUPED, rows of the shared expert, whose tiles follow the routed ones; otherwise x's rows.
    """
    REGISTERS: gl.constexpr = (216, 72) if GROUPED else (224, 56)
    total = tiles_m * tiles_n
    w_layout: gl.constexpr = desc_w.layout
    x_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, GROUP], gl.float8e4nv)
    x_smem = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, HALF, GROUP], x_layout)
    w_smem = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, GROUP, GROUP], w_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        if GROUPED:
            mbarrier.init(
                full.index(stage), count=129
            )  # every thread that gathers, and the copy engine
        else:
            mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (
                multiply_tiles,
                (
                    p_x_scale, p_w_scale, p_out, p_out_scale, p_pairs, p_tile_experts,
                    x_smem, w_smem, full, empty,
                    stride_x_scale, stride_ws_expert, stride_ws, stride_out, stride_out_scale,
                    total, tiles_m, tiles_n, routed_tiles, shared_expert, num_pairs, extra_rows,
                    num_columns, num_steps,
                    0, TOP_K, X_BY_PAIR, GROUPED, GROUP_M, GATED, ROUND_TO, STAGES,
                ),
            ),
            (
                multiply_tiles,
                (
                    p_x_scale, p_w_scale, p_out, p_out_scale, p_pairs, p_tile_experts,
                    x_smem, w_smem, full, empty,
                    stride_x_scale, stride_ws_expert, stride_ws, stride_out, stride_out_scale,
                    total, tiles_m, tiles_n, routed_tiles, shared_expert, num_pairs, extra_rows,
                    num_columns, num_steps,
                    1, TOP_K, X_BY_PAIR, GROUPED, GROUP_M, GATED, ROUND_TO, STAGES,
                ),
            ),
            (
                fetch_tiles,
                (
                    x, desc_w, p_pairs, p_tile_experts, x_smem, w_smem, full, empty,
                    stride_x, total, tiles_m, tiles_n, routed_tiles, shared_expert, num_pairs,
                    extra_rows, num_columns, num_steps,
                    TOP_K, X_BY_PAIR, GROUPED, GROUP_M, GATED, STAGES,
                ),
            ),
        ],
        worker_num_warps=[4, 4],
        worker_num_regs=REGISTERS,
    )  # fmt: skip
