"""Full attention on a GPU over the paged KV pool, in Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.kernels.ops.attention.paged.launch import SHORT_CHUNKS
from sglang.kernels.ops.attention.paged.op import SplitWorkspace, paged_attention
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.chunk_plan import ChunkRun, plan_chunks
from sglang.srt.layers.attention.tree_attention import attend_trees
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool.req_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class TritonAttnBackend(AttentionBackend):
    """Writes K and V of the call's rows into the pool, then attends over pages.

    Decode and verify, and short prompt chunks after a long prefix, split their context over programs at
    lengths that follow from the request's own context, so that a row's bits do not depend on its batch.
    Launches of decode and verify depend on shapes and on the longest query alone, so they may be captured.
    ``max_step_rows`` is the most rows, padding included, of a decode or verify step; a larger one makes the
    workspace grow.
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
        self._num_heads = num_heads
        self._head_dim = head_dim
        self._workspaces = [self._make_workspace(max(max_step_rows, SHORT_CHUNKS.max_rows))]
        self._max_query_len = 1
        self._runs: list[tuple[ChunkRun, Tensor]] = []

    def _make_workspace(self, max_rows: int) -> SplitWorkspace:
        device = torch.device(self._req_pool.device)
        return SplitWorkspace(
            max_rows=max_rows,
            max_context=self._req_pool.max_context_len,
            num_heads=self._num_heads,
            head_dim=self._head_dim,
            device=device,
            dtype=torch.float32 if device.type == "cpu" else torch.bfloat16,
        )

    def _workspace_for(self, fb: ForwardBatch, num_rows: int) -> SplitWorkspace | None:
        """None for prompt chunks, whose many rows fill the GPU unsplit."""
        mode, newest = fb.forward_mode, self._workspaces[-1]
        if mode.is_extend() and (not mode.is_draft_extend_v2() or num_rows > newest.max_rows):
            return None
        if num_rows > newest.max_rows:
            # Smaller ones stay: graphs captured with them hold their addresses.
            newest = self._make_workspace(num_rows)
            self._workspaces.append(newest)
        return newest

    def init_forward_metadata(self, fb: ForwardBatch) -> None:
        self._max_query_len = max(fb.query_lens_cpu)
        self._runs = []
        mode = fb.forward_mode
        if not mode.is_extend() or mode.is_draft_extend_v2():
            return
        runs = plan_chunks(fb.query_lens_cpu, fb.prefix_lens_cpu, short=SHORT_CHUNKS)
        if any(run.is_split for run in runs):
            starts = fb.query_start_loc
            self._runs = [(run, starts[run.first : run.end + 1] - run.row) for run in runs]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: RadixAttention, fb: ForwardBatch
    ) -> Tensor:
        self._kv_pool.set_kv_buffer(layer.kv_layer, fb.out_cache_loc, k, v)
        return self.attend(q, layer, fb)

    def kv_buffers(self, layer: RadixAttention) -> tuple[Tensor, Tensor] | None:
        return self._kv_pool.get_kv_buffer(layer.kv_layer)

    def attend(self, q: Tensor, layer: RadixAttention, fb: ForwardBatch) -> Tensor:
        pool, index = self._kv_pool, layer.kv_layer
        if fb.tree_mask is not None:
            keys, values = pool.get_kv_buffer(index)
            return attend_trees(q, keys, values, self._req_pool.req_to_token, layer, fb)
        if not self._runs:
            return self._attend(
                q,
                layer,
                rows=fb.req_pool_indices,
                prefix_lens=fb.prefix_lens,
                query_start_loc=fb.query_start_loc,
                max_query_len=self._max_query_len,
                workspace=self._workspace_for(fb, q.shape[0]),
            )
        out = torch.empty_like(q)
        for run, starts in self._runs:
            requests, rows = slice(run.first, run.end), slice(run.row, run.end_row)
            self._attend(
                q[rows],
                layer,
                rows=fb.req_pool_indices[requests],
                prefix_lens=fb.prefix_lens[requests],
                query_start_loc=starts,
                max_query_len=run.max_query_len,
                workspace=self._workspaces[0] if run.is_split else None,
                prompt_chunks=True,
                out=out[rows],
            )
        return out

    def _attend(
        self,
        q: Tensor,
        layer: RadixAttention,
        *,
        rows: Tensor,
        prefix_lens: Tensor,
        query_start_loc: Tensor,
        max_query_len: int,
        workspace: SplitWorkspace | None,
        prompt_chunks: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        pool, index = self._kv_pool, layer.kv_layer
        return paged_attention(
            q,
            pool.get_key_buffer(index),
            pool.get_value_buffer(index),
            req_to_token=self._req_pool.req_to_token,
            rows=rows,
            prefix_lens=prefix_lens,
            query_start_loc=query_start_loc,
            max_query_len=max_query_len,
            scaling=layer.scaling,
            is_causal=layer.is_causal,
            sliding_window=layer.sliding_window,
            workspace=workspace,
            page_size=pool.page_size,
            prompt_chunks=prompt_chunks,
            out=out,
        )
