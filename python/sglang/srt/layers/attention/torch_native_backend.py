"""Full attention over the paged KV pool in plain PyTorch."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.tree_attention import attend_trees
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class RequestRows(Protocol):
    """req_to_token [rows, max_context] int32."""

    req_to_token: Tensor


class KVPool(Protocol):
    """One [num_slots, Nkv, d] tensor per full-attention layer."""

    k_buffer: list[Tensor]
    v_buffer: list[Tensor]


class TorchNativeAttnBackend(AttentionBackend):
    """Writes K and V, then attends request by request over the gathered context."""

    def __init__(self, req_to_token_pool: RequestRows, token_to_kv_pool: KVPool) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool = token_to_kv_pool

    def init_forward_metadata(self, fb: ForwardBatch) -> None:
        """Nothing is shared between layers."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: RadixAttention, fb: ForwardBatch
    ) -> Tensor:
        keys = self.token_to_kv_pool.k_buffer[layer.kv_layer]
        values = self.token_to_kv_pool.v_buffer[layer.kv_layer]
        slots_written = fb.out_cache_loc.clamp_min(0)  # a discarded row lands in the padding page
        keys[slots_written] = k.to(keys.dtype)
        values[slots_written] = v.to(values.dtype)
        table = self.req_to_token_pool.req_to_token
        if fb.tree_mask is not None:
            return attend_trees(q, keys, values, table, layer, fb)
        out = torch.empty_like(q)
        start = 0
        lens = zip(fb.req_pool_indices.tolist(), fb.prefix_lens_cpu, fb.query_lens_cpu)
        for row, prefix, length in lens:
            slots = table[row, : prefix + length].long()
            context_k, context_v = keys[slots].to(q.dtype), values[slots].to(q.dtype)
            rows = slice(start, start + length)
            start += length
            out[rows] = attend(q[rows], context_k, context_v, layer, first_position=prefix)
        return out


def attend(
    q: Tensor, k: Tensor, v: Tensor, layer: RadixAttention, *, first_position: int
) -> Tensor:
    """Attend q [n, N, d] at positions first_position.. to k, v [context, Nkv, d] -> [n, N, d]."""
    num_rows, context = q.shape[0], k.shape[0]
    group = layer.num_heads // layer.num_kv_heads
    k, v = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
    position = torch.arange(num_rows, device=q.device)[:, None] + first_position
    key_position = torch.arange(context, device=q.device)[None, :]
    visible = torch.ones((num_rows, context), dtype=torch.bool, device=q.device)
    if layer.is_causal:
        visible &= key_position <= position
    if layer.sliding_window > 0:
        visible &= (position - key_position).abs() < layer.sliding_window
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=visible, scale=layer.scaling
    )
    return out[0].transpose(0, 1)
