"""One gated-delta-rule step on a register tile: the only place where its arithmetic is written.

Decode, both verify modes (chain and tree) and the replay of recorded tuples call these helpers, so they
cannot round differently. Rounding order: docs/numerics.md.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded_mul(a, b, PTX: tl.constexpr):
    """a*b rounded to fp32 by itself; no compiler may fold it into a later addition."""
    if PTX:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return a * b


@triton.jit
def fused_mul_add(a, b, c, PTX: tl.constexpr):
    """a*b+c with one rounding."""
    if PTX:
        return tl.inline_asm_elementwise(
            "fma.rn.f32 $0, $1, $2, $3;",
            "=f,f,f,f",
            [a, b, c],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.fma(a, b, c)


@triton.jit
def decay_factor(log_decay, PTX: tl.constexpr):
    """exp(log_decay); on NVIDIA the exact instruction pair that the CUDA C++ kernel uses."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; mul.rn.f32 t, $1, 0f3FB8AA3B; ex2.approx.f32 $0, t; }",
            "=f,f",
            [log_decay],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.exp(log_decay)


@triton.jit
def apply_update(b_h, decay, b_k, b_u, PTX: tl.constexpr):
    """State tile [BV, BK] after the step with decay scalar, key [BK] and update [BV]."""
    factor = tl.zeros_like(b_h) + decay
    b_decayed = rounded_mul(b_h, factor, PTX)
    b_key = tl.broadcast_to(b_k[None, :], b_h.shape)
    b_update = tl.broadcast_to(b_u[:, None], b_h.shape)
    return fused_mul_add(b_key, b_update, b_decayed, PTX)


@triton.jit
def delta_step(b_h, log_decay, beta, b_q, b_k, b_v, PTX: tl.constexpr):
    """One step. Returns (new state [BV, BK], update u [BV], output [BV]); all fp32."""
    decay = decay_factor(log_decay, PTX)
    factor = tl.zeros_like(b_h) + decay
    b_decayed = rounded_mul(b_h, factor, PTX)
    b_seen = tl.sum(b_decayed * b_k[None, :], axis=1)
    b_u = (b_v - b_seen) * beta
    b_key = tl.broadcast_to(b_k[None, :], b_h.shape)
    b_update = tl.broadcast_to(b_u[:, None], b_h.shape)
    b_new = fused_mul_add(b_key, b_update, b_decayed, PTX)
    b_o = tl.sum(b_new * b_q[None, :], axis=1)
    return b_new, b_u, b_o


@triton.jit
def gate_values(p_a, p_b, a_log, dt_bias, SOFTPLUS_BETA, SOFTPLUS_THRESHOLD):
    """(log decay, beta) of one token and value head from the raw a and b; fp32."""
    x = tl.load(p_a).to(tl.float32) + dt_bias
    scaled = SOFTPLUS_BETA * x
    soft = tl.where(
        scaled <= SOFTPLUS_THRESHOLD, (1.0 / SOFTPLUS_BETA) * tl.log(1.0 + tl.exp(scaled)), x
    )
    log_decay = -tl.exp(a_log) * soft
    beta = 1.0 / (1.0 + tl.exp(-tl.load(p_b).to(tl.float32)))
    return log_decay, beta
