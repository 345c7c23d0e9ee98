"""The Triton kernel of routing."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.kernels.launch_overlap_kernels import after_previous


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
    OVERLAP: tl.constexpr,
):
    """Softmax of one row and its TOP_K largest, the lowest id first at a tie. Grid (rows,).

    Where there is no largest share, because a logit is NaN or infinite, nothing is chosen: -1.
    """
    after_previous(OVERLAP)
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
