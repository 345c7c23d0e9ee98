"""Triton kernel that replays recorded update tuples into recurrent states, all layers in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.kernels.launch_overlap_kernels import after_previous
from sglang.kernels.ops.attention.fla.gdn_step import apply_update, decay_factor
from sglang.kernels.ops.mamba.scatter_kernels import is_committed_slot


@triton.jit
def replay_tuples_kernel(
    states,
    u,
    k,
    g,
    src_rows,
    slots,
    steps,
    dests,
    track_dests,
    track_steps,
    n,
    num_slots,
    num_rows,
    num_steps,
    state_stride_layer,
    state_stride_slot,
    u_stride_layer,
    u_stride_row,
    u_stride_step,
    k_stride_layer,
    k_stride_row,
    k_stride_step,
    g_stride_layer,
    g_stride_row,
    g_stride_step,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HAS_DESTS: tl.constexpr,
    HAS_TRACK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PTX: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """states[l, dest] = states[l, slot] advanced by steps 0..step; the track copy leaves on the way.

    Grid (HV x V tiles, n, L). The state is widened to fp32 once and rounded to its dtype once, at each store.
    """
    after_previous(OVERLAP)
    i_tile = tl.program_id(0)
    i_req = tl.program_id(1)
    i_layer = tl.program_id(2).to(tl.int64)
    num_v_tiles: tl.constexpr = (V + BV - 1) // BV
    i_head = i_tile // num_v_tiles
    i_v = i_tile % num_v_tiles

    slot = tl.load(slots + i_req).to(tl.int64)
    row = tl.load(src_rows + i_req).to(tl.int64)
    step = tl.load(steps + i_req).to(tl.int64)
    dest = slot
    if HAS_DESTS:
        dest = tl.load(dests + i_req).to(tl.int64)
    readable = (slot >= 0) & (slot < num_slots) & (row >= 0) & (row < num_rows)
    if not (readable & (step >= 0) & (step < num_steps) & (dest >= 0) & (dest < num_slots)):
        step = tl.cast(-1, tl.int64)
    last = step
    track_step = tl.cast(-1, tl.int64)
    track_dest = tl.cast(0, tl.int64)
    if HAS_TRACK:
        track_step = tl.load(track_steps + i_req).to(tl.int64)
        track_dest = tl.load(track_dests + i_req).to(tl.int64)
        in_pool = (track_dest >= 0) & (track_dest < num_slots)
        if not (readable & (track_step >= 0) & (track_step < num_steps) & in_pool):
            track_step = tl.cast(-1, tl.int64)
        if track_step >= 0:
            if is_committed_slot(track_dest, slots, steps, n, num_steps, BLOCK_N) != 0:
                track_step = tl.cast(-1, tl.int64)
        last = tl.maximum(step, track_step)

    if last >= 0:
        o_k = tl.arange(0, BK)
        o_v = i_v * BV + tl.arange(0, BV)
        in_k = o_k < K
        in_v = o_v < V
        inside = in_v[:, None] & in_k[None, :]
        entry = i_head * V * K + o_v[:, None] * K + o_k[None, :]
        p_layer = states + i_layer * state_stride_layer
        b_h = tl.load(p_layer + slot * state_stride_slot + entry, mask=inside, other=0.0)
        b_h = b_h.to(tl.float32)
        p_u = u + i_layer * u_stride_layer + row * u_stride_row + i_head * V + o_v
        p_k = k + i_layer * k_stride_layer + row * k_stride_row + i_head * K + o_k
        p_g = g + i_layer * g_stride_layer + row * g_stride_row + i_head
        t = 0
        while t <= last:
            b_u = tl.load(p_u + t * u_stride_step, mask=in_v, other=0.0)
            b_k = tl.load(p_k + t * k_stride_step, mask=in_k, other=0.0)
            decay = decay_factor(tl.load(p_g + t * g_stride_step), PTX)
            b_h = apply_update(b_h, decay, b_k, b_u, PTX)
            if HAS_TRACK:
                if t == track_step:
                    p_out = p_layer + track_dest * state_stride_slot + entry
                    tl.store(p_out, b_h.to(states.dtype.element_ty), mask=inside)
            if t == step:
                p_out = p_layer + dest * state_stride_slot + entry
                tl.store(p_out, b_h.to(states.dtype.element_ty), mask=inside)
            t += 1
