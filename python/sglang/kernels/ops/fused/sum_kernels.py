"""Triton kernels and pieces that add up what a layer's last product left in parts."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.kernels.launch_overlap_kernels import after_previous


@triton.jit
def routed_sum(
    p_parts,
    p_weights,
    p_chosen,
    p_shared,
    p_gate,
    row,
    column,
    inside,
    stride_parts,
    stride_shared,
    stride_gate,
    TOP_K: tl.constexpr,
    HAS_SHARED: tl.constexpr,
):
    """sum_j w_j part_j in the router's order, then sigmoid(gate) * shared, of one row's columns in fp32."""
    b_acc = tl.zeros(column.shape, tl.float32)
    for i in tl.static_range(TOP_K):
        pair = row * TOP_K + i
        # A part of no expert is read and dropped: a load that waited for the choice would cost a round trip.
        live = tl.load(p_chosen + pair) >= 0
        weight = tl.load(p_weights + pair).to(tl.float32)
        part = tl.load(p_parts + pair * stride_parts + column, mask=inside, other=0.0)
        b_acc += tl.where(live, weight, 0.0) * tl.where(live, part.to(tl.float32), 0.0)
    if HAS_SHARED:
        gate = tl.load(p_gate + row * stride_gate).to(tl.float32)
        shared = tl.load(p_shared + row * stride_shared + column, mask=inside, other=0.0)
        b_acc += shared.to(tl.float32) / (1.0 + tl.exp(-gate))
    return b_acc


@triton.jit
def split_sum(p_parts, row, column, inside, stride_split, stride_row, SPLITS: tl.constexpr):
    """sum of SPLITS fp32 parts of one row's columns, in ascending order."""
    b_acc = tl.zeros(column.shape, tl.float32)
    for i in tl.static_range(SPLITS):
        p_from = p_parts + i * stride_split + row * stride_row + column
        b_acc += tl.load(p_from, mask=inside, other=0.0)
    return b_acc


@triton.jit
def combine_kernel(
    p_parts,
    p_weights,
    p_chosen,
    p_shared,
    p_gate,
    p_out,
    stride_parts,
    stride_shared,
    stride_gate,
    stride_out,
    num_columns,
    TOP_K: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``routed_sum`` of one row, rounded. Grid (rows, column blocks)."""
    after_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    b_acc = routed_sum(
        p_parts,
        p_weights,
        p_chosen,
        p_shared,
        p_gate,
        row,
        column,
        inside,
        stride_parts,
        stride_shared,
        stride_gate,
        TOP_K,
        HAS_SHARED,
    )
    tl.store(p_out + row * stride_out + column, b_acc.to(p_out.dtype.element_ty), mask=inside)


@triton.jit
def split_sum_kernel(
    p_parts,
    p_out,
    stride_split,
    stride_row,
    stride_out,
    num_columns,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``split_sum`` of one row, rounded. Grid (rows, column blocks)."""
    after_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    b_acc = split_sum(p_parts, row, column, inside, stride_split, stride_row, SPLITS)
    tl.store(p_out + row * stride_out + column, b_acc.to(p_out.dtype.element_ty), mask=inside)
