"""GDN through the portable Triton kernels; the reference on every accelerator."""

from __future__ import annotations

import torch

from sglang.kernels.ops.attention.fla.fused_recurrent import (
    fused_recurrent_gated_delta_rule_packed_decode,
)
from sglang.kernels.ops.attention.fla.fused_sigmoid_gating_recurrent import (
    fused_sigmoid_gating_delta_rule_update,
)
from sglang.kernels.ops.attention.fla.gdn_prefill import gdn_prefill
from sglang.kernels.ops.attention.fla.prefill_plan import PrefillPlan, PrefillTokens
from sglang.srt.layers.attention.linear.kernels.kernel_base import LinearAttnKernelBase


class TritonGDNKernel(LinearAttnKernelBase):
    """Decode, verify (chain and tree, snapshots and tuples) and chunked prefill."""

    name = "triton"
    supports_packed_decode = True
    supports_target_verify = True
    supports_tree_verify = True
    records_update_tuples = True
    supports_strided_target_verify_qkv = True

    def packed_decode(
        self,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        scale: float,
        ssm_states: torch.Tensor,
        out: torch.Tensor,
        cache_indices: torch.Tensor,
    ) -> torch.Tensor:
        """One token a request; out [N, 1, HV, V]; advances slots in place."""
        fused_recurrent_gated_delta_rule_packed_decode(
            mixed_qkv,
            a,
            b,
            A_log,
            dt_bias,
            scale,
            ssm_states,
            out,
            cache_indices,
            use_qk_l2norm_in_kernel=True,
        )
        return out

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
        shape = (mixed_qkv.shape[0], 1, num_v_heads, head_v_dim)
        out = torch.empty(shape, dtype=mixed_qkv.dtype, device=mixed_qkv.device)
        scale = ssm_states.shape[-1] ** -0.5
        self.packed_decode(mixed_qkv, a, b, A_log, dt_bias, scale, ssm_states, out, cache_indices)
        return out[:, 0]

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
        return gdn_prefill(
            PrefillTokens(q, k, v, a, b, A_log, dt_bias),
            ssm_states,
            cache_indices,
            plan,
            scale=q.shape[-1] ** -0.5,
            track_dests=track_dests,
        )

    def target_verify(
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
        query_start_loc: torch.Tensor,
        intermediate_states_buffer: torch.Tensor | None,
        intermediate_state_indices: torch.Tensor,
        cache_steps: int,
        retrieve_parent_token: torch.Tensor | None,
        u_states_buffer: torch.Tensor | None = None,
        k_states_buffer: torch.Tensor | None = None,
        g_states_buffer: torch.Tensor | None = None,
        stable_rows: bool = False,
    ) -> torch.Tensor:
        """Run the drafts of every request and record each step; the slots stay as they are.

        q, k [1, T, H, K], v [1, T, HV, V], any token stride; a, b [T, HV]. Either the snapshot buffer or all
        three tuple buffers. stable_rows says that scratch rows are request rows; this kernel needs no more
        than the rows themselves. Returns [1, T, HV, V].
        """
        tuples: dict[str, torch.Tensor] = {}
        if u_states_buffer is not None:
            tuples = {
                "u_states_buffer": u_states_buffer,
                "k_states_buffer": k_states_buffer,
                "g_states_buffer": g_states_buffer,
            }
        return fused_sigmoid_gating_delta_rule_update(
            A_log=A_log,
            a=a,
            dt_bias=dt_bias,
            softplus_beta=1.0,
            softplus_threshold=20.0,
            q=q,
            k=k,
            v=v,
            b=b,
            initial_state_source=ssm_states,
            initial_state_indices=cache_indices,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=query_start_loc,
            disable_state_update=True,
            intermediate_states_buffer=intermediate_states_buffer,
            intermediate_state_indices=intermediate_state_indices,
            cache_steps=cache_steps,
            retrieve_parent_token=retrieve_parent_token,
            **tuples,
        )
