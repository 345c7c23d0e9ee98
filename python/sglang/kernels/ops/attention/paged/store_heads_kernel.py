"""Norm, rotation and store at once, several heads a program, each element loaded once."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.kernels.launch_overlap_kernels import after_previous
from sglang.kernels.ops.fused.pair_arith import round_to, widen


@triton.jit
def other_half(x, HALF: tl.constexpr):
    """x [heads, d] fp32 with columns j and j + HALF of every 2 * HALF swapped, HALF a power of two.

    Both halves' bits xor their own are the other's: a reduction over the two, which threads do in registers.
    """
    HEADS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    bits = x.to(tl.int32, bitcast=True)
    halves = tl.reshape(bits, [HEADS, WIDTH // (2 * HALF), 2, HALF])
    both = tl.xor_sum(halves, axis=2, keep_dims=True)
    return tl.reshape(both ^ halves, [HEADS, WIDTH]).to(tl.float32, bitcast=True)


@triton.jit
def norm_rope_store_heads_kernel(
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
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PAIRED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """BLOCK_H heads of one row. Grid (rows x tiles), a tile being of query, of key or of value heads; a row's
    tiles are neighbours.

    As ``norm_rope_store_kernel``; HALF is a power of two, and 2 * HALF divides BLOCK_D. A slot below 0 is
    skipped: nothing of the row is loaded or written.
    """
    after_previous(OVERLAP)
    Q_TILES: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    KV_TILES: tl.constexpr = (NUM_KV_HEADS + BLOCK_H - 1) // BLOCK_H
    TILES: tl.constexpr = Q_TILES + 2 * KV_TILES
    row = (tl.program_id(0) // TILES).to(tl.int64)
    tile = tl.program_id(0) % TILES
    slot = tl.load(p_slots + row).to(tl.int64)
    position = tl.load(p_positions + row)
    if slot < 0:
        return
    d = tl.arange(0, BLOCK_D)
    # Wider stores of FP8 keys or values would add the squares in the order of another layout.
    WIDTH: tl.constexpr = 128 // p_out.dtype.element_ty.primitive_bitwidth
    if tile >= Q_TILES + KV_TILES:
        head = (tile - Q_TILES - KV_TILES) * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = (head < NUM_KV_HEADS)[:, None] & (d < HEAD_DIM)[None, :]
        p_from = p_v + row * stride_vt + head[:, None] * stride_vh + d[None, :]
        v = tl.load(p_from, mask=inside, other=0.0)
        p_vb = p_v_buffer + slot * stride_vs + head[:, None] * stride_vsh + d[None, :]
        p_vb = tl.max_contiguous(p_vb, (1, WIDTH))
        tl.store(p_vb, v.to(p_v_buffer.dtype.element_ty), mask=inside)
        return
    is_query = tile < Q_TILES
    first = tl.where(is_query, tile, tile - Q_TILES) * BLOCK_H
    count = tl.where(is_query, NUM_HEADS, NUM_KV_HEADS)
    p_from, stride, p_weight = p_k + row * stride_kt, stride_kh, p_k_weight
    if is_query:
        p_from, stride, p_weight = p_q + row * stride_qt, stride_qh, p_q_weight
    head = first + tl.arange(0, BLOCK_H)
    inside = (head < count)[:, None] & (d < HEAD_DIM)[None, :]
    p_from = p_from + head[:, None] * stride + d[None, :]
    x = widen(tl.load(p_from, mask=inside, other=0.0), PAIRED)
    rotated, lower = d < 2 * HALF, d < HALF
    at = position * HALF + tl.where(lower, d, d - HALF)
    cos = tl.load(p_cos + at, mask=rotated, other=1.0)
    sin = tl.load(p_sin + at, mask=rotated, other=0.0)
    weight = tl.load(p_weight + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        weight += 1.0
    scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)
    x = round_to(x * scale[:, None] * weight[None, :], p_out.dtype.element_ty, PAIRED)
    other = tl.where(rotated[None, :], other_half(x, HALF), x)
    turned = x * cos[None, :] + tl.where(lower[None, :], -other, other) * sin[None, :]
    turned = turned.to(p_out.dtype.element_ty)
    if is_query:
        p_to = p_out + row * stride_ot + head[:, None] * stride_oh + d[None, :]
        tl.store(p_to, turned, mask=inside)
    else:
        p_kb = p_k_buffer + slot * stride_ks + head[:, None] * stride_ksh + d[None, :]
        p_kb = tl.max_contiguous(p_kb, (1, WIDTH))
        tl.store(p_kb, turned.to(p_k_buffer.dtype.element_ty), mask=inside)
