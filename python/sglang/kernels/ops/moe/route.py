"""Which experts serve a row, and how much each counts."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.kernels import triton_support
from sglang.kernels.launch_overlap import overlapping

if triton_support.AVAILABLE:
    from sglang.kernels.ops.moe.moe_kernels import route_kernel


def next_power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def route(logits: Tensor, top_k: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Softmax over all experts in fp32, then the ``top_k`` largest, largest first.

    logits [T, E], rows of any stride. Returns weights [T, top_k] in logits' dtype, which sum to 1 if
    ``renormalise``, and chosen [T, top_k] int32; at a tie the lower id comes first.
    """
    num_rows, num_experts = logits.shape
    weights = torch.empty((num_rows, top_k), dtype=logits.dtype, device=logits.device)
    chosen = torch.empty((num_rows, top_k), dtype=torch.int32, device=logits.device)
    if num_rows:
        route_kernel[(num_rows,)](
            logits,
            weights,
            chosen,
            logits.stride(0),
            num_experts,
            TOP_K=top_k,
            BLOCK_K=next_power_of_two(top_k),
            BLOCK_E=next_power_of_two(num_experts),
            RENORMALISE=renormalise,
            **overlapping(logits),
            num_warps=1 if num_experts <= 256 else 4,
        )
    return weights, chosen
