"""Fused gating and gated delta rule over a few tokens a request: decode and speculative verify."""

from __future__ import annotations

import torch

from sglang.kernels.ops.attention.fla.recurrent_call import (
    check_heads,
    launch_recurrent,
    require_kernel,
)
from sglang.kernels.ops.attention.fla.recurrent_launch import (
    RecurrentLaunch,
    RecurrentShape,
    current_device_traits,
    select_recurrent_launch,
)


def _select_recurrent_launch_config(
    n: int,
    h: int,
    hv: int,
    k: int,
    v: int,
    is_kda: bool,
    target_verify: bool = False,
    *,
    cache_steps: int = 0,
    packed_decode: bool = False,
) -> tuple[int, int]:
    """(state rows per program, warps per program); the table is in `recurrent_launch`."""
    shape = RecurrentShape(n, h, hv, k, v, target_verify, packed_decode, cache_steps, is_kda)
    chosen = select_recurrent_launch(shape, current_device_traits())
    return chosen.block_v, chosen.num_warps


def _require_gdn(is_kda: bool) -> None:
    if is_kda:
        raise ValueError("is_kda=True: this engine serves Gated-DeltaNet models only")


def fused_sigmoid_gating_delta_rule_update(
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor | None,
    initial_state_indices: torch.Tensor | None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    is_kda: bool = False,
    lower_bound: float | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
    cache_ring: bool = False,
    replayssm_rawv: torch.Tensor | None = None,
    replayssm_rawk: torch.Tensor | None = None,
    replayssm_g: torch.Tensor | None = None,
    replayssm_beta: torch.Tensor | None = None,
    match_cutedsl_decode: bool = False,
    u_states_buffer: torch.Tensor | None = None,
    k_states_buffer: torch.Tensor | None = None,
    g_states_buffer: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the gated delta rule over the tokens of each request; optionally record every step.

    Shapes (B batches or packed B=1 with cu_seqlens [N+1] int32; T tokens; H key and HV value heads):
        A_log, dt_bias [HV]; a, b [T, HV] or [1, T, HV]; q, k [B, T, H, K]; v [B, T, HV, V]
        initial_state_source [S, HV, V, K] or None; initial_state_indices [N], a slot outside 0..S-1 starts
        from zero and is not written
        intermediate_states_buffer [R, D, HV, V, K] snapshots; u/k/g_states_buffer [R, D, HV, V],
        [R, D, HV, K], [R, D, HV] fp32 update tuples; intermediate_state_indices [>= N] scratch rows, a row
        outside 0..R-1 records nothing
        retrieve_parent_token [N, T]: parent of each node; node 0 and a parent that is not an earlier node
        start from the initial state; needs the snapshot buffer
    Written: the output; recorded steps 0..T-1 of named rows; the slots unless disable_state_update.
    Returns: [like v], q's dtype. All arithmetic fp32; rounding order in docs/numerics.md.
    Raises: ValueError on unsupported options or layouts; AssertionError if scale is not positive.
    """
    _require_gdn(is_kda)
    if match_cutedsl_decode or lower_bound is not None:
        raise ValueError("match_cutedsl_decode and lower_bound belong to KDA, which is not served")
    rings = (replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta)
    if cache_ring or any(ring is not None for ring in rings):
        raise ValueError("cache_ring: ReplaySSM rings are not served; record update tuples instead")
    require_kernel(q)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_heads(name, tensor)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    assert scale > 0, f"scale must be positive, got {scale}"
    tuples = _tuple_buffers(u_states_buffer, k_states_buffer, g_states_buffer)
    records = intermediate_states_buffer is not None or tuples is not None
    num_requests = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    if records and intermediate_state_indices is None:
        intermediate_state_indices = torch.arange(num_requests, dtype=torch.int32, device=q.device)
    if retrieve_parent_token is not None and intermediate_states_buffer is None:
        raise ValueError(
            "retrieve_parent_token needs intermediate_states_buffer: parents are read there"
        )
    block_v, num_warps = _select_recurrent_launch_config(
        num_requests,
        q.shape[2],
        v.shape[2],
        q.shape[3],
        v.shape[3],
        is_kda,
        records,
        cache_steps=cache_steps or 0,
    )
    out = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    launch_recurrent(
        q=q,
        k=k,
        v=v,
        a=a,
        b=b,
        a_log=A_log,
        dt_bias=dt_bias,
        out=out,
        states=initial_state_source,
        slots=initial_state_indices,
        cu_seqlens=cu_seqlens,
        snapshots=intermediate_states_buffer,
        tuples=tuples,
        rows=intermediate_state_indices,
        parents=retrieve_parent_token,
        scale=scale,
        write_state=not disable_state_update,
        cache_steps=cache_steps,
        softplus_beta=softplus_beta,
        softplus_threshold=softplus_threshold,
        l2_norm=use_qk_l2norm_in_kernel,
        gates_given=False,
        launch=RecurrentLaunch(block_v, num_warps),
    )
    return out


def _tuple_buffers(
    u: torch.Tensor | None, k: torch.Tensor | None, g: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    if u is None and k is None and g is None:
        return None
    if u is None or k is None or g is None:
        raise ValueError("u_states_buffer, k_states_buffer and g_states_buffer go together")
    for name, tensor in (("u", u), ("k", k), ("g", g)):
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ValueError(
                f"{name}_states_buffer must be contiguous float32, got {tensor.dtype} "
                f"strides {tensor.stride()}"
            )
    return u, k, g
