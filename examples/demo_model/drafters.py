"""The block drafters DFLASH and DSPARK, for training: many anchors of a sequence at once.

Parameter names are those of the published draft checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from examples.demo_model.config import DraftGeometry
from examples.demo_model.layers import MLP, ZeroCentredNorm, linear, rotate
from examples.demo_model.tokenizer import MASK_ID


@dataclass(frozen=True)
class DraftContext:
    """Keys and values ``[B, Nkv, T, d]`` that one draft layer makes of the target's features."""

    keys: torch.Tensor
    values: torch.Tensor


class BlockAttention(nn.Module):
    """Plain grouped-query attention; block rows see the context before their anchor and, in both
    directions, their own block."""

    def __init__(self, geo: DraftGeometry) -> None:
        super().__init__()
        self.geo = geo
        hidden, dim = geo.target.hidden_size, geo.head_dim
        self.q_proj = linear(hidden, geo.num_attention_heads * dim)
        self.k_proj = linear(hidden, geo.num_key_value_heads * dim)
        self.v_proj = linear(hidden, geo.num_key_value_heads * dim)
        self.o_proj = linear(geo.num_attention_heads * dim, hidden)
        self.q_norm = ZeroCentredNorm(dim, geo.rms_norm_eps, plain=True)
        self.k_norm = ZeroCentredNorm(dim, geo.rms_norm_eps, plain=True)

    def keys_values(
        self, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``x [B, T, H]`` at ``positions [T]`` or ``[B, 1, T]`` -> k, v ``[B, Nkv, T, d]``."""
        geo = self.geo
        k = self.k_proj(x).unflatten(-1, (geo.num_key_value_heads, geo.head_dim))
        v = self.v_proj(x).unflatten(-1, (geo.num_key_value_heads, geo.head_dim))
        k = rotate(self.k_norm(k).transpose(1, 2), positions, geo.head_dim, geo.rope_theta)
        return k, v.transpose(1, 2)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        context: DraftContext,
        hidden_context: torch.Tensor,
    ) -> torch.Tensor:
        """``x [B, A*R, H]``, ``positions [B, 1, A*R]``, ``hidden_context [B, 1, 1, A*R, T]`` true
        where a context row must not be seen."""
        geo = self.geo
        rows = geo.block_size
        q = self.q_proj(x).unflatten(-1, (geo.num_attention_heads, geo.head_dim))
        q = rotate(self.q_norm(q).transpose(1, 2), positions, geo.head_dim, geo.rope_theta)
        q = q.unflatten(1, (geo.num_key_value_heads, -1))  # [B, Nkv, G, A*R, d]
        k, v = self.keys_values(x, positions)
        block_k, block_v = (t.unflatten(2, (-1, rows)).unsqueeze(2) for t in (k, v))
        to_context = q @ context.keys.unsqueeze(2).transpose(-1, -2)
        to_context = to_context.masked_fill(hidden_context, float("-inf"))
        in_block = (q.unflatten(3, (-1, rows)) @ block_k.transpose(-1, -2)).flatten(3, 4)
        scores = torch.cat([to_context, in_block], dim=-1).float() * geo.head_dim**-0.5
        weights = scores.softmax(-1).to(x.dtype)
        length = to_context.shape[-1]
        mixed = weights[..., :length] @ context.values.unsqueeze(2)
        mixed = mixed + (weights[..., length:].unflatten(3, (-1, rows)) @ block_v).flatten(3, 4)
        return self.o_proj(mixed.flatten(1, 2).transpose(1, 2).flatten(-2))


class DraftLayer(nn.Module):
    def __init__(self, geo: DraftGeometry) -> None:
        super().__init__()
        hidden = geo.target.hidden_size
        self.input_layernorm = ZeroCentredNorm(hidden, geo.rms_norm_eps, plain=True)
        self.post_attention_layernorm = ZeroCentredNorm(hidden, geo.rms_norm_eps, plain=True)
        self.self_attn = BlockAttention(geo)
        self.mlp = MLP(hidden, geo.intermediate_size)


class BlockDrafter(nn.Module):
    """Backbone common to both kinds: target features in, one hidden row per block row out."""

    def __init__(self, geo: DraftGeometry) -> None:
        super().__init__()
        self.geo = geo
        hidden = geo.target.hidden_size
        self.fc = linear(len(geo.target_layer_ids) * hidden, hidden)
        self.hidden_norm = ZeroCentredNorm(hidden, geo.rms_norm_eps, plain=True)
        self.layers = nn.ModuleList(DraftLayer(geo) for _ in range(geo.num_hidden_layers))
        self.norm = ZeroCentredNorm(hidden, geo.rms_norm_eps, plain=True)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.01 if into_residual else 0.03)

    def block_ids(self, ids: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """``[B, A, R]``: the anchor token, then masks."""
        blocks = torch.full(
            (*anchors.shape, self.geo.block_size), MASK_ID, dtype=torch.long, device=ids.device
        )
        blocks[..., 0] = ids.gather(1, anchors)
        return blocks

    def forward(
        self, taps: torch.Tensor, block_embeddings: torch.Tensor, anchors: torch.Tensor
    ) -> torch.Tensor:
        """Hidden rows of every block.

        Args:
            taps: ``[B, T, F*H]`` target features of the whole sequence.
            block_embeddings: ``[B, A, R, H]``.
            anchors: ``[B, A]`` position of each block's first row; only ``taps`` before it are seen.

        Returns:
            ``[B, A, R, H]`` after the final norm.
        """
        features = self.hidden_norm(self.fc(taps))
        base = torch.arange(taps.shape[1], device=taps.device)
        offsets = torch.arange(self.geo.block_size, device=taps.device)
        positions = (anchors.unsqueeze(-1) + offsets).flatten(1).unsqueeze(1)
        row_anchor = anchors.repeat_interleave(self.geo.block_size, dim=1)
        unseen = (base >= row_anchor.unsqueeze(-1))[:, None, None]
        x = block_embeddings.flatten(1, 2)
        for layer in (cast(DraftLayer, module) for module in self.layers):
            context = DraftContext(*layer.self_attn.keys_values(features, base))
            x = x + layer.self_attn(layer.input_layernorm(x), positions, context, unseen)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x).unflatten(1, (anchors.shape[1], -1))


class MarkovHead(nn.Module):
    """Bias on the logits that depends on the previous token alone, of low rank."""

    def __init__(self, vocab: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = linear(rank, vocab)
        nn.init.normal_(self.markov_w1.weight, std=0.05)
        nn.init.normal_(self.markov_w2.weight, std=0.02)

    def forward(self, previous: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``previous [...]`` -> bias ``[..., vocab]`` and the previous token's row ``[..., r]``."""
        row = self.markov_w1(previous)
        return self.markov_w2(row), row


class ConfidenceHead(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)


class DFlashDrafter(BlockDrafter):
    """Row ``i`` predicts the token at its own position."""


class DSparkDrafter(BlockDrafter):
    """Row ``i`` predicts the token after its position, with a bias from the token before it."""

    def __init__(self, geo: DraftGeometry) -> None:
        super().__init__(geo)
        hidden = geo.target.hidden_size
        self.markov_head = MarkovHead(geo.target.vocab_size, geo.markov_rank)
        self.confidence_head = ConfidenceHead(hidden + geo.markov_rank)


def build_drafter(geo: DraftGeometry) -> BlockDrafter:
    return DFlashDrafter(geo) if geo.kind == "dflash" else DSparkDrafter(geo)


@dataclass(frozen=True)
class DraftPrediction:
    """``logits [B, A, n, vocab]`` of the drafts; ``confidence [B, A, n]`` logits, DSPARK only."""

    logits: torch.Tensor
    confidence: torch.Tensor | None


def predict(
    drafter: BlockDrafter,
    target_embed: nn.Embedding,
    taps: torch.Tensor,
    ids: torch.Tensor,
    anchors: torch.Tensor,
) -> DraftPrediction:
    """Drafts for every anchor, each given the true tokens before it.

    ``ids [B, T]`` must reach ``num_drafts`` tokens beyond each of ``anchors [B, A]``. Up to the first
    wrong draft this equals what the chain computes from its own tokens, so accept lengths are exact.
    """
    geo = drafter.geo
    embedded = target_embed(drafter.block_ids(ids, anchors)).to(taps.dtype)
    hidden = drafter(taps, embedded, anchors)[:, :, geo.first_draft_row :]
    logits = nn.functional.linear(hidden, target_embed.weight)
    if not isinstance(drafter, DSparkDrafter):
        return DraftPrediction(logits, None)
    offsets = torch.arange(geo.num_drafts, device=ids.device)
    previous_at = anchors.unsqueeze(-1) + offsets
    previous = ids.gather(1, previous_at.flatten(1)).view(previous_at.shape)
    bias, row = drafter.markov_head(previous)
    inputs = torch.cat([hidden, row.to(hidden.dtype)], dim=-1).detach()
    confidence = drafter.confidence_head.proj(inputs).squeeze(-1)
    return DraftPrediction(logits + bias, confidence)
