"""Triton kernels of the chunked gated delta rule.

Per chunk of C rows, with normalised k and q, log decays summed within the chunk to G, and S the state
[V, K] before it:

    A[i, j] = beta_i exp(G_i - G_j) k_i.k_j for j < i,        T = (I + A)^-1
    N = T (beta v) - T (beta exp(G) k) S^T                     what each row adds
    o_i = exp(G_i) S q_i + sum over j <= i of exp(G_i - G_j) q_i.k_j N_j
    S' = exp(G_last) S + sum over j of exp(G_last - G_j) N_j k_j^T

`prefill_chunk_kernel` does all that needs no state; `prefill_state_kernel` walks a request's chunks. Rows of
q and k enter the products as they are; their norms are factors of rows and columns of the results.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def diagonal_inverse(a, C: tl.constexpr, BASE: tl.constexpr):
    """Inverse of I + the diagonal blocks of a [C, C], column after column; exact zeros outside the blocks."""
    N: tl.constexpr = C // BASE
    i = tl.arange(0, C)
    same = (i // BASE)[:, None] == (i // BASE)[None, :]
    blocks = tl.reshape(tl.where(same, a, 0.0), [N, BASE, N, BASE])
    blocks = tl.sum(blocks, axis=2)
    o_b = tl.arange(0, BASE)
    row_of = o_b[None, :, None]
    column_of = o_b[None, None, :]
    # The product with zero keeps the layout of `blocks`, in which a warp holds a block of its own.
    inverse = tl.where(row_of == column_of, 1.0, blocks * 0.0)
    for r in range(BASE - 1):
        column = tl.sum(tl.where(column_of == r, blocks, 0.0), axis=2)
        row = tl.sum(tl.where(row_of == r, inverse, 0.0), axis=1)
        inverse -= column[:, :, None] * row[:, None, :]
    full = tl.broadcast_to(inverse[:, :, None, :], [N, BASE, N, BASE])
    return tl.where(same, tl.reshape(full, [C, C]), 0.0)


@triton.jit
def _join_pairs(inverse, a, C: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """Inverses of blocks of size HALF -> of twice that: [[P, 0], [-Q L P, Q]] from P, Q and a's L."""
    block = tl.arange(0, C) // HALF
    pair = (block[:, None] // 2 == block[None, :] // 2) & (block[:, None] != block[None, :])
    moved = tl.dot(tl.where(pair, a, 0.0), inverse, input_precision=PRECISION)
    return inverse - tl.dot(inverse, moved, input_precision=PRECISION)


@triton.jit
def unit_lower_inverse(a, C: tl.constexpr, BASE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 of a strictly lower a [C, C]: row i depends on rows up to i alone, bit for bit."""
    inverse = diagonal_inverse(a, C, BASE)
    for level in tl.static_range(4):
        if (BASE << level) < C:
            inverse = _join_pairs(inverse, a, C, BASE << level, PRECISION)
    return inverse


@triton.jit
def row_gates(p_a, p_b, a_log, dt_bias, inside):
    """(log decay, beta) of rows, both 0 outside; the formula of the recurrent step."""
    x = tl.load(p_a, mask=inside, other=0.0).to(tl.float32) + dt_bias
    soft = tl.where(x <= 20.0, tl.log(1.0 + tl.exp(x)), x)
    beta = 1.0 / (1.0 + tl.exp(-tl.load(p_b, mask=inside, other=0.0).to(tl.float32)))
    return tl.where(inside, -tl.exp(a_log) * soft, 0.0), tl.where(inside, beta, 0.0)


@triton.jit
def prefill_chunk_kernel(
    q,
    k,
    v,
    a,
    b,
    a_log,
    dt_bias,
    w,
    u,
    attn,
    q_coef,
    k_coef,
    decay,
    chunks,
    scale,
    stride_a_token,
    stride_b_token,
    stride_q_token: tl.constexpr,
    stride_q_head: tl.constexpr,
    stride_k_token: tl.constexpr,
    stride_k_head: tl.constexpr,
    stride_v_token: tl.constexpr,
    stride_v_head: tl.constexpr,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    BASE: tl.constexpr,
    SOLVE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT: tl.constexpr,
):
    """What a chunk needs no state for. Grid (chunks, HV / HEADS).

    Per chunk and value head: w [C, K] = T (beta exp(G) k) and u [V, C] = (T beta v)^T; attn [C, C] the scaled and
    decayed q.k; q_coef, k_coef [C] fp32 the factors of a row's q and k; decay fp32 exp(G_last).
    """
    i_c = tl.program_id(0)
    first_head = tl.program_id(1) * HEADS
    i_k = first_head // GROUP
    start = tl.load(chunks + i_c * 2).to(tl.int64)
    count = tl.load(chunks + i_c * 2 + 1)
    o_c = tl.arange(0, C)
    o_d = tl.arange(0, BLOCK_D)
    inside = o_c < count
    element = w.dtype.element_ty

    p_k = k + start * stride_k_token + i_k * stride_k_head
    p_q = q + start * stride_q_token + i_k * stride_q_head
    k_tile = o_c[:, None] * stride_k_token + o_d[None, :]
    q_tile = o_c[:, None] * stride_q_token + o_d[None, :]
    gram = tl.zeros([C, C], dtype=tl.float32)
    seen = tl.zeros([C, C], dtype=tl.float32)
    norm_k = tl.zeros([C], dtype=tl.float32)
    norm_q = tl.zeros([C], dtype=tl.float32)
    for d in range(0, K, BLOCK_D):
        b_k = tl.load(p_k + d + k_tile, mask=inside[:, None], other=0.0)
        b_q = tl.load(p_q + d + q_tile, mask=inside[:, None], other=0.0)
        norm_k += tl.sum(b_k.to(tl.float32) * b_k.to(tl.float32), axis=1)
        norm_q += tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), axis=1)
        gram = tl.dot(b_k, tl.trans(b_k), acc=gram, input_precision=DOT)
        seen = tl.dot(b_q, tl.trans(b_k), acc=seen, input_precision=DOT)
    norm_k = tl.rsqrt(norm_k + 1e-6)
    norm_q = tl.rsqrt(norm_q + 1e-6) * scale
    gram *= norm_k[:, None] * norm_k[None, :]
    seen *= norm_q[:, None] * norm_k[None, :]
    below = o_c[:, None] > o_c[None, :]
    upto = o_c[:, None] >= o_c[None, :]

    for i in tl.static_range(HEADS):
        i_h = first_head + i
        log_decay, beta = row_gates(
            a + (start + o_c) * stride_a_token + i_h,
            b + (start + o_c) * stride_b_token + i_h,
            tl.load(a_log + i_h).to(tl.float32),
            tl.load(dt_bias + i_h).to(tl.float32),
            inside,
        )
        total = tl.cumsum(log_decay, axis=0)
        last = tl.sum(tl.where(o_c == count - 1, total, 0.0), axis=0)
        gap = tl.exp(tl.where(upto, total[:, None] - total[None, :], 0.0))
        lower = tl.where(below, gram * gap * beta[:, None], 0.0)
        place = i_c.to(tl.int64) * HV + i_h
        p_attn = attn + place * C * C + o_c[:, None] * C + o_c[None, :]
        tl.store(p_attn, tl.where(upto, seen * gap, 0.0).to(element))
        growth = tl.exp(total)
        tl.store(q_coef + place * C + o_c, norm_q * growth)
        tl.store(k_coef + place * C + o_c, norm_k * tl.exp(last - total))
        tl.store(decay + place, tl.exp(last))

        solve = unit_lower_inverse(lower, C, BASE, SOLVE)
        left = (solve * beta[None, :]).to(element)
        p_v = v + start * stride_v_token + i_h * stride_v_head
        v_tile = o_c[:, None] * stride_v_token + o_d[None, :]
        p_u = u + place * (V * C)
        u_tile = o_d[None, :] * C + o_c[:, None]
        for d in range(0, V, BLOCK_D):
            b_v = tl.load(p_v + d + v_tile, mask=inside[:, None], other=0.0)
            tl.store(p_u + d * C + u_tile, tl.dot(left, b_v, input_precision=DOT).to(element))
        left = (solve * (beta * growth * norm_k)[None, :]).to(element)
        p_w = w + place * (C * K)
        w_tile = o_c[:, None] * K + o_d[None, :]
        for d in range(0, K, BLOCK_D):
            b_k = tl.load(p_k + d + k_tile, mask=inside[:, None], other=0.0)
            tl.store(p_w + d + w_tile, tl.dot(left, b_k, input_precision=DOT).to(element))


@triton.jit
def prefill_state_kernel(
    q,
    k,
    w,
    u,
    attn,
    q_coef,
    k_coef,
    decay,
    out,
    pool,
    slots,
    dests,
    requests,
    num_slots,
    stride_slot,
    stride_q_token: tl.constexpr,
    stride_q_head: tl.constexpr,
    stride_k_token: tl.constexpr,
    stride_k_head: tl.constexpr,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BV: tl.constexpr,
    HAS_DESTS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Walk the chunks of a request with the state in registers. Grid (V / BV, HV, requests).

    Two spans: up to the cut, whose state goes to the request's destination, and on to the end, whose state
    goes to its slot. Everything is transposed, [V, rows], so that each product's result is the next one's
    left operand without leaving registers.
    """
    i_h = tl.program_id(1)
    i_n = tl.program_id(2)
    row = tl.load(requests + i_n * 4)
    stop = tl.load(requests + i_n * 4 + 1)
    end = tl.load(requests + i_n * 4 + 2)
    chunk = tl.load(requests + i_n * 4 + 3)
    slot = tl.load(slots + i_n).to(tl.int64)
    dest = tl.full([], -1, tl.int64)
    if HAS_DESTS:
        dest = tl.load(dests + i_n).to(tl.int64)
        dest = tl.where(stop > row, dest, -1)
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, K)
    o_v = tl.program_id(0) * BV + tl.arange(0, BV)
    element = w.dtype.element_ty
    p_state = pool + i_h * V * K + o_v[:, None] * K + o_k[None, :]
    valid = (o_v < V)[:, None]
    live = (slot >= 0) & (slot < num_slots)
    b_s = tl.load(p_state + slot * stride_slot, mask=valid & live, other=0.0).to(tl.float32)
    # Scalar pointers move along the chunks; tiles are offsets of 32 bits that stay.
    k += (i_h // GROUP) * stride_k_head
    q += (i_h // GROUP) * stride_q_head
    k_tile = o_c[:, None] * stride_k_token + o_k[None, :]
    q_tile = o_c[:, None] * stride_q_token + o_k[None, :]
    w_tile = o_c[:, None] * K + o_k[None, :]
    u_tile = o_v[:, None] * C + o_c[None, :]
    attn_tile = o_c[:, None] * C + o_c[None, :]
    out_tile = o_c[None, :] * (HV * V) + o_v[:, None]

    for _ in range(2):
        num_chunks = tl.cdiv(stop - row, C)
        place = chunk.to(tl.int64) * HV + i_h
        fade = tl.load(decay + place, mask=num_chunks > 0, other=1.0)
        for i in range(num_chunks):
            here = place + i * HV
            start = (row + i * C).to(tl.int64)
            left = stop - row - i * C
            inside = o_c < left
            # The next chunk's factor is on its way while this one is computed.
            next_fade = tl.load(decay + here + HV, mask=i + 1 < num_chunks, other=1.0)
            b_w = tl.load(w + here * (C * K) + w_tile)
            b_u = tl.load(u + here * (V * C) + u_tile)
            b_q = tl.load(q + start * stride_q_token + q_tile, mask=inside[:, None], other=0.0)
            b_k = tl.load(k + start * stride_k_token + k_tile, mask=inside[:, None], other=0.0)
            b_a = tl.load(attn + here * (C * C) + attn_tile)
            b_qc = tl.load(q_coef + here * C + o_c)
            b_kc = tl.load(k_coef + here * C + o_c)
            b_h = b_s.to(element)
            # A difference, because a sum would become the product's start and its load no longer pipelined.
            b_n = b_u.to(tl.float32) - tl.dot(b_h, tl.trans(b_w), input_precision=DOT)
            b_o = tl.dot(b_h, tl.trans(b_q), input_precision=DOT) * b_qc[None, :]
            b_s *= fade
            b_s = tl.dot((b_n * b_kc[None, :]).to(element), b_k, acc=b_s, input_precision=DOT)
            b_o = tl.dot(b_n.to(element), tl.trans(b_a), acc=b_o, input_precision=DOT)
            p_o = out + start * (HV * V) + i_h * V + out_tile
            tl.store(p_o, b_o.to(out.dtype.element_ty), mask=inside[None, :] & valid)
            fade = next_fade
        stored = (dest >= 0) & (dest < num_slots)
        p_to = p_state + dest * stride_slot
        tl.store(p_to, b_s.to(pool.dtype.element_ty), mask=valid & stored)
        chunk += num_chunks
        row = stop
        stop = end
        dest = slot
