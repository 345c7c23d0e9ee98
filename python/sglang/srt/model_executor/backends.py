"""Attention backends of target and draft models for the device at hand; chosen once, at start."""

from __future__ import annotations

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.layers.attention.linear.cpu_gdn_backend import CpuGDNBackend
from sglang.srt.layers.attention.linear.utils import LinearAttnBackends
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_plan import Pools
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MHATokenToKVPool


def build_target_backend(
    model_config: ModelConfig,
    pools: Pools,
    *,
    device: torch.device,
    max_step_rows: int,
    linear_backends: LinearAttnBackends,
) -> HybridLinearAttnBackend:
    """Full and linear attention of the target over ``pools``.

    max_step_rows  most rows of a decode or verify step
    """
    full = build_attention_backend(
        pools.req_pool,
        pools.kv_pool,
        device=device,
        max_step_rows=max_step_rows,
        num_heads=model_config.num_attention_heads,
        head_dim=model_config.head_dim,
    )
    layers = list(model_config.full_attention_layer_ids)
    if device.type == "cpu":
        return HybridLinearAttnBackend(full, CpuGDNBackend(pools.req_pool), layers)
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend

    linear = GDNAttnBackend(
        pools.req_pool,
        device=device,
        num_verify_rows=pools.req_pool.size,
        backends=linear_backends,
    )
    return HybridLinearAttnBackend(full, linear, layers)


def build_attention_backend(
    req_pool: HybridReqToTokenPool,
    kv_pool: MHATokenToKVPool,
    *,
    device: torch.device,
    max_step_rows: int,
    num_heads: int,
    head_dim: int,
) -> AttentionBackend:
    """Full attention over one KV pool: PyTorch on the CPU, Triton on a GPU."""
    if device.type == "cpu":
        return TorchNativeAttnBackend(req_pool, kv_pool)
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    return TritonAttnBackend(
        req_pool,
        kv_pool,
        max_step_rows=max_step_rows,
        num_heads=num_heads,
        head_dim=head_dim,
    )
