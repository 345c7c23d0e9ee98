"""Rotary position embedding with NeoX pairing, optionally stretched with YaRN."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from sglang.srt.configs.rope_config import RopeConfig

_TABLE_GROWTH = 1024


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Angular frequency per rotated pair, [rotary_dim / 2] fp32."""
    exponent = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    plain = 1.0 / (rope.theta**exponent)
    if rope.rope_type != "yarn":
        return plain
    low = _yarn_bound(rope, rope.beta_fast, math.floor)
    high = _yarn_bound(rope, rope.beta_slow, math.ceil)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    steps = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    ramp = ((steps - low) / max(high - low, 1e-3)).clamp(0.0, 1.0)
    return (plain / rope.factor) * ramp + plain * (1.0 - ramp)


def _yarn_bound(rope: RopeConfig, rotations: float, rounding: type[int] | object) -> int:
    """Pair index whose wavelength makes ``rotations`` turns over the original context."""
    turns = rope.original_max_position_embeddings / (rotations * 2.0 * math.pi)
    bound = rope.rotary_dim * math.log(turns) / (2.0 * math.log(rope.theta))
    return rounding(bound)  # type: ignore[operator]


def attention_scaling(rope: RopeConfig) -> float:
    """Factor on cos and sin: 1 unless YaRN stretches the context (arXiv:2309.00071, eq. 22)."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.rope_type == "yarn" and rope.factor > 1.0:
        return 0.1 * math.log(rope.factor) + 1.0
    return 1.0


class RotaryEmbedding(nn.Module):
    """cos/sin tables that grow with the positions seen, and the rotation itself.

    ``cos``, ``sin`` are [positions, rotary_dim / 2] fp32 and are replaced when they grow.
    """

    def __init__(self, rope: RopeConfig, *, device: torch.device) -> None:
        super().__init__()
        self.rotary_dim = rope.rotary_dim
        self._inv_freq = inverse_frequencies(rope).to(device)
        self._scaling = attention_scaling(rope)
        self.cos = torch.empty((0, rope.rotary_dim // 2), device=device)
        self.sin = torch.empty_like(self.cos)

    def reserve(self, num_positions: int) -> None:
        """Make the tables cover positions below ``num_positions``."""
        have = self.cos.shape[0]
        if num_positions <= have:
            return
        size = max(_TABLE_GROWTH, 1 << (num_positions - 1).bit_length())
        steps = torch.arange(size, dtype=torch.float32, device=self._inv_freq.device)
        angles = steps[:, None] * self._inv_freq
        self.cos = angles.cos() * self._scaling
        self.sin = angles.sin() * self._scaling

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate the first rotary_dim dims of ``x`` [T, heads, d] at ``positions`` [T]."""
        half = self.rotary_dim // 2
        cos, sin = self.cos[positions][:, None, :], self.sin[positions][:, None, :]
        x32 = x.float()
        first, second = x32[..., :half], x32[..., half : 2 * half]
        parts = (first * cos - second * sin, second * cos + first * sin, x32[..., 2 * half :])
        return torch.cat(parts, dim=-1).to(x.dtype)
