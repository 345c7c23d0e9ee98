"""Blocks of the target: norms, rotary embedding, gated attention, GDN mixer, MLP.

Parameter names are those of the checkpoint format, so ``state_dict`` is the checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from examples.demo_model.config import CHUNK, TargetGeometry
from examples.demo_model.gdn import chunked_delta_rule, delta_rule_step, l2_normalise


class ZeroCentredNorm(nn.Module):
    """RMSNorm that multiplies by ``1 + weight``; ``plain`` multiplies by ``weight``."""

    def __init__(self, size: int, eps: float, *, plain: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.offset = 0.0 if plain else 1.0
        self.weight = nn.Parameter(torch.ones(size) if plain else torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * (self.weight.float() + self.offset)).to(x.dtype)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def rotate(x: torch.Tensor, positions: torch.Tensor, rotary_dim: int, theta: float) -> torch.Tensor:
    """Rotary embedding of the first ``rotary_dim`` of ``x [..., T, d]``; pairs are half apart.

    ``positions`` must broadcast against ``x.shape[:-1]``.
    """
    half = rotary_dim // 2
    steps = torch.arange(half, device=x.device, dtype=torch.float32)
    angles = positions.float().unsqueeze(-1) * theta ** (-steps / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second, rest = x.split([half, half, x.shape[-1] - rotary_dim], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


class MLP(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = linear(hidden, width)
        self.up_proj = linear(hidden, width)
        self.down_proj = linear(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@dataclass
class AttentionCache:
    """Keys and values ``[B, Nkv, capacity, d]`` of one full-attention layer."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass
class LinearCache:
    """Conv history ``[B, conv_dim, W-1]`` and state ``[B, HV, K, V]`` fp32 of one GDN layer."""

    history: torch.Tensor
    state: torch.Tensor


class GatedAttention(nn.Module):
    def __init__(self, geo: TargetGeometry) -> None:
        super().__init__()
        self.geo = geo
        heads, kv_heads, dim = geo.num_attention_heads, geo.num_key_value_heads, geo.head_dim
        self.q_proj = linear(geo.hidden_size, heads * 2 * dim)
        self.k_proj = linear(geo.hidden_size, kv_heads * dim)
        self.v_proj = linear(geo.hidden_size, kv_heads * dim)
        self.o_proj = linear(heads * dim, geo.hidden_size)
        self.q_norm = ZeroCentredNorm(dim, geo.rms_norm_eps)
        self.k_norm = ZeroCentredNorm(dim, geo.rms_norm_eps)

    def project(
        self, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """``x [B, T, H]``, ``positions [T]`` -> q ``[B, N, T, d]``, k, v ``[B, Nkv, T, d]`` (both
        rotated as needed) and the output gate ``[B, T, N*d]`` before its sigmoid."""
        geo = self.geo
        both = self.q_proj(x).unflatten(-1, (geo.num_attention_heads, 2 * geo.head_dim))
        q, gate = both.split(geo.head_dim, dim=-1)
        k = self.k_proj(x).unflatten(-1, (geo.num_key_value_heads, geo.head_dim))
        v = self.v_proj(x).unflatten(-1, (geo.num_key_value_heads, geo.head_dim))
        q = rotate(self.q_norm(q).transpose(1, 2), positions, geo.rotary_dim, geo.rope_theta)
        k = rotate(self.k_norm(k).transpose(1, 2), positions, geo.rotary_dim, geo.rope_theta)
        return q, k, v.transpose(1, 2), gate.flatten(-2)

    def finish(self, mixed: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """``mixed [B, N, T, d]`` -> ``[B, T, H]``."""
        return self.o_proj(mixed.transpose(1, 2).flatten(-2) * gate.sigmoid())

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q, k, v, gate = self.project(x, positions)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.finish(mixed, gate)

    def step(self, x: torch.Tensor, position: int, cache: AttentionCache) -> torch.Tensor:
        """One token per row, all rows at the same ``position``."""
        where = torch.full((1,), position, device=x.device)
        q, k, v, gate = self.project(x, where)
        cache.keys[:, :, position] = k[:, :, 0]
        cache.values[:, :, position] = v[:, :, 0]
        keys, values = cache.keys[:, :, : position + 1], cache.values[:, :, : position + 1]
        groups = self.geo.num_attention_heads // self.geo.num_key_value_heads
        grouped = q.unflatten(1, (-1, groups)).squeeze(-2)
        scores = (grouped @ keys.transpose(-1, -2)).float() * self.geo.head_dim**-0.5
        mixed = scores.softmax(-1).to(values.dtype) @ values
        return self.finish(mixed.flatten(1, 2).unsqueeze(2), gate)


class GatedDeltaNet(nn.Module):
    def __init__(self, geo: TargetGeometry) -> None:
        super().__init__()
        self.geo = geo
        self.in_proj_qkv = linear(geo.hidden_size, geo.conv_dim)
        self.in_proj_z = linear(geo.hidden_size, geo.value_dim)
        self.in_proj_b = linear(geo.hidden_size, geo.linear_num_value_heads)
        self.in_proj_a = linear(geo.hidden_size, geo.linear_num_value_heads)
        self.conv1d = nn.Conv1d(
            geo.conv_dim, geo.conv_dim, geo.linear_conv_kernel_dim, groups=geo.conv_dim, bias=False
        )
        self.A_log = nn.Parameter(torch.empty(geo.linear_num_value_heads).uniform_(1, 16).log())
        step = torch.empty(geo.linear_num_value_heads).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.norm = ZeroCentredNorm(geo.linear_value_head_dim, geo.rms_norm_eps, plain=True)
        self.out_proj = linear(geo.value_dim, geo.hidden_size)

    def _inputs(
        self, x: torch.Tensor, convolved: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """``convolved [B, T, conv_dim]`` -> fp32 q, k, v ``[B, HV, T, *]`` and g, beta."""
        geo = self.geo
        mixed = F.silu(convolved).float()
        q, k, v = mixed.split([geo.key_dim, geo.key_dim, geo.value_dim], dim=-1)
        repeat = geo.linear_num_value_heads // geo.linear_num_key_heads
        key_shape = (geo.linear_num_key_heads, geo.linear_key_head_dim)
        q = l2_normalise(q.unflatten(-1, key_shape)) * geo.linear_key_head_dim**-0.5
        k = l2_normalise(k.unflatten(-1, key_shape))
        q, k = (t.repeat_interleave(repeat, dim=2).transpose(1, 2) for t in (q, k))
        v = v.unflatten(-1, (geo.linear_num_value_heads, geo.linear_value_head_dim))
        beta = self.in_proj_b(x).float().sigmoid().transpose(1, 2)
        rate = F.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        g = (-self.A_log.float().exp() * rate).transpose(1, 2)
        return q, k, v.transpose(1, 2), g, beta

    def _finish(self, mixed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``mixed [B, HV, T, V]`` fp32: normalise per head, then gate."""
        z = self.in_proj_z(x).float().unflatten(-1, (self.geo.linear_num_value_heads, -1))
        gated = self.norm(mixed.transpose(1, 2)) * F.silu(z)
        return self.out_proj(gated.flatten(-2).to(x.dtype))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        del positions  # a GDN layer has none
        projected = self.in_proj_qkv(x)
        width = self.geo.linear_conv_kernel_dim
        padded = F.pad(projected, (0, 0, width - 1, 0))
        taps = self.conv1d.weight[:, 0].to(projected.dtype)
        length = projected.shape[1]
        convolved = padded[:, :length] * taps[:, 0]
        for tap in range(1, width):
            convolved = convolved + padded[:, tap : tap + length] * taps[:, tap]
        with torch.autocast(x.device.type, enabled=False):
            q, k, v, g, beta = self._inputs(x.float(), convolved)
            mixed = chunked_delta_rule(q, k, v, g, beta, CHUNK)
        return self._finish(mixed, x)

    def step(self, x: torch.Tensor, cache: LinearCache) -> torch.Tensor:
        """One token per row; a GDN layer has no positions."""
        projected = self.in_proj_qkv(x)
        window = torch.cat([cache.history, projected.transpose(1, 2)], dim=-1)
        cache.history.copy_(window[..., 1:])
        taps = self.conv1d.weight[:, 0].to(window.dtype)
        convolved = (window * taps).sum(-1, keepdim=True).transpose(1, 2)
        with torch.autocast(x.device.type, enabled=False):
            q, k, v, g, beta = (t.squeeze(2) for t in self._inputs(x.float(), convolved))
            mixed = delta_rule_step(q, k, v, g, beta, cache.state)
        return self._finish(mixed.unsqueeze(2), x)


class DecoderLayer(nn.Module):
    def __init__(self, geo: TargetGeometry, layer_type: str) -> None:
        super().__init__()
        self.input_layernorm = ZeroCentredNorm(geo.hidden_size, geo.rms_norm_eps)
        self.post_attention_layernorm = ZeroCentredNorm(geo.hidden_size, geo.rms_norm_eps)
        if layer_type == "full_attention":
            self.self_attn = GatedAttention(geo)
        else:
            self.linear_attn = GatedDeltaNet(geo)
        self.mlp = MLP(geo.hidden_size, geo.intermediate_size)
        self.layer_type = layer_type

    @property
    def mixer(self) -> GatedAttention | GatedDeltaNet:
        return self.self_attn if self.layer_type == "full_attention" else self.linear_attn

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = x + self.mixer(self.input_layernorm(x), positions)
        return self.finish(x)

    def finish(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.post_attention_layernorm(x))

    def step(
        self, x: torch.Tensor, position: int, cache: AttentionCache | LinearCache
    ) -> torch.Tensor:
        normed = self.input_layernorm(x)
        if isinstance(cache, AttentionCache):
            return self.finish(x + self.self_attn.step(normed, position, cache))
        return self.finish(x + self.linear_attn.step(normed, cache))
