"""One compiled call for a whole draft block on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang.kernels.ops.cpu import forward, gdn
from sglang.kernels.ops.cpu.structs import (
    AttentionShapeArgs,
    BatchArgs,
    KvArgs,
    LayerArgs,
    ModelArgs,
    pointer,
)
from sglang.srt.layers.fused_step import linear_args
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import Linear
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

_FULL_ATTENTION = 0


@dataclass(frozen=True)
class BlockLayerParts:
    """One pre-norm layer: norms multiply by the weight itself, ``qkv`` holds q, k, v rows in order."""

    input_norm: RMSNorm
    post_norm: RMSNorm
    q_norm: RMSNorm
    k_norm: RMSNorm
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    keys: Tensor
    values: Tensor
    sliding_window: int


@dataclass(frozen=True)
class BlockParts:
    """What a block drafter consists of; ``embedding`` and ``lm_head`` are the target's."""

    layers: Sequence[BlockLayerParts]
    final_norm: RMSNorm
    rotary: RotaryEmbedding
    embedding: Linear
    lm_head: Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_causal: bool
    req_to_token: Tensor


class BlockStep:
    """Runs blocks of rows; every matrix must be packed. Addresses are read once and must stay."""

    def __init__(self, parts: BlockParts) -> None:
        self._parts = parts
        self._keep: list[Tensor] = []
        windows = [layer.sliding_window for layer in parts.layers if layer.sliding_window > 0]
        self._window = min(windows, default=0)
        self._layers = (LayerArgs * len(parts.layers))()
        for args, layer in zip(self._layers, parts.layers, strict=True):
            self._describe_layer(args, layer)
        self._args = self._describe_model(parts)

    @staticmethod
    def create(parts: BlockParts) -> BlockStep | None:
        """The compiled step, or None where geometry, dtypes or packing do not allow it."""
        group = parts.num_heads // parts.num_kv_heads
        linears = [linear for x in parts.layers for linear in (x.qkv, x.out, x.gate_up, x.down)]
        fits = (
            all(linear.packed for linear in (*linears, parts.lm_head))
            and parts.head_dim % gdn.LANES == 0
            and parts.head_dim <= forward.MAX_HEAD_DIM
            and group <= forward.MAX_GROUP
            and {x.keys.dtype for x in parts.layers} <= set(gdn.STATE_DTYPES)
        )
        return BlockStep(parts) if fits else None

    def covers(self, fb: ForwardBatch) -> bool:
        """Whether no row of the call would lose sight of a position through a sliding window."""
        longest = max(fb.prefix_lens_cpu) + fb.query_lens_cpu[0]
        return self._window == 0 or longest <= self._window

    def run(self, fb: ForwardBatch, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Final-norm rows [M, H] and logits [M, vocab] of rows ``wanted`` [M] int64."""
        args, parts = self._args, self._parts
        args.cos, args.sin = parts.rotary.cos.data_ptr(), parts.rotary.sin.data_ptr()
        num_wanted = wanted.shape[0]
        logits = torch.empty((num_wanted, parts.lm_head.out_features))
        hidden = torch.empty((num_wanted, parts.lm_head.in_features))
        last_seen = None
        if not parts.is_causal:
            ends = fb.prefix_lens + fb.query_lens - 1
            last_seen = ends.repeat_interleave(fb.query_lens_cpu[0])
        batch = BatchArgs(
            num_rows=fb.num_rows,
            num_requests=fb.batch_size,
            num_logits=num_wanted,
            gdn_mode=gdn.MODE_ADVANCE,
            input_ids=fb.input_ids.data_ptr(),
            positions=fb.positions.data_ptr(),
            req_rows=fb.req_pool_indices.data_ptr(),
            starts=fb.query_start_loc.data_ptr(),
            out_slots=fb.out_cache_loc.data_ptr(),
            logits_rows=wanted.data_ptr(),
            logits=logits.data_ptr(),
            hidden_wanted=hidden.data_ptr(),
            last_seen=pointer(last_seen),
        )
        forward.run(args, batch)
        return hidden, logits

    def _describe_model(self, parts: BlockParts) -> ModelArgs:
        return ModelArgs(
            hidden=parts.lm_head.in_features,
            num_layers=len(parts.layers),
            vocab=parts.lm_head.out_features,
            attention=AttentionShapeArgs(
                heads=parts.num_heads,
                kv_heads=parts.num_kv_heads,
                head_dim=parts.head_dim,
                scale=parts.head_dim**-0.5,
            ),
            rotary_half=parts.head_dim // 2,
            eps=parts.final_norm.eps,
            embed_packed=parts.embedding.packed,
            embed=linear_args(parts.embedding),
            lm_head=linear_args(parts.lm_head),
            final_norm=self._norm(parts.final_norm),
            req_to_token=parts.req_to_token.data_ptr(),
            req_stride=parts.req_to_token.stride(0),
            layers=self._layers,
        )

    def _describe_layer(self, args: LayerArgs, layer: BlockLayerParts) -> None:
        args.kind = _FULL_ATTENTION
        args.input_norm, args.post_norm = self._norm(layer.input_norm), self._norm(layer.post_norm)
        args.q_norm, args.k_norm = self._norm(layer.q_norm), self._norm(layer.k_norm)
        args.in_proj, args.out_proj = linear_args(layer.qkv), linear_args(layer.out)
        args.gate_up, args.down = linear_args(layer.gate_up), linear_args(layer.down)
        args.kv = KvArgs(
            k=layer.keys.data_ptr(),
            v=layer.values.data_ptr(),
            slot_stride=layer.keys.stride(0),
            num_slots=layer.keys.shape[0],
            is_bf16=layer.keys.dtype == torch.bfloat16,
        )

    def _norm(self, norm: RMSNorm) -> int:
        """Address of the weight as the kernels take it: they add 1, as the target's norms need."""
        kept = norm.weight.detach().float() - 1.0
        self._keep.append(kept)
        return kept.data_ptr()
