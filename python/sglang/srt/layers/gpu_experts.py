"""Routed experts on a GPU, in the activations' dtype or in block-scaled FP8."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sglang.kernels.ops.moe.experts import run_experts
from sglang.kernels.ops.moe.route import route
from sglang.kernels.ops.quantization.fp8 import FP8_DTYPE, num_groups


class GpuExperts(nn.Module):
    """gate_up [E, 2I, H], gate rows first; down [E, H, I].

    With ``fp8`` both are e4m3 and ``gate_up_scale`` [E, ceil(2I/128), ceil(H/128)], ``down_scale``
    [E, ceil(H/128), ceil(I/128)] fp32 scale their blocks; otherwise the scales are None.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        fp8: bool,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        shapes = {
            "gate_up": (num_experts, 2 * intermediate_size, hidden_size),
            "down": (num_experts, hidden_size, intermediate_size),
        }
        made: dict[str, nn.Parameter | None] = {}
        for name, shape in shapes.items():
            weight = torch.zeros(shape, dtype=FP8_DTYPE if fp8 else dtype, device=device)
            made[name] = nn.Parameter(weight, requires_grad=False)
            scale = None
            if fp8:
                grid = (num_experts, num_groups(shape[1]), num_groups(shape[2]))
                scale = nn.Parameter(torch.ones(grid, device=device), requires_grad=False)
            made[f"{name}_scale"] = scale
        self.gate_up, self.down = made["gate_up"], made["down"]
        self.gate_up_scale, self.down_scale = made["gate_up_scale"], made["down_scale"]

    def forward(
        self,
        x: Tensor,
        logits: Tensor,
        *,
        top_k: int,
        renormalise: bool,
        shared: Tensor,
        shared_gate: Tensor,
    ) -> Tensor:
        """Routed sum plus ``sigmoid(shared_gate) * shared``; x, shared [T, H], logits [T, E], gate [T, 1]."""
        weights, chosen = route(logits, top_k, renormalise=renormalise)
        return run_experts(
            x,
            weights,
            chosen,
            self.gate_up,
            self.down,
            gate_up_scale=self.gate_up_scale,
            down_scale=self.down_scale,
            shared=shared,
            shared_gate=shared_gate,
        )
