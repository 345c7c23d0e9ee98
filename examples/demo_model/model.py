"""The hybrid target with its MTP block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from examples.demo_model.config import TargetGeometry
from examples.demo_model.layers import (
    AttentionCache,
    DecoderLayer,
    LinearCache,
    ZeroCentredNorm,
    linear,
)


@dataclass(frozen=True)
class TargetOutput:
    """``hidden [B, T, H]`` after the final norm; ``taps [B, T, F*H]`` or None."""

    hidden: torch.Tensor
    taps: torch.Tensor | None


class Backbone(nn.Module):
    def __init__(self, geo: TargetGeometry) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(geo.vocab_size, geo.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(geo, kind) for kind in geo.layer_types)
        self.norm = ZeroCentredNorm(geo.hidden_size, geo.rms_norm_eps)


class MTPBlock(nn.Module):
    """One attention layer that drafts a chain, fed with its own output after the first row."""

    def __init__(self, geo: TargetGeometry) -> None:
        super().__init__()
        self.geo = geo
        self.fc = linear(2 * geo.hidden_size, geo.hidden_size)
        self.pre_fc_norm_embedding = ZeroCentredNorm(geo.hidden_size, geo.rms_norm_eps)
        self.pre_fc_norm_hidden = ZeroCentredNorm(geo.hidden_size, geo.rms_norm_eps)
        self.norm = ZeroCentredNorm(geo.hidden_size, geo.rms_norm_eps)
        self.layers = nn.ModuleList([DecoderLayer(geo, "full_attention")])

    def chain(
        self, hidden: torch.Tensor, next_embeddings: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Draft ``len(next_embeddings)`` deep from every position at once.

        Args:
            hidden: ``[B, T, H]`` final hidden states of the target at positions ``0 .. T-1``.
            next_embeddings: for depth ``j`` the embeddings ``[B, T, H]`` of tokens ``t + j``.

        Returns:
            for depth ``j`` the outputs ``[B, T, H]`` that predict token ``t + j + 1``. The chain that
            starts at ``t`` sees first-depth keys up to ``t`` and its own deeper ones.
        """
        layer = cast(DecoderLayer, self.layers[0])
        attention = layer.self_attn
        base = torch.arange(hidden.shape[1], device=hidden.device)
        causal = torch.ones(len(base), len(base), dtype=torch.bool, device=base.device).tril()
        groups = self.geo.num_attention_heads // self.geo.num_key_value_heads
        outputs: list[torch.Tensor] = []
        own_keys: list[torch.Tensor] = []
        own_values: list[torch.Tensor] = []
        for depth, embedding in enumerate(next_embeddings):
            pair = [self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)]
            x = self.fc(torch.cat(pair, dim=-1))
            q, k, v, gate = attention.project(layer.input_layernorm(x), base + depth)
            if depth == 0:
                first_keys, first_values = k, v
                mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            else:
                own_keys.append(k)
                own_values.append(v)
                mixed = _chain_attention(
                    q.unflatten(1, (-1, groups)), first_keys, first_values, own_keys, own_values,
                    causal,
                )  # fmt: skip
            x = layer.finish(x + attention.finish(mixed, gate))
            hidden = self.norm(x)
            outputs.append(hidden)
        return outputs


def _chain_attention(
    q: torch.Tensor,
    first_keys: torch.Tensor,
    first_values: torch.Tensor,
    own_keys: list[torch.Tensor],
    own_values: list[torch.Tensor],
    causal: torch.Tensor,
) -> torch.Tensor:
    """q ``[B, Nkv, G, T, d]`` over first-depth keys ``<= t`` and the chain's own rows; returns
    ``[B, N, T, d]``."""
    scale = q.shape[-1] ** -0.5
    context = q @ first_keys.unsqueeze(2).transpose(-1, -2)
    context = context.masked_fill(~causal, float("-inf"))
    own = [(q * keys.unsqueeze(2)).sum(-1, keepdim=True) for keys in own_keys]
    weights = (torch.cat([context, *own], dim=-1).float() * scale).softmax(-1).to(q.dtype)
    length = context.shape[-1]
    mixed = weights[..., :length] @ first_values.unsqueeze(2)
    for index, values in enumerate(own_values):
        mixed = mixed + weights[..., length + index, None] * values.unsqueeze(2)
    return mixed.flatten(1, 2)


class DemoModel(nn.Module):
    """Target and MTP block. The head is the embedding."""

    def __init__(self, geo: TargetGeometry) -> None:
        super().__init__()
        self.geo = geo
        self.model = Backbone(geo)
        self.mtp = MTPBlock(geo)
        self._initialise()

    def _initialise(self) -> None:
        residual_scale = (2 * self.geo.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 3:
                nn.init.uniform_(parameter, -0.5, 0.5)
            elif parameter.dim() == 2:
                into_residual = name.endswith(
                    ("o_proj.weight", "out_proj.weight", "down_proj.weight")
                )
                nn.init.normal_(parameter, std=0.02 * (residual_scale if into_residual else 1.0))

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings in the dtype that the layers compute in."""
        rows = self.model.embed_tokens(ids)
        if torch.is_autocast_enabled(ids.device.type):
            return rows.to(torch.get_autocast_dtype(ids.device.type))
        return rows

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)

    def forward(self, ids: torch.Tensor, tap_layers: tuple[int, ...] = ()) -> TargetOutput:
        """``ids [B, T]``; ``tap_layers`` are the layers whose residual output is tapped."""
        x = self.embed(ids)
        positions = torch.arange(ids.shape[1], device=ids.device)
        taps = []
        for index, layer in enumerate(self.model.layers):
            x = layer(x, positions)
            if index in tap_layers:
                taps.append(x)
        hidden = self.model.norm(x)
        return TargetOutput(hidden, torch.cat(taps, dim=-1) if taps else None)

    def mtp_chain(self, hidden: torch.Tensor, ids: torch.Tensor, depth: int) -> list[torch.Tensor]:
        """MTP outputs for the positions whose whole chain lies inside ``ids [B, T]``.

        Returns ``depth`` tensors ``[B, T - depth - 1, H]``; entry ``j`` predicts token ``t + j + 2``.
        """
        rows = ids.shape[1] - depth - 1
        embedded = self.embed(ids)
        shifted = [embedded[:, 1 + j : 1 + j + rows] for j in range(depth)]
        return self.mtp.chain(hidden[:, :rows], shifted)

    def new_caches(
        self, rows: int, capacity: int, device: torch.device, dtype: torch.dtype
    ) -> list[AttentionCache | LinearCache]:
        geo = self.geo
        caches: list[AttentionCache | LinearCache] = []
        for kind in geo.layer_types:
            if kind == "full_attention":
                shape = (rows, geo.num_key_value_heads, capacity, geo.head_dim)
                keys, values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
                caches.append(AttentionCache(keys, values))
            else:
                history = (rows, geo.conv_dim, geo.linear_conv_kernel_dim - 1)
                state = (
                    rows,
                    geo.linear_num_value_heads,
                    geo.linear_key_head_dim,
                    geo.linear_value_head_dim,
                )
                caches.append(
                    LinearCache(
                        torch.zeros(history, device=device, dtype=dtype),
                        torch.zeros(state, device=device),
                    )
                )
        return caches

    def step(
        self, ids: torch.Tensor, position: int, caches: list[AttentionCache | LinearCache]
    ) -> torch.Tensor:
        """``ids [B]`` at ``position`` -> logits ``[B, vocab]``; the caches advance."""
        x = self.embed(ids).unsqueeze(1)
        for layer, cache in zip(self.model.layers, caches, strict=True):
            x = cast(DecoderLayer, layer).step(x, position, cache)
        return self.logits(self.model.norm(x)).squeeze(1)
