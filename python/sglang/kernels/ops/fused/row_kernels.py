"""Triton kernels of row-wise operations; all arithmetic in fp32, one rounding at the end.

Where a kernel can quantise, it quantises the rounded result, so that its FP8 rows are those of the two
launches it stands for. A tile is [groups of 128 columns, 128] with and without that, so both sum alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.kernels.launch_overlap_kernels import after_previous
from sglang.kernels.ops.fused.pair_arith import narrow, quantize_pairs, round_to, widen
from sglang.kernels.ops.fused.sum_kernels import routed_sum, split_sum


@triton.jit
def store_quantized(
    p_q,
    p_scale,
    x,
    offsets,
    inside,
    group_ok,
    AS_WIDE_AS: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """Quantise x [groups, width] fp32 and store it.

    A thread stores as many elements as it loads of type AS_WIDE_AS: wider stores would pull the tile into
    another layout, in which sums before this one add in another order than without it.
    """
    WIDTH: tl.constexpr = 128 // AS_WIDE_AS.primitive_bitwidth
    scaled, scale = quantize_pairs(x, PAIRED)
    p_to = tl.max_contiguous(p_q + offsets, (1, WIDTH))
    tl.store(p_to, scaled.to(p_q.dtype.element_ty), mask=inside)
    tl.store(p_scale, scale, mask=group_ok)


@triton.jit
def rms_norm_kernel(
    p_x,
    p_delta,
    p_weight,
    p_sum,
    p_out,
    p_q,
    p_scale,
    p_weights,
    p_chosen,
    p_shared,
    p_gate,
    stride_x,
    stride_delta,
    stride_split,
    stride_shared,
    stride_gate,
    stride_sum,
    stride_out,
    stride_q,
    stride_scale,
    size,
    eps,
    DELTA: tl.constexpr,
    COUNT: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    PLAIN: tl.constexpr,
    QUANTIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    GROUP: tl.constexpr,
    PAIRED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out = norm(x), or sum = x + delta rounded to its dtype and out = norm(sum). Grid (rows,).

    DELTA: "none", "tensor", "split" (COUNT parts) or "routed" (COUNT experts a row); a delta in parts is
    rounded when it is whole. PLAIN stores out, QUANTIZE its e4m3 form and scales; out's dtype decides the
    rounding either way.
    """
    after_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_G)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < size
    x = widen(tl.load(p_x + row * stride_x + column, mask=inside, other=0.0), PAIRED)
    if DELTA != "none":
        if DELTA == "tensor":
            delta = tl.load(p_delta + row * stride_delta + column, mask=inside, other=0.0)
            delta = widen(delta.to(p_sum.dtype.element_ty), PAIRED)
        else:
            if DELTA == "split":
                delta = split_sum(p_delta, row, column, inside, stride_split, stride_delta, COUNT)
            else:
                delta = routed_sum(
                    p_delta,
                    p_weights,
                    p_chosen,
                    p_shared,
                    p_gate,
                    row,
                    column,
                    inside,
                    stride_delta,
                    stride_shared,
                    stride_gate,
                    COUNT,
                    HAS_SHARED,
                )
            delta = round_to(delta, p_sum.dtype.element_ty, PAIRED)
        x = round_to(x + delta, p_sum.dtype.element_ty, PAIRED)
        total = narrow(x, p_sum.dtype.element_ty, PAIRED)
        tl.store(p_sum + row * stride_sum + column, total, mask=inside)
    weight = tl.load(p_weight + column, mask=inside, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        weight += 1.0
    squares = tl.sum(tl.sum(x * x, 1), 0)
    x = x * tl.rsqrt(squares / size + eps) * weight
    rounded = round_to(x, p_out.dtype.element_ty, PAIRED)
    if PLAIN:
        p_to = p_out + row * stride_out + column
        tl.store(p_to, narrow(rounded, p_out.dtype.element_ty, PAIRED), mask=inside)
    if QUANTIZE:
        p_to = p_scale + row * stride_scale + group
        at, group_ok = row * stride_q + column, group * GROUP < size
        x_type: tl.constexpr = p_x.dtype.element_ty
        store_quantized(p_q, p_to, rounded, at, inside, group_ok, x_type, PAIRED)


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
    OVERLAP: tl.constexpr,
):
    """Norm of one head, rounded, then rotation of its first 2 * half dims. Grid (rows, heads)."""
    after_previous(OVERLAP)
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
