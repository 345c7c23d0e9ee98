"""Bring states forward over the accepted steps of a verify, from recorded update tuples.

The result equals the state snapshot at the same step bit for bit: the state update is one rounded
multiply and one fused multiply-add per step, here and in every verify.
"""

from __future__ import annotations

import torch

from sglang.kernels import triton_support
from sglang.kernels.launch_overlap import overlapping
from sglang.kernels.ops.cpu import replay as cpu_replay
from sglang.kernels.ops.mamba.row_rules import (
    check_index_vectors,
    drop_committed_targets,
)

if triton_support.AVAILABLE:
    from sglang.kernels.ops.mamba import replay_kernels

_BLOCK_V = 32
_NUM_WARPS = 4
_BLOCK_N = 64


def _check_shapes(states: torch.Tensor, u: torch.Tensor, k: torch.Tensor, g: torch.Tensor) -> None:
    if states.dim() != 5 or u.dim() != 5 or k.dim() != 5 or g.dim() != 4:
        raise ValueError(
            "expected states [L,S,HV,V,K], u [L,R,D,HV,V], k [L,R,D,HV,K], g [L,R,D,HV], got "
            f"{tuple(states.shape)}, {tuple(u.shape)}, {tuple(k.shape)}, {tuple(g.shape)}"
        )
    num_layers, _, num_heads, dim_v, dim_k = states.shape
    lead = (num_layers, *g.shape[1:3], num_heads)
    wanted = {"u": (*lead, dim_v), "k": (*lead, dim_k), "g": lead}
    for name, tensor in (("u", u), ("k", k), ("g", g)):
        if tuple(tensor.shape) != wanted[name]:
            raise ValueError(f"{name} must be {wanted[name]}, got {tuple(tensor.shape)}")
        if tensor.dtype != torch.float32:
            raise ValueError(f"{name} must be float32, got {tensor.dtype}")
        if tensor.device != states.device:
            raise ValueError(f"{name} is on {tensor.device}, states on {states.device}")
        if tensor.numel() and tensor.stride(-1) != 1:
            raise ValueError(f"last dim of {name} must be contiguous, got {tensor.stride()}")
    if states.numel() and states.stride()[2:] != (dim_v * dim_k, dim_k, 1):
        raise ValueError(f"entries of states must be contiguous, got strides {states.stride()}")


def _launch(
    states: torch.Tensor,
    u: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    steps: torch.Tensor,
    dests: torch.Tensor | None,
    track_dests: torch.Tensor | None,
    track_steps: torch.Tensor | None,
    use_ptx: bool | None,
) -> None:
    num_layers, num_slots, num_heads, dim_v, dim_k = states.shape
    grid = (num_heads * -(-dim_v // _BLOCK_V), slots.numel(), num_layers)
    replay_kernels.replay_tuples_kernel[grid](
        states,
        u,
        k,
        g,
        rows,
        slots,
        steps,
        dests,
        track_dests,
        track_steps,
        slots.numel(),
        num_slots,
        g.shape[1],
        g.shape[2],
        states.stride(0),
        states.stride(1),
        *u.stride()[:3],
        *k.stride()[:3],
        *g.stride()[:3],
        HV=num_heads,
        K=dim_k,
        V=dim_v,
        BK=1 << (dim_k - 1).bit_length(),
        BV=min(1 << (dim_v - 1).bit_length(), _BLOCK_V),
        HAS_DESTS=dests is not None,
        HAS_TRACK=track_dests is not None,
        BLOCK_N=_BLOCK_N,
        PTX=triton_support.use_inline_ptx() if use_ptx is None else use_ptx,
        **overlapping(states),
        num_warps=_NUM_WARPS,
    )


def replay_tuples(
    states: torch.Tensor,
    u: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    steps: torch.Tensor,
    dests: torch.Tensor | None = None,
    use_ptx: bool | None = None,
) -> None:
    """states[:, dests[i]] = states[:, slots[i]] advanced by steps 0..steps[i] of scratch row rows[i].

    Shapes: states [L, S, HV, V, K] fp32 or bf16, only named slots change; u [L, R, D, HV, V],
    k [L, R, D, HV, K], g [L, R, D, HV] fp32; index vectors [n], any integer dtype. dests None is in place.
    use_ptx None picks the form for the device. Invalid rows are skipped (`row_rules`). No host wait on
    accelerators. Raises: ValueError on a shape, dtype or device disagreement.
    """
    _check_shapes(states, u, k, g)
    vectors = {"pool_indices": rows, "cache_indices": slots, "step_indices": steps}
    if dests is not None:
        vectors["dest_indices"] = dests
    if check_index_vectors(device=states.device, **vectors) == 0 or states.numel() == 0:
        return
    if triton_support.runs_on(states):
        rows, slots, steps = rows.contiguous(), slots.contiguous(), steps.contiguous()
        dests = None if dests is None else dests.contiguous()
        _launch(states, u, k, g, rows, slots, steps, dests, None, None, use_ptx)
        return
    replay = cpu_replay.replay_tuples
    replay(states, u, k, g, rows, slots, steps, slots if dests is None else dests)


def commit_tuples(
    states: torch.Tensor,
    u: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    steps: torch.Tensor,
    track_dests: torch.Tensor | None,
    track_steps: torch.Tensor | None,
) -> None:
    """Store boundary states and advance working slots in place: track first, then in place, one launch.

    Arguments as `replay_tuples`; track_dests and track_steps [n] or None. A track destination that is a
    working slot committed in the same call is skipped: the working slot keeps the committed state.
    """
    if track_dests is None or track_steps is None:
        replay_tuples(states, u, k, g, rows, slots, steps)
        return
    _check_shapes(states, u, k, g)
    n = check_index_vectors(
        device=states.device,
        pool_indices=rows,
        cache_indices=slots,
        step_indices=steps,
        track_indices=track_dests,
        track_steps=track_steps,
    )
    if n == 0 or states.numel() == 0:
        return
    if triton_support.runs_on(states):
        _launch(
            states,
            u,
            k,
            g,
            rows.contiguous(),
            slots.contiguous(),
            steps.contiguous(),
            None,
            track_dests.contiguous(),
            track_steps.contiguous(),
            None,
        )
        return
    track_steps = drop_committed_targets(
        track_steps, track_dests, steps, slots, num_steps=g.shape[2]
    )
    replay = cpu_replay.replay_tuples
    replay(states, u, k, g, rows, slots, track_steps, track_dests)
    replay(states, u, k, g, rows, slots, steps, slots)
