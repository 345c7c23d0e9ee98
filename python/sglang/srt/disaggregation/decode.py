"""Request pool of a decode server in prefill/decode disaggregation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.mem_cache.pool.req_pool import (
    HybridReqToTokenPool,
    ReqToTokenPool,
    refuse_side_state,
)

if TYPE_CHECKING:
    from sglang.srt.configs.mamba_utils import BaseLinearStateParams


class DecodeReqToTokenPool(ReqToTokenPool):
    """Rows of running requests and of ``pre_alloc_size`` requests whose KV is still arriving."""

    def __init__(
        self,
        size: int,
        max_context_len: int,
        device: str | torch.device,
        enable_memory_saver: bool,
        pre_alloc_size: int,
    ) -> None:
        ReqToTokenPool.__init__(
            self, size + pre_alloc_size, max_context_len, device, enable_memory_saver
        )
        self.size = size
        self.pre_alloc_size = pre_alloc_size


class HybridMambaDecodeReqToTokenPool(HybridReqToTokenPool):
    """The decode server's rows of a hybrid model: same settings and same scratch as elsewhere.

    Rows, scratch rows and state slots count the requests in transfer too, because scratch rows may be
    addressed by request row. The state pool is raised to one working slot and all track slots for
    each of them.
    """

    def __init__(
        self,
        size: int,
        max_context_len: int,
        device: str | torch.device,
        enable_memory_saver: bool,
        cache_params: BaseLinearStateParams,
        mamba_layer_ids: list[int],
        speculative_num_draft_tokens: int | None,
        enable_mamba_extra_buffer: bool,
        pre_alloc_size: int,
        enable_overlap_schedule: bool,
        mamba_size: int | None = None,
        start_layer: int | None = None,
        speculative_eagle_topk: int | None = None,
        linear_replayssm_cache_len: int = 16,
        mamba_envelope_layout: bool = False,
        enable_linear_replayssm_spec: bool = False,
        enable_linear_lossless_verify: bool = False,
        short_conv_layer_ids: list[int] | None = None,
        short_conv_state_shape: tuple[int, int] | None = None,
        ngram_context_len: int = 0,
        ngram_eos_token_id: int = 0,
    ) -> None:
        DecodeReqToTokenPool.__init__(
            self, size, max_context_len, device, enable_memory_saver, pre_alloc_size
        )
        refuse_side_state(short_conv_layer_ids, short_conv_state_shape, ngram_context_len)
        num_requests = size + pre_alloc_size
        self._init_mamba(
            mamba_size=decode_mamba_size(
                num_requests=num_requests,
                mamba_size=mamba_size,
                enable_mamba_extra_buffer=enable_mamba_extra_buffer,
                enable_overlap_schedule=enable_overlap_schedule,
            ),
            spec_state_size=num_requests,
            cache_params=cache_params,
            mamba_layer_ids=mamba_layer_ids,
            enable_mamba_extra_buffer=enable_mamba_extra_buffer,
            enable_mamba_extra_buffer_lazy=False,
            enable_overlap_schedule=enable_overlap_schedule,
            start_layer=start_layer,
            scratch={
                "speculative_num_draft_tokens": speculative_num_draft_tokens,
                "speculative_eagle_topk": speculative_eagle_topk,
                "linear_replayssm_cache_len": linear_replayssm_cache_len,
                "envelope_layout": mamba_envelope_layout,
                "enable_linear_replayssm_spec": enable_linear_replayssm_spec,
                "enable_linear_lossless_verify": enable_linear_lossless_verify,
            },
        )


def decode_mamba_size(
    *,
    num_requests: int,
    mamba_size: int | None,
    enable_mamba_extra_buffer: bool,
    enable_overlap_schedule: bool,
) -> int:
    """State slots of a decode server: at least what all its requests hold at once."""
    tracking = (2 if enable_overlap_schedule else 1) if enable_mamba_extra_buffer else 0
    return max(mamba_size or 0, num_requests * (1 + tracking))
