"""Triton kernels of the largest score of a row and where it is."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.kernels.launch_overlap_kernels import after_previous


@triton.jit
def keys_of(score, column):
    """int64 that order as (score, then the lower column); NaN is above everything, -0 equals 0."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(score != score, 0x7FFFFFFF, order)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)


@triton.jit
def largest_of_parts_kernel(
    p_scores, p_keys, stride_row, num_columns, share, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """keys[row, part] of ``share`` consecutive columns. Grid (rows, PARTS)."""
    after_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * share
    end = tl.minimum(start + share, num_columns)
    best = tl.full([BLOCK], -0x8000000000000000, tl.int64)
    for at in range(start, end, BLOCK):
        column = at + tl.arange(0, BLOCK)
        inside = column < end
        score = tl.load(p_scores + row * stride_row + column, mask=inside, other=0.0)
        key = keys_of(score.to(tl.float32), column)
        best = tl.maximum(best, tl.where(inside, key, -0x8000000000000000))
    tl.store(p_keys + row * PARTS + tl.program_id(1), tl.max(best, 0))


@triton.jit
def largest_part_kernel(p_keys, p_out, PARTS: tl.constexpr, OVERLAP: tl.constexpr):
    """The column of the largest of a row's keys. Grid (rows,)."""
    after_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    best = tl.max(tl.load(p_keys + row * PARTS + tl.arange(0, PARTS)), 0)
    tl.store(p_out + row, 0x7FFFFFFF - (best & 0xFFFFFFFF))
