"""Gated MLP: ``down(silu(gate x) * up x)``."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sglang.srt.layers.linear import Linear


class DenseMLP(nn.Module):
    """``gate_up`` holds the gate's rows, then the up projection's."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.intermediate_size = intermediate_size
        self.gate_up = Linear(
            hidden_size,
            2 * intermediate_size,
            device=device,
            dtype=dtype,
        )
        self.down = Linear(
            intermediate_size,
            hidden_size,
            device=device,
            dtype=dtype,
        )

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        gate, up = self.gate_up(x).split(self.intermediate_size, dim=-1)
        return self.down(F.silu(gate) * up)
