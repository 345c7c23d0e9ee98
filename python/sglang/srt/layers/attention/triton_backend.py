"""Full attention on a GPU over the paged KV pool, in Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.kernels.ops.attention.paged.op import SplitWorkspace, paged_attention
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.tree_attention import attend_trees
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool.req_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class TritonAttnBackend(AttentionBackend):
    """Writes K and V of the call's rows into the pool, then attends over pages.

    Decode and verify split long contexts over programs at fixed token counts, so that a row's bits
    do not depend on its batch. ``max_step_rows`` is the most rows of such a step.
    """

    def __init__(
        self,
        req_pool: ReqToTokenPool,
        kv_pool: MHATokenToKVPool,
        *,
        max_step_rows: int,
        num_heads: int,
        head_dim: int,
    ) -> None:
        self._req_pool = req_pool
        self._kv_pool = kv_pool
        self._workspace = SplitWorkspace(
            max_rows=max_step_rows,
            max_context=req_pool.max_context_len,
            num_heads=num_heads,
            head_dim=head_dim,
            device=torch.device(req_pool.device),
        )
        self._max_query_len = 1

    def init_forward_metadata(self, fb: ForwardBatch) -> None:
        self._max_query_len = max(fb.query_lens_cpu)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: RadixAttention, fb: ForwardBatch
    ) -> Tensor:
        pool, index = self._kv_pool, layer.kv_layer
        pool.set_kv_buffer(index, fb.out_cache_loc, k, v)
        if fb.tree_mask is not None:
            keys, values = pool.get_kv_buffer(index)
            return attend_trees(q, keys, values, self._req_pool.req_to_token, layer, fb)
        few = q.shape[0] <= self._workspace.max_rows and not fb.forward_mode.is_extend()
        return paged_attention(
            q,
            pool.get_key_buffer(index),
            pool.get_value_buffer(index),
            req_to_token=self._req_pool.req_to_token,
            rows=fb.req_pool_indices,
            prefix_lens=fb.prefix_lens,
            query_start_loc=fb.query_start_loc,
            max_query_len=self._max_query_len,
            scaling=layer.scaling,
            is_causal=layer.is_causal,
            sliding_window=layer.sliding_window,
            workspace=self._workspace if few else None,
        )
