"""Triton kernels of routing and of the ordered sum."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def route_kernel(
    p_logits,
    p_weights,
    p_chosen,
    stride_logits,
    num_experts,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    RENORMALISE: tl.constexpr,
):
    """Softmax of one row and its TOP_K largest, the lowest id first at a tie. Grid (rows,).

    Where there is no largest share, because a logit is NaN or infinite, nothing is chosen: -1.
    """
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    inside = expert < num_experts
    logit = tl.load(p_logits + row * stride_logits + expert, mask=inside, other=float("-inf"))
    logit = logit.to(tl.float32)
    share = tl.exp(logit - tl.max(logit, 0))
    share = tl.where(inside, share / tl.sum(share, 0), -1.0)
    rank = tl.arange(0, BLOCK_K)
    weights = tl.zeros([BLOCK_K], tl.float32)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    for i in tl.static_range(TOP_K):
        best = tl.max(share, 0)
        at = tl.argmax(share, 0, tie_break_left=True)
        at = tl.where(best >= 0.0, at, -1)
        weights = tl.where(rank == i, best, weights)
        chosen = tl.where(rank == i, at, chosen)
        share = tl.where(expert == at, -1.0, share)
    if RENORMALISE:
        weights = weights / tl.sum(weights, 0)
    p_to = row * TOP_K + rank
    tl.store(p_weights + p_to, weights.to(p_weights.dtype.element_ty), mask=rank < TOP_K)
    tl.store(p_chosen + p_to, chosen, mask=rank < TOP_K)


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
):
    """sum_j w_j part_j in the router's order, then sigmoid(gate) * shared. Grid (rows, column blocks)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    b_acc = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        pair = row * TOP_K + i
        live = tl.load(p_chosen + pair) >= 0
        weight = tl.load(p_weights + pair).to(tl.float32)
        part = tl.load(p_parts + pair * stride_parts + column, mask=inside & live, other=0.0)
        b_acc += tl.where(live, weight, 0.0) * part.to(tl.float32)
    if HAS_SHARED:
        gate = tl.load(p_gate + row * stride_gate).to(tl.float32)
        shared = tl.load(p_shared + row * stride_shared + column, mask=inside, other=0.0)
        b_acc += shared.to(tl.float32) / (1.0 + tl.exp(-gate))
    tl.store(p_out + row * stride_out + column, b_acc.to(p_out.dtype.element_ty), mask=inside)
