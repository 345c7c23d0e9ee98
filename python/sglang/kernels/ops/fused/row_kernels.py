"""Triton kernels of row-wise operations; all arithmetic in fp32, one rounding at the end."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    p_x,
    p_delta,
    p_weight,
    p_sum,
    p_out,
    stride_x,
    stride_delta,
    stride_sum,
    stride_out,
    size,
    eps,
    UNIT_OFFSET: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = norm(x), or sum = x + delta rounded to its dtype and out = norm(sum). Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    x = tl.load(p_x + row * stride_x + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        delta = tl.load(p_delta + row * stride_delta + column, mask=inside, other=0.0)
        rounded = (x + delta.to(tl.float32)).to(p_sum.dtype.element_ty)
        tl.store(p_sum + row * stride_sum + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    weight = tl.load(p_weight + column, mask=inside, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        weight += 1.0
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / size + eps) * weight
    tl.store(p_out + row * stride_out + column, normed.to(p_out.dtype.element_ty), mask=inside)


@triton.jit
def gated_norm_kernel(
    p_o,
    p_z,
    p_weight,
    p_out,
    stride_ot,
    stride_oh,
    stride_zt,
    stride_zh,
    num_heads,
    size,
    eps,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """norm(o) * weight * act(z) of one head of one row; out is contiguous. Grid (rows, heads)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < size
    o = tl.load(p_o + row * stride_ot + head * stride_oh + column, mask=inside, other=0.0)
    z = tl.load(p_z + row * stride_zt + head * stride_zh + column, mask=inside, other=0.0)
    o = o.to(tl.float32)
    z = z.to(tl.float32)
    weight = tl.load(p_weight + column, mask=inside, other=0.0).to(tl.float32)
    gate = 1.0 / (1.0 + tl.exp(-z))
    if SILU:
        gate *= z
    gated = o * tl.rsqrt(tl.sum(o * o, 0) / size + eps) * weight * gate
    p_to = p_out + (row * num_heads + head) * size + column
    tl.store(p_to, gated.to(p_out.dtype.element_ty), mask=inside)


@triton.jit
def norm_rope_kernel(
    p_x,
    p_weight,
    p_cos,
    p_sin,
    p_positions,
    p_out,
    stride_xt,
    stride_xh,
    num_heads,
    size,
    half,
    eps,
    UNIT_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Norm of one head, rounded, then rotation of its first 2 * half dims. Grid (rows, heads)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < size
    rotated = column < 2 * half
    partner = tl.where(column < half, column + half, column - half)
    partner = tl.where(rotated, partner, column)
    p_row = p_x + row * stride_xt + head * stride_xh
    x = tl.load(p_row + column, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(p_row + partner, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(p_weight + column, mask=inside, other=0.0).to(tl.float32)
    other_weight = tl.load(p_weight + partner, mask=inside, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        weight += 1.0
        other_weight += 1.0
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    x = (x * scale * weight).to(p_out.dtype.element_ty).to(tl.float32)
    other = (other * scale * other_weight).to(p_out.dtype.element_ty).to(tl.float32)
    position = tl.load(p_positions + row)
    at = position * half + tl.where(column < half, column, column - half)
    cos = tl.load(p_cos + at, mask=rotated, other=1.0)
    sin = tl.load(p_sin + at, mask=rotated, other=0.0)
    turned = x * cos + tl.where(column < half, -other, other) * sin
    p_to = p_out + (row * num_heads + head) * size + column
    tl.store(p_to, turned.to(p_out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_kernel(p_both, p_out, stride_both, size, BLOCK: tl.constexpr):
    """silu(first half) * second half. Grid (rows, column blocks)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(p_both + row * stride_both + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(p_both + row * stride_both + size + column, mask=inside, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(p_out + row * size + column, product.to(p_out.dtype.element_ty), mask=inside)


@triton.jit
def sigmoid_mul_kernel(
    p_x, p_gate, p_out, stride_xt, stride_xh, stride_gt, stride_gh, num_heads, size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """x * sigmoid(gate) of one head of one row; out is contiguous. Grid (rows, heads)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < size
    x = tl.load(p_x + row * stride_xt + head * stride_xh + column, mask=inside, other=0.0)
    gate = tl.load(p_gate + row * stride_gt + head * stride_gh + column, mask=inside, other=0.0)
    product = x.to(tl.float32) / (1.0 + tl.exp(-gate.to(tl.float32)))
    p_to = p_out + (row * num_heads + head) * size + column
    tl.store(p_to, product.to(p_out.dtype.element_ty), mask=inside)
