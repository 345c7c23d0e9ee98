"""Triton kernel of the gated delta rule over a few tokens: decode, verify (chain and tree), both scratch kinds.

Chain decode, snapshot verify and tuple verify are one compiled kernel: what is written is chosen by run-time
flags, so that recording tuples cannot change the code of the recurrence.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.kernels.launch_overlap_kernels import after_previous
from sglang.kernels.ops.attention.fla.gdn_step import delta_step, gate_values

_RUNTIME_VALUES = [
    "scale",
    "q_stride_batch",
    "q_stride_token",
    "k_stride_batch",
    "k_stride_token",
    "v_stride_batch",
    "v_stride_token",
    "a_stride_token",
    "b_stride_token",
    "tokens",
    "num_slots",
    "num_rows",
    "pitch",
    "write_state",
    "write_snapshots",
    "write_tuples",
]


@triton.jit(do_not_specialize=_RUNTIME_VALUES)
def recurrent_step_kernel(
    q,
    k,
    v,
    a,
    b,
    a_log,
    dt_bias,
    out,
    states,
    slots,
    cu_seqlens,
    snapshots,
    u_ring,
    k_ring,
    g_ring,
    rows,
    parents,
    scale,
    q_stride_batch,
    q_stride_token,
    k_stride_batch,
    k_stride_token,
    v_stride_batch,
    v_stride_token,
    a_stride_token,
    b_stride_token,
    parent_stride,
    state_stride_slot,
    tokens,
    num_slots,
    num_rows,
    pitch,
    write_state,
    write_snapshots,
    write_tuples,
    SOFTPLUS_BETA: tl.constexpr,
    SOFTPLUS_THRESHOLD: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HAS_STATE: tl.constexpr,
    VARLEN: tl.constexpr,
    L2_NORM: tl.constexpr,
    GATES_GIVEN: tl.constexpr,
    TREE: tl.constexpr,
    PTX: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (V tiles, requests, HV). Registers hold a [BV, BK] fp32 tile of one head's state."""
    after_previous(OVERLAP)
    i_v = tl.program_id(0)
    i_n = tl.program_id(1)
    i_hv = tl.program_id(2)
    i_h = i_hv // (HV // H)

    if VARLEN:
        first = tl.load(cu_seqlens + i_n).to(tl.int64)
        num_steps = tl.load(cu_seqlens + i_n + 1).to(tl.int32) - first.to(tl.int32)
        batch = tl.cast(0, tl.int64)
        token = first
    else:
        num_steps = tokens
        batch = i_n.to(tl.int64)
        first = batch * tokens
        token = tl.cast(0, tl.int64)

    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    in_k = o_k < K
    in_v = o_v < V
    inside = in_v[:, None] & in_k[None, :]
    entry = o_v[:, None] * K + o_k[None, :]

    b_h = tl.zeros([BV, BK], dtype=tl.float32)
    slot = tl.cast(-1, tl.int64)
    p_state = states
    readable = slot >= 0
    if HAS_STATE:
        slot = tl.load(slots + i_n).to(tl.int64)
        readable = (slot >= 0) & (slot < num_slots)
        p_state = states + slot * state_stride_slot + i_hv * K * V
        b_h = tl.load(p_state + entry, mask=inside & readable, other=0.0).to(tl.float32)

    row = tl.load(rows + i_n).to(tl.int64)
    row_ok = (row >= 0) & (row < num_rows)
    rate = tl.load(a_log + i_hv).to(tl.float32)
    bias = tl.load(dt_bias + i_hv).to(tl.float32)

    t = 0
    while t < num_steps:
        here = token + t
        flat = first + t
        b_q = tl.load(
            q + batch * q_stride_batch + here * q_stride_token + i_h * K + o_k, mask=in_k, other=0.0
        ).to(tl.float32)
        b_k = tl.load(
            k + batch * k_stride_batch + here * k_stride_token + i_h * K + o_k, mask=in_k, other=0.0
        ).to(tl.float32)
        b_v = tl.load(
            v + batch * v_stride_batch + here * v_stride_token + i_hv * V + o_v,
            mask=in_v,
            other=0.0,
        ).to(tl.float32)
        if GATES_GIVEN:
            log_decay = tl.load(a + flat * a_stride_token + i_hv).to(tl.float32)
            beta = tl.load(b + flat * b_stride_token + i_hv).to(tl.float32)
        else:
            log_decay, beta = gate_values(
                a + flat * a_stride_token + i_hv,
                b + flat * b_stride_token + i_hv,
                rate,
                bias,
                SOFTPLUS_BETA,
                SOFTPLUS_THRESHOLD,
            )
        if L2_NORM:
            b_q = b_q / tl.sqrt(tl.sum(b_q * b_q) + 1e-6)
            b_k = b_k / tl.sqrt(tl.sum(b_k * b_k) + 1e-6)
        b_q = b_q * scale

        if TREE:
            # The start is read again rather than kept: a second tile would not fit the registers.
            parent = tl.load(parents + i_n.to(tl.int64) * parent_stride + t).to(tl.int64)
            known = (parent >= 0) & (parent < t) & (parent < pitch) & row_ok
            p_parent = snapshots + ((row * pitch + parent) * HV + i_hv) * K * V
            p_from = tl.where(known, p_parent, p_state)
            b_h = tl.load(p_from + entry, mask=inside & (known | readable), other=0.0)
            b_h = b_h.to(tl.float32)

        b_h, b_u, b_o = delta_step(b_h, log_decay, beta, b_q, b_k, b_v, PTX)
        p_out = out + (flat * HV + i_hv) * V + o_v
        tl.store(p_out, b_o.to(out.dtype.element_ty), mask=in_v)

        recorded = row_ok & (t < pitch)
        cell = (row * pitch + t) * HV + i_hv
        if recorded & (write_snapshots != 0):
            p_snapshot = snapshots + cell * (K * V) + entry
            tl.store(p_snapshot, b_h.to(snapshots.dtype.element_ty), mask=inside)
        if recorded & (write_tuples != 0):
            tl.store(u_ring + cell * V + o_v, b_u, mask=in_v)
            if i_v == 0:
                tl.store(k_ring + cell * K + o_k, b_k, mask=in_k)
                tl.store(g_ring + cell, log_decay)
        if TREE:
            tl.debug_barrier()
        t += 1

    if HAS_STATE:
        if (write_state != 0) & (slot >= 0) & (slot < num_slots):
            p_final = states + slot * state_stride_slot + i_hv * K * V
            tl.store(p_final + entry, b_h.to(states.dtype.element_ty), mask=inside)
