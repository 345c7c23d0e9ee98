"""What a linear-attention kernel declares and offers to the backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PrefillTrack:
    """Boundary states of a prefill: store the state after rows[i] tokens at dests[i]; -1 none.

    rows [N] on the host, dests [N] int64 on the device.
    """

    rows: Sequence[int]
    dests: torch.Tensor


class LinearAttnKernelBase(ABC):
    """One implementation. Class attributes say what it covers; selection reads only them."""

    name: str
    supports_packed_decode: bool = False
    supports_target_verify: bool = False
    supports_tree_verify: bool = False
    records_update_tuples: bool = False
    supports_strided_target_verify_qkv: bool = False

    @abstractmethod
    def decode(
        self,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        num_v_heads: int,
        head_v_dim: int,
        ssm_states: torch.Tensor,
        cache_indices: torch.Tensor,
    ) -> torch.Tensor:
        """One token a request from packed rows [N, width]; advances slots; returns [N, HV, V]."""

    @abstractmethod
    def extend(
        self,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        ssm_states: torch.Tensor,
        cache_indices: torch.Tensor,
        lengths: Sequence[int],
        track: PrefillTrack | None,
    ) -> torch.Tensor:
        """Packed prompts q, k [T, H, K], v [T, HV, V]; advances slots; returns [T, HV, V]."""
