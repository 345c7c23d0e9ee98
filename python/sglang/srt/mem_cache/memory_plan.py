"""From a memory plan to pools: allocate exactly what was planned, and check that it was."""

from __future__ import annotations

import torch

from sglang.srt.configs.mamba_utils import (
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.plan_inputs import KVGeometry, MemoryPlanError
from sglang.srt.mem_cache.plan_types import MemoryPlan, Pools, PoolSettings
from sglang.srt.mem_cache.planner import make_plan
from sglang.srt.mem_cache.pool import HybridReqToTokenPool, MHATokenToKVPool

__all__ = [
    "MemoryPlan",
    "MemoryPlanError",
    "PoolSettings",
    "Pools",
    "build_pools",
    "check_allocated",
    "make_plan",
    "plan_cache_params",
]


def plan_cache_params(plan: MemoryPlan) -> Mamba2CacheParams:
    """State parameters of the rank that ``plan`` describes."""
    layout = plan.settings.layout
    heads, v_dim, k_dim = layout.temporal
    channels, window = layout.conv[0]
    shape = Mamba2StateShape(
        conv=list(layout.conv),
        temporal=layout.temporal,
        intermediate_size=heads * v_dim,
        conv_dim=channels,
        ssm_state_size=k_dim,
        num_heads=heads,
        head_dim=v_dim,
        state_size=k_dim,
        conv_kernel=window + 1,
        num_k_heads_per_tp=layout.num_k_heads,
    )
    return Mamba2CacheParams(
        shape=shape,
        layers=list(plan.settings.linear_layer_ids),
        dtype=Mamba2StateDType(
            conv=getattr(torch, layout.conv_dtype), temporal=getattr(torch, layout.temporal_dtype)
        ),
    )


def build_pools(plan: MemoryPlan, device: str | torch.device) -> Pools:
    """Allocate exactly the tensors that ``plan`` lists, zeroed, on ``device``.

    Call ``check_allocated`` on the result before serving.
    """
    settings = plan.settings
    req_pool = HybridReqToTokenPool(
        size=settings.num_requests,
        mamba_size=plan.max_mamba_cache_size,
        mamba_spec_state_size=max(0, plan.verify_rows - 1),
        max_context_len=settings.max_context_len,
        device=device,
        enable_memory_saver=False,
        cache_params=plan_cache_params(plan),
        mamba_layer_ids=list(settings.linear_layer_ids),
        enable_mamba_extra_buffer=settings.extra_buffer,
        enable_mamba_extra_buffer_lazy=settings.lazy,
        enable_overlap_schedule=settings.overlap,
        speculative_num_draft_tokens=plan.draft_tokens,
        speculative_eagle_topk=settings.topk,
        enable_linear_lossless_verify=plan.lossless_verify,
        lossless_ring_cells=settings.ring_cells,
    )
    return Pools(
        req_pool=req_pool,
        token_allocator=PagedTokenToKVPoolAllocator(plan.max_total_num_tokens, plan.page_size),
        kv_pool=_kv_pool(plan, settings.kv, device),
        draft_kv_pool=(
            None if settings.draft_kv is None else _kv_pool(plan, settings.draft_kv, device)
        ),
    )


def _kv_pool(plan: MemoryPlan, kv: KVGeometry, device: str | torch.device) -> MHATokenToKVPool:
    return MHATokenToKVPool(
        size=plan.max_total_num_tokens,
        page_size=plan.page_size,
        dtype=getattr(torch, kv.dtype),
        head_num=kv.num_heads,
        head_dim=kv.head_dim,
        layer_num=kv.num_layers,
        device=device,
    )


def _allocated_tensors(pools: Pools) -> dict[str, torch.Tensor]:
    req_names = ("req_to_token", "req_index_to_")
    tensors = {}
    for name, tensor in pools.req_pool.named_tensors().items():
        owner = "req" if name.startswith(req_names) else "state"
        tensors[f"{owner}.{name}"] = tensor
    owners = [("kv", pools.kv_pool)]
    if pools.draft_kv_pool is not None:
        owners.append(("draft_kv", pools.draft_kv_pool))
    for owner, pool in owners:
        tensors.update({f"{owner}.{name}": t for name, t in pool.named_tensors().items()})
    return tensors


def check_allocated(plan: MemoryPlan, pools: Pools) -> None:
    """Compare every tensor's planned bytes with those of its storage.

    Raises: MemoryPlanError naming the tensors that differ, are missing, or were not planned.
    """
    planned = {spec.name: spec.nbytes for spec in plan.tensors}
    allocated = {
        name: tensor.untyped_storage().nbytes()
        for name, tensor in _allocated_tensors(pools).items()
    }
    wrong = [
        f"{name}: planned {planned.get(name)} bytes, allocated {allocated.get(name)}"
        for name in {**planned, **allocated}
        if planned.get(name) != allocated.get(name)
    ]
    if wrong:
        raise MemoryPlanError("pools differ from the memory plan: " + "; ".join(wrong))
