"""RMSNorm in its two weight conventions, and the gated norm of GDN outputs."""

from __future__ import annotations

from enum import Flag, auto

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sglang.kernels import triton_support
from sglang.kernels.ops.fused.rows import (
    add_rms_norm,
    gated_rms_norm,
    gated_rms_norm_quantized,
    norm_rows,
    rms_norm,
)
from sglang.kernels.ops.fused.sums import Delta, total_of
from sglang.kernels.ops.quantization.rows import NormedRows, QuantizedRows


class RowForm(Flag):
    """What a reader of normed rows takes; FP8 maps exist only where Triton serves the device."""

    PLAIN = auto()
    QUANTIZED = auto()


class RMSNorm(nn.Module):
    """``x * rsqrt(mean(x^2) + eps) * scale`` over the last axis, in fp32, cast back at the end.

    ``unit_offset`` selects ``scale = 1 + weight`` (all norms of the target and MTP); otherwise
    ``scale = weight`` (DFLASH and DSPARK drafters).
    """

    def __init__(self, size: int, eps: float, *, unit_offset: bool, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, device=device), requires_grad=False)
        self.eps = eps
        self.unit_offset = unit_offset

    def forward(self, x: Tensor) -> Tensor:
        if triton_support.runs_on(x):
            return rms_norm(x, self.weight, self.eps, unit_offset=self.unit_offset)
        x32 = x.float()
        scale = 1.0 + self.weight if self.unit_offset else self.weight
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (normed * scale).to(x.dtype)

    def after_add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + delta), x + delta) for x, delta [T, H]; the sum is rounded before the norm."""
        if triton_support.runs_on(x):
            return add_rms_norm(x, delta, self.weight, self.eps, unit_offset=self.unit_offset)
        total = x + delta
        return self(total), total

    def for_reader(
        self, x: Tensor, delta: Delta | None, wanted: RowForm
    ) -> tuple[NormedRows, Tensor]:
        """(norm(x + delta) in the forms ``wanted``, x + delta); ``delta`` None stands for zero."""
        if triton_support.runs_on(x):
            return norm_rows(
                x,
                delta,
                self.weight,
                self.eps,
                unit_offset=self.unit_offset,
                plain=RowForm.PLAIN in wanted,
                quantized=RowForm.QUANTIZED in wanted,
            )
        if delta is None:
            return NormedRows(self(x), None), x
        normed, total = self.after_add(x, total_of(delta))
        return NormedRows(normed, None), total


class GatedRMSNorm(nn.Module):
    """``rmsnorm(o) * weight * act(z)`` per value head; the norm comes before the gate.

    o, z  [T, HV, V]; activation "silu" or "sigmoid"; all arithmetic fp32.
    """

    def __init__(self, size: int, eps: float, *, activation: str, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, device=device), requires_grad=False)
        self.eps = eps
        self.activation = activation

    def forward(self, o: Tensor, z: Tensor) -> Tensor:
        if triton_support.runs_on(o):
            return gated_rms_norm(o, z, self.weight, self.eps, activation=self.activation)
        o32, z32 = o.float(), z.float()
        normed = o32 * torch.rsqrt(o32.square().mean(-1, keepdim=True) + self.eps) * self.weight
        gate = F.silu(z32) if self.activation == "silu" else torch.sigmoid(z32)
        return (normed * gate).to(z.dtype)

    def quantized(self, o: Tensor, z: Tensor) -> QuantizedRows:
        """The same as FP8 rows [T, HV * V]."""
        return gated_rms_norm_quantized(o, z, self.weight, self.eps, activation=self.activation)
