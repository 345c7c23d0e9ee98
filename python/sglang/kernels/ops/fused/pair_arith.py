"""Arithmetic of rows in fewer instructions, with the bits of the plain forms.

Row kernels of prompts are bound by instructions, not by bytes: an exact division is a dozen of them, one
conversion to bf16 has a quarter of the rate of a paired one. PAIRED (compute capability 9.0, bf16 rows)
selects the short forms; without it each function is the plain form.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.kernels.ops.quantization.group_quant import quantize_groups


@triton.jit
def widen(x, PAIRED: tl.constexpr):
    """bf16 values in fp32, one instruction each."""
    if PAIRED:
        bits = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [x],
            dtype=tl.int32,
            is_pure=True,
            pack=2,
        )
        return bits.to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def round_to(x, dtype: tl.constexpr, PAIRED: tl.constexpr):
    """fp32 values rounded to ``dtype`` and back in fp32; PAIRED: ``dtype`` is bf16."""
    if PAIRED:
        bits = tl.inline_asm_elementwise(
            "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; "
            "shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000; }",
            "=r,=r,f,f",
            [x],
            dtype=tl.int32,
            is_pure=True,
            pack=2,
        )
        return bits.to(tl.float32, bitcast=True)
    return x.to(dtype).to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr, PAIRED: tl.constexpr):
    """What ``round_to`` made, as ``dtype``."""
    if PAIRED:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7632;",
            "=r,r,r",
            [x.to(tl.int32, bitcast=True)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    return x.to(dtype)


@triton.jit
def over_one_plus_exp(x, gate, PAIRED: tl.constexpr):
    """x / (1 + exp(-gate)).

    The plain division quarters both sides of a denominator above 2^126, lest its reciprocal be flushed;
    the short form does so always, which changes no bit: powers of two are exact, x being bf16 or 1. A
    subnormal exponential vanishes beside the 1, so it may be flushed.
    """
    if PAIRED:
        quartered = tl.fma(_exp2(gate * -1.4426950216293335), 0.25, 0.25)
        return x * 0.25 * _reciprocal(quartered)
    return x / (1.0 + tl.exp(-gate))


@triton.jit
def _exp2(x):
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _reciprocal(x):
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def quantize_pairs(x, PAIRED: tl.constexpr):
    """``quantize_groups`` of rows that hold bf16 values.

    A quotient is the product with the scale's reciprocal in two parts, which rounds as the division does
    for every pair of bf16 values (the tests try them all). The first part is rounded down, so that the
    second is not negative and -0 keeps its sign. Scales are brought near 1 by a power of two, where no
    part is subnormal.
    """
    if not PAIRED:
        return quantize_groups(x)
    largest = tl.max(tl.abs(x), 1)
    scale = tl.where(largest > 0.0, tl.div_rn(largest, tl.zeros_like(largest) + 448.0), 1.0)
    shift = tl.where(scale < 8.673617379884035e-19, 1.8446744073709552e19, 1.0)
    shift = tl.where(scale > 1.152921504606847e18, 5.421010862427522e-20, shift)
    first, second = reciprocal_parts(scale * shift)
    shifted = x * shift[:, None]
    scaled = tl.fma(shifted, tl.zeros_like(x) + first[:, None], shifted * second[:, None])
    return tl.maximum(scaled, -448.0), scale


@triton.jit
def reciprocal_parts(scale):
    """(1 / scale, at most 3 units of the last place too small; what is missing) of normal scale > 0.

    Both are 0 for infinity. The approximation is good to one unit.
    """
    bits = _reciprocal(scale).to(tl.int32, bitcast=True) - 2
    first = tl.maximum(bits, 0).to(tl.float32, bitcast=True)
    second = tl.fma(-scale, first, tl.zeros_like(scale) + 1.0) * first
    return first, tl.where(first > 0.0, second, 0.0)
