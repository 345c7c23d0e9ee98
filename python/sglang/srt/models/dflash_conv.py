"""The grouped dynamic convolution of DFlash2 drafters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sglang.srt.configs.draft_config import DraftConfig
from sglang.srt.layers.linear import Linear


class GroupedDynamicConv(nn.Module):
    """Short causal convolutions before and after a sub-layer, within one block of rows.

    base_kernel        [2, taps, H]; index 0 is the input side, 1 the output side
    kernel_projection  H -> 2 * taps * (H / group): what each row adds to the base, per channel group

    Tap 0 multiplies the row itself, tap t the row t places before; rows before the block are zero.
    Both sides take their dynamic part from the sub-layer's input before the convolution.
    """

    def __init__(self, config: DraftConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        size, group, taps = config.hidden_size, config.conv_group_size, config.conv_kernel_size
        if group < 1 or size % group:
            raise ValueError(f"conv_group_size={group} must divide hidden_size={size}")
        self.taps, self.group, self.num_groups = taps, group, size // group
        self.base_kernel = nn.Parameter(
            torch.zeros((2, taps, size), device=device), requires_grad=False
        )
        self.kernel_projection = Linear(
            size, 2 * taps * self.num_groups, device=device, dtype=dtype
        )

    def kernels(self, x: Tensor) -> Tensor:
        """Per-row kernels of both sides: x [T, H] -> [T, 2, taps, H] fp32."""
        shape = (x.shape[0], 2, self.taps, self.num_groups, 1)
        added = self.kernel_projection(x).float().view(shape)
        base = self.base_kernel.view(2, self.taps, self.num_groups, self.group)
        return (base + added).view(x.shape[0], 2, self.taps, -1)

    def convolve(self, side: int, y: Tensor, kernels: Tensor, block: int) -> Tensor:
        """Convolve y [R * block, H] with side 0 (input) or 1 (output) of ``kernels``."""
        rows = y.float().view(-1, block, y.shape[-1])
        own = kernels[:, side].view(-1, block, self.taps, y.shape[-1])
        out = own[:, :, 0] * rows
        for tap in range(1, min(self.taps, block)):
            out = out + own[:, :, tap] * F.pad(rows[:, :-tap], (0, 0, tap, 0))
        return out.view_as(y).to(y.dtype)
