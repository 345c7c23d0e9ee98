"""The arithmetic of quantising one group, shared by every kernel that writes FP8 rows."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.kernels import triton_support

ROUND_FIRST: tl.constexpr = tl.constexpr(triton_support.INTERPRETING)
"""The interpreter's own cast to e4m3 drops the carry of a mantissa; there, values are rounded before it."""

MAGNITUDE: tl.constexpr = tl.constexpr(448.0)
"""Largest e4m3 value."""


@triton.jit
def round_to_e4m3(x):
    """fp32 values on e4m3's grid, half to even: 3 bits of mantissa, steps of 2^-9 below 2^-6."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    small = (x + 24576.0) - 24576.0
    return tl.where(tl.abs(x) < 0.015625, small, bits.to(tl.float32, bitcast=True))


@triton.jit
def silu_product(gate, up):
    """silu(gate) * up of fp32 values."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def quantize_groups(x):
    """(x / scale of its group, fp32, ready to be cast to e4m3; scale) of x [groups, width] fp32.

    scale is max|x| / 448, and 1 for a group of zeros.
    """
    largest = tl.max(tl.abs(x), 1)
    scale = tl.where(largest > 0.0, tl.div_rn(largest, tl.zeros_like(largest) + MAGNITUDE), 1.0)
    scaled = tl.div_rn(x, tl.zeros_like(x) + scale[:, None])
    scaled = tl.minimum(tl.maximum(scaled, -MAGNITUDE), MAGNITUDE)
    if ROUND_FIRST:
        scaled = round_to_e4m3(scaled)
    return scaled, scale
