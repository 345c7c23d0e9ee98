"""Linear maps whose weight may be packed for the CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sglang.kernels.ops.cpu import gemm
from sglang.kernels.ops.cpu.memory import weight_zeros

PANEL_ROWS = 64  # output rows per packed panel; csrc/gemm.h reads the same number


class Linear(nn.Module):
    """``y = x W^T + bias``.

    weight   [out, in], a view of storage padded to whole panels on the CPU
    bias     [out] fp32 or None
    On the CPU activations stay fp32 whatever the weight's dtype. A row of the packed kernel does not
    depend on the other rows of the call.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.storage = padded_storage(out_features, in_features, device=device, dtype=dtype)
        self.weight = nn.Parameter(self.storage[:out_features], requires_grad=False)
        self.bias = (
            nn.Parameter(torch.zeros(out_features, device=device), requires_grad=False)
            if bias
            else None
        )
        self.packed = False

    def pack(self) -> None:
        """Reorder the weight in place for the CPU kernels; ``weight`` is unreadable afterwards."""
        if not self.packed:
            gemm.pack_inplace(self.storage)
            self.packed = True

    def forward(self, x: Tensor) -> Tensor:
        if self.packed:
            y = gemm.packed_linear(x, self.storage, self.out_features)
        else:
            y = plain_linear(x, self.weight)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def forward_parts(self, x: Tensor, rows: Sequence[int]) -> tuple[Tensor, ...]:
        """[T, in] -> consecutive parts of ``rows`` output columns."""
        return self(x).split(list(rows), dim=-1)


def padded_storage(rows: int, cols: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[rows rounded up to a whole panel on the CPU, cols], zero beyond ``rows``."""
    shape = (padded_rows(rows, device), cols)
    if device.type == "cpu":
        return weight_zeros(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


def padded_rows(rows: int, device: torch.device) -> int:
    return -(-rows // PANEL_ROWS) * PANEL_ROWS if device.type == "cpu" else rows


def plain_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x W^T`` for x [T, in] in torch, in the activations' dtype."""
    return F.linear(x, weight if weight.dtype == x.dtype else weight.to(x.dtype))
