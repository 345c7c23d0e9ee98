"""Small state pools and requests for tests of the pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sglang.srt.configs.mamba_utils import (
    BaseLinearStateParams,
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.mem_cache.memory_pool import MambaPool, get_tensor_size_bytes
from sglang.srt.mem_cache.req_kv import ReqKV

LAYERS = [0, 1, 4]


@dataclass(eq=False)
class FakeReq:
    """What the request pools know of a request."""

    kv: ReqKV = field(default_factory=ReqKV)


def params(
    heads: int = 4,
    groups: int = 2,
    layers: Sequence[int] = LAYERS,
    ssm: torch.dtype = torch.float32,
    k: int = 16,
    v: int = 8,
) -> Mamba2CacheParams:
    """State of ``heads`` value heads in ``groups`` key heads; head dims ``k`` and ``v``."""
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=heads * v,
        n_groups=groups,
        num_heads=heads,
        head_dim=v,
        state_size=k,
        conv_kernel=4,
    )
    return Mamba2CacheParams(
        shape=shape,
        layers=list(layers),
        dtype=Mamba2StateDType(conv=torch.bfloat16, temporal=ssm),
    )


def pool(
    draft_tokens: int | None = 4,
    topk: int | None = 1,
    lossless: bool = False,
    rows: int = 5,
    size: int = 6,
    p: BaseLinearStateParams | None = None,
    **kwargs: object,
) -> MambaPool:
    """``size`` state slots and ``rows`` verify rows, each beside the padding one."""
    p = p or params()
    return MambaPool(
        size=size,
        spec_state_size=rows,
        cache_params=p,
        mamba_layer_ids=p.layers,
        device="cpu",
        speculative_num_draft_tokens=draft_tokens,
        speculative_eagle_topk=topk,
        enable_linear_lossless_verify=lossless,
        **kwargs,
    )


def scratch_storage(made: MambaPool) -> int:
    """Bytes that the verify scratch really takes."""
    cache = made.mamba_cache
    names = ("intermediate_ssm", "intermediate_ssm_u", "intermediate_ssm_k", "intermediate_ssm_g")
    ssm = [t for t in (getattr(cache, name) for name in names) if t is not None]
    return get_tensor_size_bytes(ssm) + get_tensor_size_bytes(made._intermediate_conv_window_phys)
