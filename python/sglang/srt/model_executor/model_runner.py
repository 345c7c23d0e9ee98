"""One rank's model, backends and pools. Executes ForwardBatches and decides nothing."""

from __future__ import annotations

import logging

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.linear.utils import LinearAttnBackends
from sglang.srt.layers.prompt_kernels import load_prompt_kernels
from sglang.srt.mem_cache.memory_plan import Pools
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MHATokenToKVPool
from sglang.srt.model_executor.backends import build_attention_backend, build_target_backend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, LogitsOutput
from sglang.srt.model_loader.loader import WeightSource
from sglang.srt.models.registry import build_draft_model, build_model

logger = logging.getLogger(__name__)


class ModelRunner:
    """The target model over the pools that the memory plan sized.

    ``attn_backend`` owns the commit of a verify; ``model`` is the architecture's module.
    """

    def __init__(
        self,
        *,
        model_config: ModelConfig,
        pools: Pools,
        device: torch.device,
        dtype: torch.dtype,
        batch_invariant: bool,
        weights: WeightSource,
        max_step_rows: int,
        linear_backends: LinearAttnBackends,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.weights = weights
        self.model_config = model_config
        self.req_pool: HybridReqToTokenPool = pools.req_pool
        self.kv_pool: MHATokenToKVPool = pools.kv_pool
        self.max_step_rows = max_step_rows
        self.attn_backend = build_target_backend(
            model_config,
            pools,
            device=device,
            max_step_rows=max_step_rows,
            linear_backends=linear_backends,
        )
        self.model = build_model(
            model_config,
            device=device,
            dtype=dtype,
            attn_backend=self.attn_backend,
            batch_invariant=batch_invariant,
        )
        weights.fill(self.model, model_config.model_path)
        if device.type != "cpu":
            self.model.rotary.reserve(self.req_pool.max_context_len)
            load_prompt_kernels(self.model, dtype)

    def forward(self, fb: ForwardBatch) -> LogitsOutput:
        """Run the target. EXTEND and DECODE advance KV and state; TARGET_VERIFY only records."""
        self.attn_backend.init_forward_metadata(fb)
        return self.model.forward(fb)


class DraftModelRunner:
    """A draft model with one attention layer set, on its own KV pool with the target's slot ids.

    ``draft_config`` is that of the checkpoint that the block is read from: the target's own, or another
    one whose block fits the target.
    """

    def __init__(
        self,
        target: ModelRunner,
        draft_config: ModelConfig,
        *,
        req_pool: HybridReqToTokenPool,
        kv_pool: MHATokenToKVPool,
        batch_invariant: bool,
    ) -> None:
        self.dtype = target.dtype
        self.hidden_size = target.model_config.hidden_size
        self.attn_backend = build_attention_backend(
            req_pool,
            kv_pool,
            device=target.device,
            max_step_rows=target.max_step_rows,
            num_heads=target.model_config.num_attention_heads,
            head_dim=target.model_config.head_dim,
        )
        self.model = build_draft_model(
            draft_config,
            target=target.model,
            device=target.device,
            dtype=target.dtype,
            attn_backend=self.attn_backend,
            batch_invariant=batch_invariant,
        )
        target.weights.fill(self.model, draft_config.model_path, shared_with=target.model)
        if target.device.type != "cpu":
            self.model.rotary.reserve(req_pool.max_context_len)
            load_prompt_kernels(self.model, target.dtype)

    def forward(self, fb: ForwardBatch) -> LogitsOutput:
        """Run the draft model; only its KV pool changes."""
        self.attn_backend.init_forward_metadata(fb)
        return self.model.forward(fb)
