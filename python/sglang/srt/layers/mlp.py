"""Gated MLP: ``down(silu(gate x) * up x)``."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sglang.kernels import triton_support
from sglang.kernels.ops.fused.rows import silu_mul
from sglang.srt.layers.fp8_linear import make_linear


class DenseMLP(nn.Module):
    """``gate_up`` holds the gate's rows, then the up projection's."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        fp8: bool = False,
    ) -> None:
        super().__init__()
        self.intermediate_size = intermediate_size
        self.gate_up = make_linear(
            hidden_size,
            2 * intermediate_size,
            device=device,
            dtype=dtype,
            fp8=fp8,
        )
        self.down = make_linear(
            intermediate_size,
            hidden_size,
            device=device,
            dtype=dtype,
            fp8=fp8,
        )

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        both = self.gate_up(x)
        if triton_support.runs_on(both):
            return self.down(silu_mul(both))
        gate, up = both.split(self.intermediate_size, dim=-1)
        return self.down(F.silu(gate) * up)
