"""Triton kernels of the chunked gated delta rule.

Per chunk of C rows, with normalised k and q, log decays summed within the chunk to G, and S the state
[V, K] before it:

    A[i, j] = beta_i exp(G_i - G_j) k_i.k_j for j < i,        T = (I + A)^-1
    X = T diag(beta)                                           the only solved matrix, [C, C]
    N = X (v - diag(exp(G)) k S^T)                             what each row adds
    o_i = exp(G_i) S q_i + sum over j <= i of exp(G_i - G_j) q_i.k_j N_j
    S' = exp(G_last) S + sum over j of exp(G_last - G_j) N_j k_j^T

`prefill_chunk_kernel` does all that needs no state; `prefill_state_kernel` walks a request's chunks. Rows of
q and k enter the products as they are; their norms are factors of rows and columns of the results. All entries
of I + A, of T and of the products that make T are at most 1 (a chain of contractions between unit keys), so
that 16-bit floats carry them with tf32's mantissa.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.kernels.ops.attention.fla.prefill_inverse import lower_inverse, lower_inverse_fp16


@triton.jit
def row_gates(p_a, p_b, a_log, dt_bias, inside):
    """(log decay, beta) of rows, both 0 outside; the formula of the recurrent step."""
    x = tl.load(p_a, mask=inside, other=0.0).to(tl.float32) + dt_bias
    soft = tl.where(x <= 20.0, tl.log(1.0 + tl.exp(x)), x)
    beta = 1.0 / (1.0 + tl.exp(-tl.load(p_b, mask=inside, other=0.0).to(tl.float32)))
    return tl.where(inside, -tl.exp(a_log) * soft, 0.0), tl.where(inside, beta, 0.0)


@triton.jit
def _sum_and_last(sum_a, last_a, sum_b, last_b):
    return sum_a + sum_b, last_b


@triton.jit
def summed_gates(a, b, a_log, dt_bias, rows, stride_a, stride_b, i_h, inside):
    """(log2 decays summed up to each row, their sum, beta) of a chunk's rows.

    Beta goes through the scan, which leaves it as it is: else each thread would compute those of all rows and
    columns that it holds.
    """
    log_decay, beta = row_gates(
        a + rows * stride_a + i_h,
        b + rows * stride_b + i_h,
        tl.load(a_log + i_h).to(tl.float32),
        tl.load(dt_bias + i_h).to(tl.float32),
        inside,
    )
    log_decay *= 1.4426950408889634
    last = tl.sum(log_decay, axis=0)
    total, beta = tl.associative_scan((log_decay, beta), 0, _sum_and_last)
    return total, last, beta


@triton.jit
def prefill_chunk_kernel(
    q,
    k,
    a,
    b,
    a_log,
    dt_bias,
    solved,
    attn,
    q_coef,
    k_coef,
    s_coef,
    decay,
    chunks,
    scale,
    stride_a_token,
    stride_b_token,
    stride_q_token: tl.constexpr,
    stride_q_head: tl.constexpr,
    stride_k_token: tl.constexpr,
    stride_k_head: tl.constexpr,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    SOLVE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT: tl.constexpr,
):
    """What a chunk needs no state for. Grid (HV, chunks).

    Per chunk and value head: solved [C, C] = T diag(beta); attn [C, C] the scaled and decayed q.k; q_coef,
    k_coef, s_coef [C] fp32 the factors of a row's q against the state, of its k against the state, and of its k
    on the way into the state; decay fp32 exp(G_last).
    """
    i_h = tl.program_id(0)
    i_c = tl.program_id(1)
    i_k = i_h // GROUP
    start = tl.load(chunks + i_c * 2).to(tl.int64)
    count = tl.load(chunks + i_c * 2 + 1)
    o_c = tl.arange(0, C)
    o_d = tl.arange(0, BLOCK_D)
    inside = o_c < count
    element = solved.dtype.element_ty

    p_k = k + start * stride_k_token + i_k * stride_k_head
    p_q = q + start * stride_q_token + i_k * stride_q_head
    k_tile = o_c[:, None] * stride_k_token + o_d[None, :]
    q_tile = o_c[:, None] * stride_q_token + o_d[None, :]
    gram = tl.zeros([C, C], dtype=tl.float32)
    seen = tl.zeros([C, C], dtype=tl.float32)
    self_q = tl.zeros([C, C], dtype=tl.float32)
    for d in tl.static_range(0, K, BLOCK_D):
        b_k = tl.load(p_k + d + k_tile, mask=inside[:, None], other=0.0)
        b_q = tl.load(p_q + d + q_tile, mask=inside[:, None], other=0.0)
        if d + BLOCK_D == K:
            # While the last rows are on their way.
            rows = start + o_c
            total, last, beta = summed_gates(
                a, b, a_log, dt_bias, rows, stride_a_token, stride_b_token, i_h, inside
            )
        self_q = tl.dot(b_q, tl.trans(b_q), acc=self_q, input_precision=DOT)
        gram = tl.dot(b_k, tl.trans(b_k), acc=gram, input_precision=DOT)
        seen = tl.dot(b_q, tl.trans(b_k), acc=seen, input_precision=DOT)
    # Tensor cores square the rows too: all that is kept of q.q is its diagonal.
    same = o_c[:, None] == o_c[None, :]
    norm_k = tl.rsqrt(tl.sum(tl.where(same, gram, 0.0), axis=1) + 1e-6)
    norm_q = tl.rsqrt(tl.sum(tl.where(same, self_q, 0.0), axis=1) + 1e-6) * scale

    fall = tl.minimum(total[:, None] - total[None, :], 0.0)
    fall = tl.where(o_c[:, None] >= o_c[None, :], fall, float("-inf"))
    gap = tl.exp2(fall) * norm_k[None, :]
    place = i_c.to(tl.int64) * HV + i_h
    square = place * C * C + o_c[:, None] * C + o_c[None, :]
    tl.store(attn + square, (seen * norm_q[:, None] * gap).to(element))
    growth = tl.exp2(total)
    tl.store(q_coef + place * C + o_c, norm_q * growth)
    tl.store(k_coef + place * C + o_c, norm_k * growth)
    tl.store(s_coef + place * C + o_c, norm_k * tl.exp2(tl.minimum(last - total, 0.0)))
    tl.store(decay + place, tl.exp2(last))
    lower = gram * (norm_k * beta)[:, None] * gap
    if SOLVE == "fp16":
        inverse = lower_inverse_fp16(lower, C)
    else:
        lower = tl.where(o_c[:, None] > o_c[None, :], lower, 0.0)
        inverse = lower_inverse(lower, C, SOLVE)
    tl.store(solved + square, (inverse * beta[None, :]).to(element))


@triton.jit
def _advance(b_s, b_k, b_v, b_x, b_q, b_a, b_kc, b_sc, b_qc, fade, DOT: tl.constexpr):
    """One chunk: (state, out) [BV, K], [BV, C] from the state and the chunk's tiles."""
    element = b_x.dtype
    b_h = b_s.to(element)
    # What the state misses is rounded after the difference: where it predicts well, little is lost.
    b_y = tl.dot(b_h, tl.trans(b_k), input_precision=DOT) * b_kc[None, :]
    missed = (tl.trans(b_v).to(tl.float32) - b_y).to(element)
    b_n = tl.dot(missed, tl.trans(b_x), input_precision=DOT)
    b_o = tl.dot(b_h, tl.trans(b_q), input_precision=DOT) * b_qc[None, :]
    grown = (b_n * b_sc[None, :]).to(element)
    b_s = tl.dot(grown, b_k, acc=b_s * fade, input_precision=DOT)
    b_o = tl.dot(b_n.to(element), tl.trans(b_a), acc=b_o, input_precision=DOT)
    return b_s, b_o


@triton.jit
def prefill_state_kernel(
    q,
    k,
    v,
    solved,
    attn,
    q_coef,
    k_coef,
    s_coef,
    decay,
    q_rows,
    k_rows,
    v_rows,
    solved_rows,
    attn_rows,
    out_rows,
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
    stride_v_token: tl.constexpr,
    stride_v_head: tl.constexpr,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BV: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_DESTS: tl.constexpr,
    COPY_ENGINE: tl.constexpr,
    DOT: tl.constexpr,
):
    """Walk the chunks of a request with the state in registers. Grid (V / BV, HV, requests).

    Two spans: up to the cut, whose state goes to the request's destination, and on to the end, whose state
    goes to its slot. Everything is transposed, [V, rows], so that each product's result is the next one's
    left operand without leaving registers. Whole chunks need no masks; a span's rest of under C rows does.
    COPY_ENGINE: tensor descriptors `*_rows` of the same matrices move the whole chunks.
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
    first_v = tl.program_id(0) * BV
    o_v = first_v + tl.arange(0, BV)
    p_state = pool + i_h * V * K + o_v[:, None] * K + o_k[None, :]
    live = (slot >= 0) & (slot < num_slots)
    b_s = tl.load(p_state + slot * stride_slot, mask=live, other=0.0).to(tl.float32)
    # Scalar pointers move along the chunks; tiles are offsets of 32 bits that stay.
    i_k = i_h // GROUP
    k += i_k * stride_k_head
    q += i_k * stride_q_head
    v += i_h * stride_v_head
    out += i_h * V
    k_tile = o_c[:, None] * stride_k_token + o_k[None, :]
    q_tile = o_c[:, None] * stride_q_token + o_k[None, :]
    v_tile = o_c[:, None] * stride_v_token + o_v[None, :]
    square = o_c[:, None] * C + o_c[None, :]
    out_tile = o_c[None, :] * (HV * V) + o_v[:, None]

    for _ in range(2):
        whole = (stop - row) // C
        rest = (stop - row) % C
        place = chunk.to(tl.int64) * HV + i_h
        fade = tl.load(decay + place, mask=stop > row, other=1.0)
        for i in tl.range(whole, num_stages=STAGES):
            here = place + i * HV
            start = (row + i * C).to(tl.int64)
            # The next chunk's factor is on its way while this one is computed.
            next_fade = tl.load(decay + here + HV, mask=(i + 1) * C < stop - row, other=1.0)
            if COPY_ENGINE:
                low = row + i * C
                block = (chunk * HV + i_h + i * HV) * C
                b_k = k_rows.load([low, i_k * stride_k_head])
                b_v = v_rows.load([low, i_h * stride_v_head + first_v])
                b_x = solved_rows.load([block, 0])
                b_q = q_rows.load([low, i_k * stride_q_head])
                b_a = attn_rows.load([block, 0])
            else:
                b_k = tl.load(k + start * stride_k_token + k_tile)
                b_v = tl.load(v + start * stride_v_token + v_tile)
                b_x = tl.load(solved + here * (C * C) + square)
                b_q = tl.load(q + start * stride_q_token + q_tile)
                b_a = tl.load(attn + here * (C * C) + square)
            b_kc = tl.load(k_coef + here * C + o_c)
            b_sc = tl.load(s_coef + here * C + o_c)
            b_qc = tl.load(q_coef + here * C + o_c)
            b_s, b_o = _advance(b_s, b_k, b_v, b_x, b_q, b_a, b_kc, b_sc, b_qc, fade, DOT)
            if COPY_ENGINE:
                to = i_h * V + first_v
                out_rows.store([row + i * C, to], tl.trans(b_o).to(out.dtype.element_ty))
            else:
                p_o = out + start * (HV * V) + out_tile
                tl.store(p_o, b_o.to(out.dtype.element_ty))
            fade = next_fade
        if rest > 0:
            here = place + whole * HV
            start = (row + whole * C).to(tl.int64)
            inside = o_c < rest
            b_k = tl.load(k + start * stride_k_token + k_tile, mask=inside[:, None], other=0.0)
            b_v = tl.load(v + start * stride_v_token + v_tile, mask=inside[:, None], other=0.0)
            b_q = tl.load(q + start * stride_q_token + q_tile, mask=inside[:, None], other=0.0)
            b_x = tl.load(solved + here * (C * C) + square)
            b_a = tl.load(attn + here * (C * C) + square)
            b_kc = tl.load(k_coef + here * C + o_c)
            b_sc = tl.load(s_coef + here * C + o_c)
            b_qc = tl.load(q_coef + here * C + o_c)
            b_s, b_o = _advance(b_s, b_k, b_v, b_x, b_q, b_a, b_kc, b_sc, b_qc, fade, DOT)
            p_o = out + start * (HV * V) + out_tile
            tl.store(p_o, b_o.to(out.dtype.element_ty), mask=inside[None, :])
            whole += 1
        stored = (dest >= 0) & (dest < num_slots)
        tl.store(p_state + dest * stride_slot, b_s.to(pool.dtype.element_ty), mask=stored)
        chunk += whole
        row = stop
        stop = end
        dest = slot
