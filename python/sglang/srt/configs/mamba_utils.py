"""Parameters of the recurrent-state cache: shapes, dtypes, layers, and bytes per request slot."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from sglang.srt.configs.linear_state import (
    KimiLinearStateShape,
    Mamba2StateShape,
    extra_groups_for_head_shards,
)
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.environ import envs

__all__ = [
    "BaseLinearStateParams",
    "KimiLinearCacheParams",
    "KimiLinearStateShape",
    "Mamba2CacheParams",
    "Mamba2StateDType",
    "Mamba2StateShape",
    "extra_groups_for_head_shards",
    "mamba2_state_dtype",
    "mamba_cache_params",
]

logger = logging.getLogger(__name__)

_STATE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(kw_only=True, frozen=True)
class Mamba2StateDType:
    """Element types of the conv windows and of the recurrent state."""

    conv: torch.dtype
    temporal: torch.dtype


def mamba2_state_dtype(config: Any = None) -> Mamba2StateDType:
    """Choose the state dtypes.

    Conv: ``SGLANG_MAMBA_CONV_DTYPE``, bfloat16 for text that names no dtype. Recurrent state: float32,
    then ``mamba_ssm_dtype`` of ``config.text_config`` or else of ``config``, then
    ``SGLANG_MAMBA_SSM_DTYPE``. A name that is no dtype is warned about and skipped.
    """
    conv = _STATE_DTYPES.get(str(envs.SGLANG_MAMBA_CONV_DTYPE.get()), torch.bfloat16)
    temporal = torch.float32
    sources = (
        (_config_ssm_dtype(config), "mamba_ssm_dtype in config"),
        (envs.SGLANG_MAMBA_SSM_DTYPE.get(), "environment variable SGLANG_MAMBA_SSM_DTYPE"),
    )
    for name, where in sources:
        if name is None:
            continue
        if name in _STATE_DTYPES:
            temporal = _STATE_DTYPES[name]
        else:
            logger.warning(
                "Invalid value %r of %s; use one of %s. Keeping %s.",
                name,
                where,
                ", ".join(_STATE_DTYPES),
                temporal,
            )
    return Mamba2StateDType(conv=conv, temporal=temporal)


def _config_ssm_dtype(config: Any) -> str | None:
    if config is None:
        return None
    for holder in (getattr(config, "text_config", None), config):
        name = getattr(holder, "mamba_ssm_dtype", None)
        if name is not None:
            return name
    return None


@dataclass(kw_only=True, frozen=True)
class BaseLinearStateParams:
    """What a state pool stores for each request slot: one entry of every layer in ``layers``."""

    shape: Mamba2StateShape | KimiLinearStateShape
    dtype: Mamba2StateDType = field(default_factory=mamba2_state_dtype)
    layers: list[int]

    is_kda = False

    @property
    def mamba_cache_per_req(self) -> int:
        """Bytes of one slot over all layers: conv windows and recurrent state."""
        conv = sum(prod(shape) for shape in self.shape.conv) * self.dtype.conv.itemsize
        temporal = prod(self.shape.temporal) * self.dtype.temporal.itemsize
        return (conv + temporal) * len(self.layers)

    def replayssm_ring_bytes_per_req(self, record_len: int) -> int:
        """Bytes of one slot's ReplaySSM ring of ``record_len`` raw steps over all layers.

        A step keeps raw v and raw k in the conv dtype, the gate and beta of each value head in fp32.
        """
        heads, v_dim, k_dim = self.shape.temporal
        raw = (heads * v_dim + self.shape.num_k_heads_per_tp * k_dim) * self.dtype.conv.itemsize
        gate_dims = k_dim if self.is_kda else 1
        gates = heads * (gate_dims + 1) * torch.float32.itemsize
        return (raw + gates) * record_len * len(self.layers)


@dataclass(kw_only=True, frozen=True)
class Mamba2CacheParams(BaseLinearStateParams):
    """State of Gated-DeltaNet (and Mamba-2) layers."""

    shape: Mamba2StateShape


@dataclass(kw_only=True, frozen=True)
class KimiLinearCacheParams(BaseLinearStateParams):
    """State of KDA layers, whose decay is per key channel."""

    shape: KimiLinearStateShape

    is_kda = True


def mamba_cache_params(
    model_config: ModelConfig,
    *,
    tp_size: int = 1,
    conv_dtype: str | torch.dtype | None = None,
    ssm_dtype: str | torch.dtype | None = None,
) -> Mamba2CacheParams:
    """State parameters of a target model on one of ``tp_size`` ranks.

    ``conv_dtype`` and ``ssm_dtype`` come from flags and win over environment and config.
    Raises: ValueError for an unknown dtype name; AssertionError when heads do not divide.
    """
    chosen = mamba2_state_dtype(model_config)
    shape = Mamba2StateShape.create(
        tp_world_size=tp_size,
        intermediate_size=model_config.value_dim,
        n_groups=model_config.linear_num_key_heads,
        num_heads=model_config.linear_num_value_heads,
        head_dim=model_config.linear_value_head_dim,
        state_size=model_config.linear_key_head_dim,
        conv_kernel=model_config.linear_conv_kernel_dim,
    )
    return Mamba2CacheParams(
        shape=shape,
        layers=list(model_config.linear_layer_ids),
        dtype=Mamba2StateDType(
            conv=_as_dtype(conv_dtype, chosen.conv, "SGLANG_MAMBA_CONV_DTYPE"),
            temporal=_as_dtype(ssm_dtype, chosen.temporal, "--mamba-ssm-dtype"),
        ),
    )


def _as_dtype(value: str | torch.dtype | None, default: torch.dtype, source: str) -> torch.dtype:
    if value is None:
        return default
    if isinstance(value, torch.dtype):
        return value
    if value not in _STATE_DTYPES:
        raise ValueError(f"{source} {value!r} is not one of {', '.join(_STATE_DTYPES)}")
    return _STATE_DTYPES[value]
