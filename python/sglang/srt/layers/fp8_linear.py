"""Linear maps that keep the checkpoint's block-scaled FP8 weight and multiply in FP8."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sglang.kernels import triton_support
from sglang.kernels.ops.fused.narrow import narrow_linear
from sglang.kernels.ops.fused.sums import SplitSum
from sglang.kernels.ops.quantization.fp8 import (
    block_scaled_gated,
    block_scaled_linear,
    block_scaled_split,
)
from sglang.kernels.ops.quantization.launch import splits_pay
from sglang.kernels.ops.quantization.rows import (
    FP8_DTYPE,
    GROUP,
    NormedRows,
    QuantizedRows,
    num_groups,
)
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.linear import Linear


def keeps_fp8(config: ModelConfig, device: torch.device) -> bool:
    """Whether the quantised matrices of ``config`` stay FP8 there; elsewhere the loader dequantises.

    They do where Triton serves the device and blocks are 128 x 128.
    """
    quantization = config.quantization
    if quantization is None or quantization.weight_block_size != (GROUP, GROUP):
        return False
    return triton_support.runs_on(torch.empty(0, device=device))


class FP8Linear(nn.Module):
    """``y = x W^T + bias`` in x's dtype; x is quantised per row and 128-wide group, if it is not yet.

    weight        [out, in] e4m3
    weight_scale  [ceil(out / 128), ceil(in / 128)] fp32; the weight is ``weight * weight_scale`` of its block
    bias          [out] fp32 or None
    """

    def __init__(
        self, in_features: int, out_features: int, *, device: torch.device, bias: bool = False
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        weight = torch.zeros((out_features, in_features), dtype=FP8_DTYPE, device=device)
        scale = torch.ones((num_groups(out_features), num_groups(in_features)), device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.bias = (
            nn.Parameter(torch.zeros(out_features, device=device), requires_grad=False)
            if bias
            else None
        )

    def forward(self, x: Tensor | QuantizedRows) -> Tensor:
        """[T, in] -> [T, out]."""
        y = block_scaled_linear(x, self.weight, self.weight_scale)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def in_parts(self, x: Tensor | QuantizedRows) -> Tensor | SplitSum:
        """``forward`` for a reader that can add parts; the map has no bias."""
        if self.bias is None and splits_pay(x.shape[0], self.in_features):
            return SplitSum(block_scaled_split(x, self.weight, self.weight_scale), x.dtype)
        return self(x)

    def gated(self, x: Tensor | QuantizedRows) -> QuantizedRows:
        """``silu(first half) * second half`` of the result, [T, out / 2]; for maps without a bias."""
        return block_scaled_gated(x, self.weight, self.weight_scale)


class PartlyFP8Linear(nn.Module):
    """Rows of one projection of which the first ``quantized_rows`` are FP8 and the rest, a few, are not."""

    def __init__(
        self,
        in_features: int,
        *,
        quantized_rows: int,
        plain_rows: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.quantized = FP8Linear(in_features, quantized_rows, device=device)
        self.plain = Linear(in_features, plain_rows, device=device, dtype=dtype)

    def forward_parts(self, x: NormedRows, rows: Sequence[int]) -> tuple[Tensor, ...]:
        """[T, in] -> consecutive parts of ``rows`` output columns; a cut lies where the kinds meet.

        Plain rows of ``x`` are needed; FP8 ones are made here if they are missing.
        """
        total, count = 0, 0
        while total < self.quantized.out_features:
            total += rows[count]
            count += 1
        first = self.quantized(x.best()).split(list(rows[:count]), dim=-1)
        last = narrow_linear(x.as_plain(), self.plain.weight)
        return (*first, *last.split(list(rows[count:]), dim=-1))


def make_linear(
    in_features: int,
    out_features: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    bias: bool = False,
    fp8: bool = False,
) -> Linear | FP8Linear:
    if fp8:
        return FP8Linear(in_features, out_features, device=device, bias=bias)
    return Linear(in_features, out_features, device=device, dtype=dtype, bias=bias)
