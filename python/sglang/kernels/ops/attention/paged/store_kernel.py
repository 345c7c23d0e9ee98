"""Triton kernels that write a call's keys and values into the paged pool."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.kernels.launch_overlap_kernels import after_previous


@triton.jit
def store_kv_kernel(
    p_k,
    p_v,
    p_slots,
    p_k_buffer,
    p_v_buffer,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_ks,
    stride_vs,
    stride_ksh,
    stride_vsh,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """K and V of one head of one row to the row's slot; a slot below 0 is skipped. Grid (rows, heads)."""
    after_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(p_slots + row).to(tl.int64)
    if slot < 0:
        return
    d = tl.arange(0, BLOCK_D)
    inside = d < HEAD_DIM
    k = tl.load(p_k + row * stride_kt + head * stride_kh + d, mask=inside, other=0.0)
    v = tl.load(p_v + row * stride_vt + head * stride_vh + d, mask=inside, other=0.0)
    p_kb = p_k_buffer + slot * stride_ks + head * stride_ksh + d
    p_vb = p_v_buffer + slot * stride_vs + head * stride_vsh + d
    tl.store(p_kb, k.to(p_k_buffer.dtype.element_ty), mask=inside)
    tl.store(p_vb, v.to(p_v_buffer.dtype.element_ty), mask=inside)


@triton.jit
def norm_rope_store_kernel(
    p_q,
    p_k,
    p_v,
    p_q_weight,
    p_k_weight,
    p_cos,
    p_sin,
    p_positions,
    p_slots,
    p_out,
    p_k_buffer,
    p_v_buffer,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_ot,
    stride_oh,
    stride_ks,
    stride_vs,
    stride_ksh,
    stride_vsh,
    num_heads,
    num_kv_heads,
    half,
    eps,
    UNIT_OFFSET: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One head of one row. Grid (rows, query heads + key heads + value heads).

    A query head is normed and rotated into p_out, a key head likewise into its slot, a value head
    copied into its slot. A slot below 0 is skipped: nothing is loaded or written for the row.
    """
    after_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1)
    slot = tl.load(p_slots + row).to(tl.int64)
    if slot < 0:
        return
    d = tl.arange(0, BLOCK_D)
    inside = d < HEAD_DIM
    if i_h >= num_heads + num_kv_heads:
        head = i_h - num_heads - num_kv_heads
        v = tl.load(p_v + row * stride_vt + head * stride_vh + d, mask=inside, other=0.0)
        p_vb = p_v_buffer + slot * stride_vs + head * stride_vsh + d
        tl.store(p_vb, v.to(p_v_buffer.dtype.element_ty), mask=inside)
        return
    is_query = i_h < num_heads
    head = tl.where(is_query, i_h, i_h - num_heads)
    p_from = p_k + row * stride_kt + head * stride_kh
    p_weight = p_k_weight
    if is_query:
        p_from = p_q + row * stride_qt + head * stride_qh
        p_weight = p_q_weight
    rotated = d < 2 * half
    partner = tl.where(d < half, d + half, d - half)
    partner = tl.where(rotated, partner, d)
    x = tl.load(p_from + d, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(p_from + partner, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(p_weight + d, mask=inside, other=0.0).to(tl.float32)
    other_weight = tl.load(p_weight + partner, mask=inside, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        weight += 1.0
        other_weight += 1.0
    scale = tl.rsqrt(tl.sum(x * x, 0) / HEAD_DIM + eps)
    x = (x * scale * weight).to(p_out.dtype.element_ty).to(tl.float32)
    other = (other * scale * other_weight).to(p_out.dtype.element_ty).to(tl.float32)
    position = tl.load(p_positions + row)
    at = position * half + tl.where(d < half, d, d - half)
    cos = tl.load(p_cos + at, mask=rotated, other=1.0)
    sin = tl.load(p_sin + at, mask=rotated, other=0.0)
    turned = x * cos + tl.where(d < half, -other, other) * sin
    turned = turned.to(p_out.dtype.element_ty)
    if is_query:
        tl.store(p_out + row * stride_ot + head * stride_oh + d, turned, mask=inside)
    else:
        p_kb = p_k_buffer + slot * stride_ks + head * stride_ksh + d
        tl.store(p_kb, turned.to(p_k_buffer.dtype.element_ty), mask=inside)
