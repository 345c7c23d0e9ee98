"""A model over real pools, driven call by call: what the tests of the model side share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang.kernels.ops.cpu import library
from sglang.srt.configs.mamba_utils import mamba_cache_params
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.hybrid_linear_attn_backend import (
    HybridLinearAttnBackend,
    MambaAttnBackendBase,
)
from sglang.srt.layers.attention.linear.cpu_gdn_backend import CpuGDNBackend
from sglang.srt.layers.attention.linear.utils import select_linear_attn_backends
from sglang.srt.mem_cache.pool import HybridReqToTokenPool, MHATokenToKVPool
from sglang.srt.model_executor.backends import build_attention_backend
from sglang.srt.model_executor.batch_tensors import make_forward_batch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode, LogitsOutput
from sglang.srt.model_loader.loader import load_weights
from sglang.srt.models.registry import build_draft_model, build_model

CONTEXT = 1024
_MAX_STEP_ROWS = 64


class ModelRig:
    """Requests are numbered 0..num_requests-1; request r owns row, state slot and KV range r+1.

    kernels    "torch" or "native"
    num_draft  D of a verify, or None for a pool without scratch
    device     "cpu", or an accelerator, on which KV has the weights' dtype
    Track slots follow the working slots: request r may store boundary states in ``track_slot(r)``.
    """

    def __init__(
        self,
        path: str,
        *,
        kernels: str,
        num_requests: int = 4,
        dtype: torch.dtype = torch.float32,
        state_dtype: str = "float32",
        conv_dtype: str = "float32",
        num_draft: int | None = None,
        lossless: bool = False,
        batch_invariant: bool = False,
        with_mtp: bool = False,
        device: str = "cpu",
    ) -> None:
        library.select(kernels)
        self.config = ModelConfig.from_path(path)
        self.num_requests = num_requests
        self.device = torch.device(device)
        self.req_pool = HybridReqToTokenPool(
            size=num_requests,
            mamba_size=2 * num_requests,
            mamba_spec_state_size=num_requests,
            max_context_len=CONTEXT,
            device=self.device,
            enable_memory_saver=False,
            cache_params=mamba_cache_params(
                self.config, conv_dtype=conv_dtype, ssm_dtype=state_dtype
            ),
            mamba_layer_ids=list(self.config.linear_layer_ids),
            enable_mamba_extra_buffer=False,
            speculative_num_draft_tokens=num_draft,
            speculative_eagle_topk=1,
            enable_linear_lossless_verify=lossless,
        )
        kv_dtype = torch.float32 if self.device.type == "cpu" else dtype
        self.kv_pool = self._kv_pool(len(self.config.full_attention_layer_ids), kv_dtype)
        for r in range(num_requests):
            start = (r + 1) * CONTEXT
            order = torch.randperm(CONTEXT, generator=torch.Generator().manual_seed(r))
            self.req_pool.req_to_token[r + 1] = (start + order).to(torch.int32)
            self.req_pool.req_index_to_mamba_index_mapping[r + 1] = r + 1
        self.linear_backend = self._linear_backend()
        self.backend = HybridLinearAttnBackend(
            self._attention_backend(self.kv_pool),
            self.linear_backend,
            list(self.config.full_attention_layer_ids),
        )
        options = {"device": self.device, "dtype": dtype, "batch_invariant": batch_invariant}
        self.model = build_model(self.config, attn_backend=self.backend, **options)
        load_weights(self.model, self.config.model_path)
        self.draft = None
        if with_mtp:
            self.draft_backend = self._attention_backend(self._kv_pool(1, kv_dtype))
            self.draft = build_draft_model(
                self.config, target=self.model, attn_backend=self.draft_backend, **options
            )
            load_weights(self.draft, self.config.model_path)

    def _kv_pool(self, num_layers: int, dtype: torch.dtype) -> MHATokenToKVPool:
        heads, dim = self.config.num_key_value_heads, self.config.head_dim
        size = (self.num_requests + 1) * CONTEXT
        return MHATokenToKVPool(size, 1, dtype, heads, dim, num_layers, self.device)

    def _attention_backend(self, kv_pool: MHATokenToKVPool) -> AttentionBackend:
        return build_attention_backend(
            self.req_pool,
            kv_pool,
            device=self.device,
            max_step_rows=_MAX_STEP_ROWS,
            num_heads=self.config.num_attention_heads,
            head_dim=self.config.head_dim,
        )

    def _linear_backend(self) -> MambaAttnBackendBase:
        if self.device.type == "cpu":
            return CpuGDNBackend(self.req_pool)
        from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend

        return GDNAttnBackend(
            self.req_pool,
            device=self.device,
            num_verify_rows=self.num_requests,
            backends=select_linear_attn_backends("triton"),
        )

    def track_slot(self, request: int) -> int:
        return self.num_requests + 1 + request

    def batch(
        self,
        mode: ForwardMode,
        tokens: Sequence[Sequence[int]],
        prefix_lens: Sequence[int],
        *,
        requests: Sequence[int] | None = None,
        **options,
    ) -> ForwardBatch:
        requests = range(len(tokens)) if requests is None else requests
        flat = [token for row in tokens for token in row]
        ids = torch.tensor(flat, dtype=torch.int64, device=self.device)
        return make_forward_batch(
            mode,
            req_pool=self.req_pool,
            rows=[r + 1 for r in requests],
            prefix_lens=prefix_lens,
            query_lens=[len(row) for row in tokens],
            input_ids=ids,
            **options,
        )

    def run(
        self,
        mode: ForwardMode,
        tokens: Sequence[Sequence[int]],
        prefix_lens: Sequence[int],
        **options,
    ) -> LogitsOutput:
        """One target call; keyword arguments as of ``batch``."""
        fb = self.batch(mode, tokens, prefix_lens, **options)
        self.backend.init_forward_metadata(fb)
        return self.model.forward(fb)

    def run_draft(self, fb: ForwardBatch) -> LogitsOutput:
        self.draft_backend.init_forward_metadata(fb)
        return self.draft.forward(fb)

    def states(self, slot: int) -> tuple[Tensor, Tensor]:
        """Copies of (conv [L, dim, W-1], temporal [L, HV, V, K]) of a state slot."""
        cache = self.req_pool.mamba_pool.mamba_cache
        return cache.conv[0][:, slot].clone(), cache.temporal[:, slot].clone()

    def commit(
        self,
        accepted_steps: Sequence[int],
        *,
        track_slots: Sequence[int] | None = None,
        track_steps: Sequence[int] | None = None,
    ) -> None:
        """Make the last verify permanent up to each request's accepted step."""

        def tensor(values: Sequence[int] | None) -> Tensor | None:
            if values is None:
                return None
            return torch.tensor(values, dtype=torch.int64, device=self.device)

        self.backend.update_mamba_state_after_mtp_verify(
            last_correct_step_indices=tensor(accepted_steps),
            mamba_track_indices=tensor(track_slots),
            mamba_steps_to_track=tensor(track_steps),
            model=self.model,
        )


def random_tokens(config: ModelConfig, length: int, *, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab_size, (length,), generator=generator).tolist()
