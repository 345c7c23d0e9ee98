"""Mixture of experts on a GPU, in the activations' dtype or in block-scaled FP8."""

from __future__ import annotations

import torch
from torch import nn

from sglang.kernels.ops.fused.narrow import narrow_linear
from sglang.kernels.ops.fused.sums import RoutedSum
from sglang.kernels.ops.moe.experts import run_experts
from sglang.kernels.ops.moe.route import route
from sglang.kernels.ops.quantization.rows import FP8_DTYPE, NormedRows, num_groups
from sglang.srt.layers.layernorm import RowForm
from sglang.srt.layers.linear import Linear
from sglang.srt.layers.mlp import DenseMLP

_ROUTER_ROWS = 8
"""The router's rows come in multiples: results of 257 columns would have rows that start unaligned."""


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


class GpuSparseMoE(nn.Module):
    """What ``SparseMoE`` computes, in six launches where the shared expert has the others' size.

    router         rows: one an expert, then the shared expert's gate, then zeros
    experts        the routed ones, then the shared one if ``shared_expert`` is None
    shared_expert  a gated MLP of another size than the experts
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        intermediate_size: int,
        shared_intermediate_size: int,
        norm_topk_prob: bool,
        device: torch.device,
        dtype: torch.dtype,
        fp8: bool = False,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.top_k = top_k
        self.norm_topk_prob = norm_topk_prob
        self.reads = RowForm.PLAIN | RowForm.QUANTIZED if fp8 else RowForm.PLAIN
        router_rows = -(-(num_experts + 1) // _ROUTER_ROWS) * _ROUTER_ROWS
        self.router = Linear(hidden_size, router_rows, device=device, dtype=dtype)
        joins = shared_intermediate_size == intermediate_size
        self.experts = GpuExperts(
            num_experts + joins,
            hidden_size,
            intermediate_size,
            device=device,
            dtype=dtype,
            fp8=fp8,
        )
        self.shared_expert: DenseMLP | None = None
        if not joins:
            self.shared_expert = DenseMLP(
                hidden_size, shared_intermediate_size, device=device, dtype=dtype, fp8=fp8
            )

    def forward(self, x: NormedRows) -> RoutedSum:
        """[T, H] -> parts of [T, H]."""
        scores = narrow_linear(x.as_plain(), self.router.weight)
        count = self.num_experts
        logits, gate = scores[:, :count], scores[:, count : count + 1]
        weights, chosen = route(logits, self.top_k, renormalise=self.norm_topk_prob)
        experts, rows = self.experts, x.best()
        return run_experts(
            rows,
            weights,
            chosen,
            experts.gate_up,
            experts.down,
            gate_up_scale=experts.gate_up_scale,
            down_scale=experts.down_scale,
            shared=None if self.shared_expert is None else self.shared_expert(rows),
            shared_gate=gate,
            last_is_shared=self.shared_expert is None,
        )
