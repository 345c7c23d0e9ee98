"""The gated delta rule with gates given, and decode from a packed qkv row."""

from __future__ import annotations

import torch

from sglang.kernels.ops.attention.fla.fused_sigmoid_gating_recurrent import (
    _select_recurrent_launch_config,
)
from sglang.kernels.ops.attention.fla.recurrent_call import (
    check_heads,
    launch_recurrent,
    require_kernel,
)
from sglang.kernels.ops.attention.fla.recurrent_launch import RecurrentLaunch


def fused_recurrent_gated_delta_rule_update(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state_source: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    disable_state_update: bool = False,
    disable_output_calculation: bool = False,
    intermediate_states_buffer: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `fused_sigmoid_gating_delta_rule_update`, with log decay g and beta [B, T, HV] given.

    beta None is one. With cu_seqlens, B must be 1 and the index vectors N long.
    Raises: ValueError on a shape disagreement.
    """
    require_kernel(q)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_heads(name, tensor)
    if cu_seqlens is not None:
        if q.shape[0] != 1:
            raise ValueError(f"with cu_seqlens the batch size must be 1, got {q.shape[0]}")
        n = cu_seqlens.numel() - 1
        for name, index in (
            ("initial_state_indices", initial_state_indices),
            ("intermediate_state_indices", intermediate_state_indices),
        ):
            if index is not None and index.numel() != n:
                raise ValueError(f"{name} has {index.numel()} entries for {n} sequences")
    num_requests = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    if intermediate_states_buffer is not None and intermediate_state_indices is None:
        intermediate_state_indices = torch.arange(num_requests, dtype=torch.int32, device=q.device)
    beta = torch.ones_like(g) if beta is None else beta
    unused = torch.zeros(v.shape[2], dtype=torch.float32, device=q.device)
    out = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    launch_recurrent(
        q=q,
        k=k,
        v=v,
        a=g,
        b=beta,
        a_log=unused,
        dt_bias=unused,
        out=out,
        states=initial_state_source,
        slots=initial_state_indices,
        cu_seqlens=cu_seqlens,
        snapshots=intermediate_states_buffer,
        tuples=None,
        rows=intermediate_state_indices,
        parents=retrieve_parent_token,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        write_state=not disable_state_update,
        cache_steps=cache_steps,
        softplus_beta=1.0,
        softplus_threshold=20.0,
        l2_norm=use_qk_l2norm_in_kernel,
        gates_given=True,
        launch=RecurrentLaunch(min(1 << (v.shape[3] - 1).bit_length(), 8), 1),
    )
    return out


def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One decode token a request, read from the packed row q | k | v; states advance in place.

    mixed_qkv [B, 2*H*K + HV*V]; a, b [B, HV]; initial_state [S, HV, V, K]; out [B, 1, HV, V] contiguous.
    Returns (out, initial_state). Raises: ValueError on a shape disagreement.
    """
    require_kernel(mixed_qkv)
    if out.dim() != 4 or out.shape[1] != 1 or not out.is_contiguous():
        raise ValueError(f"out must be contiguous [B, 1, HV, V], got {tuple(out.shape)}")
    batch, _, num_v_heads, dim_v = out.shape
    dim_k = initial_state.shape[-1]
    if initial_state.dim() != 4 or initial_state.shape[1:3] != (num_v_heads, dim_v):
        raise ValueError(
            f"initial_state must be [S, {num_v_heads}, {dim_v}, K], got {tuple(initial_state.shape)}"
        )
    value_width = num_v_heads * dim_v
    if mixed_qkv.dim() != 2 or mixed_qkv.shape[0] != batch or mixed_qkv.stride(-1) != 1:
        raise ValueError(f"mixed_qkv must be [{batch}, width], got {tuple(mixed_qkv.shape)}")
    key_width, rest = divmod(mixed_qkv.shape[1] - value_width, 2)
    if rest or key_width <= 0 or key_width % dim_k:
        raise ValueError(
            f"mixed_qkv of width {mixed_qkv.shape[1]} does not hold q, k of head dim {dim_k} and {value_width} of v"
        )
    for name, gate in (("a", a), ("b", b)):
        if tuple(gate.shape) != (batch, num_v_heads):
            raise ValueError(f"{name} must be [{batch}, {num_v_heads}], got {tuple(gate.shape)}")
    if ssm_state_indices.shape != (batch,):
        raise ValueError(
            f"ssm_state_indices must be [{batch}], got {tuple(ssm_state_indices.shape)}"
        )
    num_k_heads = key_width // dim_k
    q, k, v = mixed_qkv.split((key_width, key_width, value_width), dim=-1)
    block_v, num_warps = _select_recurrent_launch_config(
        batch, num_k_heads, num_v_heads, dim_k, dim_v, False, packed_decode=True
    )
    launch_recurrent(
        q=q.unflatten(-1, (num_k_heads, dim_k)).unsqueeze(1),
        k=k.unflatten(-1, (num_k_heads, dim_k)).unsqueeze(1),
        v=v.unflatten(-1, (num_v_heads, dim_v)).unsqueeze(1),
        a=a,
        b=b,
        a_log=A_log,
        dt_bias=dt_bias,
        out=out,
        states=initial_state,
        slots=ssm_state_indices,
        cu_seqlens=None,
        snapshots=None,
        tuples=None,
        rows=None,
        parents=None,
        scale=scale,
        write_state=True,
        cache_steps=None,
        softplus_beta=1.0,
        softplus_threshold=20.0,
        l2_norm=use_qk_l2norm_in_kernel,
        gates_given=False,
        launch=RecurrentLaunch(block_v, num_warps),
    )
    return out, initial_state
