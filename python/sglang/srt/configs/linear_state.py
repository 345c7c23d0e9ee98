"""Shapes of the recurrent state of linear-attention layers, per tensor-parallel rank. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
}


def dtype_bytes(name: str) -> int:
    """Bytes of one element; raises ValueError for a name we do not store."""
    if name not in DTYPE_BYTES:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]


def _split(total: int, parts: int, what: str) -> int:
    assert total % parts == 0, f"{what} {total} is not divisible by the TP size {parts}"
    return total // parts


def extra_groups_for_head_shards(ngroups: int, tp_size: int) -> int:
    """Groups to add so that every rank holds one; negative when there are more groups than ranks.

    >>> extra_groups_for_head_shards(16, 4), extra_groups_for_head_shards(2, 4)
    (0, 2)
    """
    return 0 if ngroups % tp_size == 0 else tp_size - ngroups


@dataclass(kw_only=True, frozen=True)
class Mamba2StateShape:
    """Per-rank shapes of one layer and one slot.

    ``conv`` lists ``(channels, window)`` with the window last; ``temporal`` is ``(HV, V, K)``.
    """

    conv: list[tuple[int, int]]
    temporal: tuple[int, int, int]
    disable_conv_window_dedup: bool = False
    intermediate_size: int
    conv_dim: int
    ssm_state_size: int
    num_heads: int
    head_dim: int
    state_size: int
    conv_kernel: int
    num_k_heads_per_tp: int = 1
    conv_shard_groups: Any = None

    conv_slice_axis = 0

    @staticmethod
    def create(
        *,
        tp_world_size: int,
        intermediate_size: int,
        n_groups: int,
        num_heads: int,
        head_dim: int,
        state_size: int,
        conv_kernel: int,
        conv_shard_groups: Any = None,
    ) -> Mamba2StateShape:
        """Shard a layer over ``tp_world_size`` ranks.

        ``intermediate_size`` is HV*V, ``n_groups`` the key heads, ``num_heads`` HV, ``head_dim`` V and
        ``state_size`` K of the whole model. Raises: AssertionError when channels or heads do not
        divide.
        """
        groups = n_groups + extra_groups_for_head_shards(n_groups, tp_world_size)
        conv_dim = intermediate_size + 2 * groups * state_size
        channels = _split(conv_dim, tp_world_size, "conv channels")
        heads = _split(num_heads, tp_world_size, "value heads")
        return Mamba2StateShape(
            conv=[(channels, conv_kernel - 1)],
            temporal=(heads, head_dim, state_size),
            intermediate_size=intermediate_size,
            conv_dim=conv_dim,
            ssm_state_size=state_size,
            num_heads=num_heads,
            head_dim=head_dim,
            state_size=state_size,
            conv_kernel=conv_kernel,
            num_k_heads_per_tp=max(1, groups // tp_world_size),
            conv_shard_groups=conv_shard_groups,
        )


@dataclass(kw_only=True, frozen=True)
class KimiLinearStateShape:
    """Per-rank shapes of a KDA layer: conv is ``(window, channels)``, so windows cannot overlap."""

    conv: list[tuple[int, int]]
    temporal: tuple[int, int, int]
    disable_conv_window_dedup: bool = True
    num_heads: int
    head_dim: int
    num_k_heads: int
    head_k_dim: int
    conv_kernel: int
    num_k_heads_per_tp: int = 1

    conv_slice_axis = 1

    @staticmethod
    def create(
        *,
        tp_world_size: int,
        num_heads: int,
        head_dim: int,
        num_k_heads: int | None = None,
        head_k_dim: int | None = None,
        conv_kernel_size: int = 4,
    ) -> KimiLinearStateShape:
        """Shard a KDA layer. Raises: AssertionError when heads do not divide."""
        k_heads = num_heads if num_k_heads is None else num_k_heads
        k_dim = head_dim if head_k_dim is None else head_k_dim
        channels = num_heads * head_dim + 2 * k_heads * k_dim
        return KimiLinearStateShape(
            conv=[(conv_kernel_size - 1, _split(channels, tp_world_size, "conv channels"))],
            temporal=(_split(num_heads, tp_world_size, "value heads"), head_dim, k_dim),
            num_heads=num_heads,
            head_dim=head_dim,
            num_k_heads=k_heads,
            head_k_dim=k_dim,
            conv_kernel=conv_kernel_size,
            num_k_heads_per_tp=max(1, k_heads // tp_world_size),
        )
