"""What a linear-attention kernel declares and offers to the backends."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from sglang.kernels.ops.attention.fla.prefill_plan import PrefillPlan


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
        plan: PrefillPlan,
        track_dests: torch.Tensor | None,
    ) -> torch.Tensor:
        """Packed prompts q, k [T, H, K], v [T, HV, V], any token stride; advances slots; returns [T, HV, V].

        track_dests [N]: slots for the states at the plan's cuts, -1 none.
        """
