"""Triton kernels of the gated norm and the gates; all arithmetic in fp32, one rounding at the end.

They are bound by instructions: heads and widths are constants, so that items need no division at run
time, and PAIRED selects the short forms of `pair_arith`, which change no bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.kernels.launch_overlap_kernels import after_previous
from sglang.kernels.ops.fused.pair_arith import over_one_plus_exp, round_to, widen
from sglang.kernels.ops.fused.row_kernels import store_quantized


@triton.jit(do_not_specialize=("num_items",))
def gated_norm_kernel(
    p_o,
    p_z,
    p_weight,
    p_out,
    p_scale,
    stride_ot,
    stride_oh,
    stride_zt,
    stride_zh,
    num_items,
    eps,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SILU: tl.constexpr,
    QUANTIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """norm(o) * weight * act(z), rounded to z's dtype; BLOCK_H heads of consecutive rows a program.

    out is contiguous; with QUANTIZE it is e4m3, and a head is one group (SIZE == BLOCK).
    """
    after_previous(OVERLAP)
    item = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    row, head = (item // NUM_HEADS).to(tl.int64), item % NUM_HEADS
    column = tl.arange(0, BLOCK)
    live = item < num_items
    inside = live[:, None] & (column < SIZE)[None, :]
    p_row = p_o + row * stride_ot + head * stride_oh
    o = tl.load(p_row[:, None] + column[None, :], mask=inside, other=0.0)
    p_row = p_z + row * stride_zt + head * stride_zh
    z = tl.load(p_row[:, None] + column[None, :], mask=inside, other=0.0)
    o, z = widen(o, PAIRED), widen(z, PAIRED)
    weight = tl.load(p_weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    gate = over_one_plus_exp(1.0, z, PAIRED)
    if SILU:
        gate *= z
    scale = tl.rsqrt(tl.sum(o * o, 1) / SIZE + eps)
    gated = o * scale[:, None] * weight[None, :] * gate
    at = item.to(tl.int64)[:, None] * SIZE + column[None, :]
    if QUANTIZE:
        gated = round_to(gated, p_z.dtype.element_ty, PAIRED)
        store_quantized(
            p_out, p_scale + item, gated, at, inside, live, p_z.dtype.element_ty, PAIRED
        )
    else:
        tl.store(p_out + at, gated.to(p_z.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=("num_items",))
def gate_mul_kernel(
    p_x,
    p_gate,
    p_out,
    p_scale,
    stride_xt,
    stride_xh,
    stride_gt,
    stride_gh,
    num_items,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SILU: tl.constexpr,
    QUANTIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    GROUP: tl.constexpr,
    PAIRED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """x * act(gate) rounded to x's dtype; BLOCK_G groups of 128 columns of one head a program.

    Items are groups, head by head and row by row. out is contiguous; with QUANTIZE it is e4m3 and SIZE a
    multiple of GROUP, or there is one head.
    """
    after_previous(OVERLAP)
    item = tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G)
    GROUPS: tl.constexpr = (SIZE + GROUP - 1) // GROUP
    row = (item // (GROUPS * NUM_HEADS)).to(tl.int64)
    head, start = item // GROUPS % NUM_HEADS, item % GROUPS * GROUP
    within = tl.arange(0, GROUP)
    live = item < num_items
    inside = live[:, None] & (start[:, None] + within[None, :] < SIZE)
    p_from = p_x + row * stride_xt + head * stride_xh + start
    x = tl.load(p_from[:, None] + within[None, :], mask=inside, other=0.0)
    p_from = p_gate + row * stride_gt + head * stride_gh + start
    gate = tl.load(p_from[:, None] + within[None, :], mask=inside, other=0.0)
    x, gate = widen(x, PAIRED), widen(gate, PAIRED)
    if SILU:
        product = over_one_plus_exp(gate, gate, PAIRED) * x
    else:
        product = over_one_plus_exp(x, gate, PAIRED)
    at = ((row * NUM_HEADS + head) * SIZE + start)[:, None] + within[None, :]
    if QUANTIZE:
        rounded = round_to(product, p_x.dtype.element_ty, PAIRED)
        store_quantized(
            p_out, p_scale + item, rounded, at, inside, live, p_x.dtype.element_ty, PAIRED
        )
    else:
        tl.store(p_out + at, product.to(p_x.dtype.element_ty), mask=inside)
