"""Mixture of experts with softmax routing and one gated shared expert, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sglang.kernels.ops.cpu import gemm
from sglang.srt.layers.linear import Linear, padded_rows, padded_storage, plain_linear
from sglang.srt.layers.mlp import DenseMLP


class Experts(nn.Module):
    """Routed experts, each a gated MLP.

    gate_up  [E, 2I, H], gate rows first; down  [E, H, I]; both views of padded storage on the CPU.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.gate_up_storage = _per_expert(
            num_experts, 2 * intermediate_size, hidden_size, device=device, dtype=dtype
        )
        self.down_storage = _per_expert(
            num_experts, hidden_size, intermediate_size, device=device, dtype=dtype
        )
        self.gate_up = nn.Parameter(
            self.gate_up_storage[:, : 2 * intermediate_size], requires_grad=False
        )
        self.down = nn.Parameter(self.down_storage[:, :hidden_size], requires_grad=False)
        self.packed = False

    def pack(self) -> None:
        """Reorder all experts in place for the CPU kernels."""
        if not self.packed:
            for storage in (self.gate_up_storage, self.down_storage):
                for expert in storage:
                    gemm.pack_inplace(expert)
            self.packed = True

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x [T, H], weights and chosen expert ids [T, top_k] -> weighted sum [T, H].

        Every row adds its experts in the order of ``chosen``, so it does not depend on other rows.
        """
        top_k = chosen.shape[1]
        parts = x.new_empty((x.shape[0], top_k, self.hidden_size))
        for expert in torch.unique(chosen).tolist():
            rows, ranks = torch.nonzero(chosen == expert, as_tuple=True)
            parts[rows, ranks] = self._one_expert(expert, x[rows])
        out = parts[:, 0] * weights[:, 0:1]
        for rank in range(1, top_k):
            out = out + parts[:, rank] * weights[:, rank : rank + 1]
        return out

    def _one_expert(self, expert: int, x: Tensor) -> Tensor:
        both = self._linear(x, self.gate_up[expert], self.gate_up_storage[expert])
        gate, up = both.split(self.intermediate_size, dim=-1)
        return self._linear(F.silu(gate) * up, self.down[expert], self.down_storage[expert])

    def _linear(self, x: Tensor, weight: Tensor, storage: Tensor) -> Tensor:
        if self.packed:
            return gemm.packed_linear(x, storage, weight.shape[0])
        return plain_linear(x, weight)


def _per_expert(
    num_experts: int, rows: int, cols: int, *, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """[E, rows padded to whole panels on the CPU, cols]."""
    padded = padded_rows(rows, device)
    flat = padded_storage(num_experts * padded, cols, device=device, dtype=dtype)
    return flat.view(num_experts, padded, cols)


class SparseMoE(nn.Module):
    """Softmax over all experts, top-k, plus ``sigmoid(gate x) * shared_expert(x)``."""

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
        """Raises: ValueError for ``fp8``, which the CPU has no product for."""
        super().__init__()
        if fp8:
            raise ValueError(f"experts on {device} cannot stay FP8: load them dequantised")
        self.top_k = top_k
        self.norm_topk_prob = norm_topk_prob
        self.gate = Linear(hidden_size, num_experts, device=device, dtype=dtype)
        self.experts = Experts(
            num_experts, hidden_size, intermediate_size, device=device, dtype=dtype
        )
        self.shared_expert = DenseMLP(
            hidden_size, shared_intermediate_size, device=device, dtype=dtype
        )
        self.shared_expert_gate = Linear(hidden_size, 1, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        probs = torch.softmax(self.gate(x).float(), dim=-1)
        weights, chosen = torch.topk(probs, self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        routed = self.experts(x, weights.to(x.dtype), chosen)
        return routed + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
