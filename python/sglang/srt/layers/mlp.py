"""Gated MLP: ``down(silu(gate x) * up x)``."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sglang.kernels import triton_support
from sglang.kernels.ops.fused.rows import silu_mul, silu_mul_quantized
from sglang.kernels.ops.fused.sums import Delta, total_of
from sglang.kernels.ops.quantization.fp8 import can_gate
from sglang.kernels.ops.quantization.rows import QuantizedRows
from sglang.srt.layers.fp8_linear import FP8Linear, make_linear


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

    def forward(self, x: Tensor | QuantizedRows) -> Tensor:
        """[T, H] -> [T, H]; FP8 rows only where the weights are FP8."""
        return total_of(self.in_parts(x))

    def in_parts(self, x: Tensor | QuantizedRows) -> Delta:
        """``forward`` for a reader that can add parts."""
        if isinstance(self.gate_up, FP8Linear) and isinstance(self.down, FP8Linear):
            if can_gate(self.intermediate_size):
                return self.down.in_parts(self.gate_up.gated(x))
            return self.down.in_parts(silu_mul_quantized(self.gate_up(x)))
        both = self.gate_up(x)
        if triton_support.runs_on(both):
            return self.down(silu_mul(both))
        gate, up = both.split(self.intermediate_size, dim=-1)
        return self.down(F.silu(gate) * up)
