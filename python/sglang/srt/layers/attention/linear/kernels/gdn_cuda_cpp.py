"""GDN decode and chain verify through the CUDA C++ kernel; the rest as in Triton.

Decode and verify take the same kernel, so that a verify that accepts one token leaves what a decode leaves.
"""

from __future__ import annotations

import torch

from sglang.kernels.ops.gdn_cuda.module import HEAD_DIM, MAX_DRAFT_TOKENS
from sglang.kernels.ops.gdn_cuda.verify import VerifyInputs, run_verify, unsupported_reason
from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel


class CudaCppGDNKernel(TritonGDNKernel):
    """Covers head dim 128, bf16 activations and chains of at most 32 drafts on compute capability 9.0+.

    Which implementation runs depends on shapes and dtypes alone, never on what is recorded.
    """

    name = "cuda_cpp"

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
        num_v_heads = out.shape[2]
        value_width = num_v_heads * out.shape[3]
        key_width = (mixed_qkv.shape[1] - value_width) // 2
        if ssm_states.shape[-1] == HEAD_DIM and out.shape[3] == HEAD_DIM:
            parts = mixed_qkv.split((key_width, key_width, value_width), dim=-1)
            q, k, v = (part.unflatten(-1, (-1, HEAD_DIM)) for part in parts)
            x = VerifyInputs(q, k, v, a, b, A_log, dt_bias, ssm_states, cache_indices, None)
            if unsupported_reason(x) is None:
                out[:, 0] = run_verify(x, scale=scale, write_state=True)
                return out
        return super().packed_decode(
            mixed_qkv, a, b, A_log, dt_bias, scale, ssm_states, out, cache_indices
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
        num_requests = query_start_loc.shape[0] - 1
        is_chain = retrieve_parent_token is None and cache_steps <= MAX_DRAFT_TOKENS
        if is_chain and q.shape[1] == num_requests * cache_steps:
            x = VerifyInputs(
                q[0],
                k[0],
                v[0],
                a,
                b,
                A_log,
                dt_bias,
                ssm_states,
                cache_indices[:num_requests],
                intermediate_state_indices,
            )
            if unsupported_reason(x) is None:
                tuples = None
                if u_states_buffer is not None:
                    tuples = (u_states_buffer, k_states_buffer, g_states_buffer)
                out = run_verify(
                    x,
                    scale=q.shape[-1] ** -0.5,
                    snapshots=intermediate_states_buffer,
                    tuples=tuples,
                )
                return out[None]
        return super().target_verify(
            A_log,
            dt_bias,
            q,
            k,
            v,
            a,
            b,
            ssm_states=ssm_states,
            cache_indices=cache_indices,
            query_start_loc=query_start_loc,
            intermediate_states_buffer=intermediate_states_buffer,
            intermediate_state_indices=intermediate_state_indices,
            cache_steps=cache_steps,
            retrieve_parent_token=retrieve_parent_token,
            u_states_buffer=u_states_buffer,
            k_states_buffer=k_states_buffer,
            g_states_buffer=g_states_buffer,
            stable_rows=stable_rows,
        )
