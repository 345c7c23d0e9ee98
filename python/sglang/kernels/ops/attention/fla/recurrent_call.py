"""Checks and launch shared by every public form of the recurrent kernel."""

from __future__ import annotations

import torch

from sglang.kernels import triton_support
from sglang.kernels.launch_overlap import overlapping
from sglang.kernels.ops.attention.fla.recurrent_launch import NUM_STAGES, RecurrentLaunch

if triton_support.AVAILABLE:
    from sglang.kernels.ops.attention.fla import recurrent_kernel


def require_kernel(tensor: torch.Tensor) -> None:
    """Raises: ValueError for a CPU tensor outside the interpreter."""
    if not triton_support.runs_on(tensor):
        raise ValueError(
            f"tensors are on {tensor.device}; this op serves accelerators, "
            "CPU tensors are served by sglang.kernels.ops.cpu"
        )


def check_heads(name: str, tensor: torch.Tensor) -> None:
    """Raises: ValueError unless heads are adjacent and their elements contiguous."""
    if tensor.dim() != 4:
        raise ValueError(f"{name} must be [B, T, heads, dim], got shape {tuple(tensor.shape)}")
    if tensor.stride(-1) != 1 or (tensor.shape[2] > 1 and tensor.stride(2) != tensor.shape[3]):
        raise ValueError(f"heads of {name} must be adjacent, got strides {tensor.stride()}")


def token_stride(name: str, tensor: torch.Tensor, heads: int) -> int:
    """Stride of the token axis of a per-head vector [T, HV] or [1, T, HV].

    Raises: ValueError for another shape or a strided last axis.
    """
    if tensor.dim() == 4 and tensor.shape[-1] == 1:
        tensor = tensor[..., 0]
    if tensor.dim() not in (2, 3) or tensor.shape[-1] != heads or tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} must be [T, {heads}] or [B, T, {heads}] with a contiguous last axis, "
            f"got shape {tuple(tensor.shape)} strides {tensor.stride()}"
        )
    if tensor.dim() == 3 and tensor.shape[0] > 1:
        if tensor.stride(0) != tensor.shape[1] * tensor.stride(1):
            raise ValueError(f"batches of {name} must be adjacent, got strides {tensor.stride()}")
    return tensor.stride(-2)


def launch_recurrent(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    out: torch.Tensor,
    states: torch.Tensor | None,
    slots: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    snapshots: torch.Tensor | None,
    tuples: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    rows: torch.Tensor | None,
    parents: torch.Tensor | None,
    scale: float,
    write_state: bool,
    cache_steps: int | None,
    softplus_beta: float,
    softplus_threshold: float,
    l2_norm: bool,
    gates_given: bool,
    launch: RecurrentLaunch,
) -> None:
    """Run the kernel. q/k [B, T, H, K], v [B, T, HV, V]; a/b per `token_stride`; out like v, contiguous.

    Buffers that are absent are replaced by valid pointers which the run-time flags keep unused.
    """
    _, num_tokens, num_k_heads, dim_k = q.shape
    num_v_heads, dim_v = v.shape[2], v.shape[3]
    num_requests = q.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    if num_requests == 0 or v.numel() == 0:
        return
    plane = dim_k * dim_v
    pitch, num_rows = cache_steps or num_tokens, 0
    if snapshots is not None:
        pitch = snapshots.stride(0) // (num_v_heads * plane)
        num_rows = snapshots.shape[0]
    elif tuples is not None:
        pitch, num_rows = tuples[0].shape[1], tuples[0].shape[0]
    if rows is None:
        num_rows = 0
    block_k = 1 << (dim_k - 1).bit_length()
    unused = a_log if states is None else states
    u_ring, k_ring, g_ring = tuples if tuples is not None else (a_log, a_log, a_log)
    any_index = rows if rows is not None else slots
    if any_index is None:
        any_index = torch.zeros(num_requests, dtype=torch.int32, device=q.device)
    grid = (-(-dim_v // launch.block_v), num_requests, num_v_heads)
    recurrent_kernel.recurrent_step_kernel[grid](
        q,
        k,
        v,
        a,
        b,
        a_log,
        dt_bias,
        out,
        unused if states is None else states,
        any_index if slots is None else slots,
        cu_seqlens,
        unused if snapshots is None else snapshots,
        u_ring,
        k_ring,
        g_ring,
        any_index,
        parents,
        scale,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        token_stride("a", a, num_v_heads),
        token_stride("b", b, num_v_heads),
        0 if parents is None else parents.stride(0),
        0 if states is None else states.stride(0),
        num_tokens,
        0 if states is None else states.shape[0],
        num_rows,
        pitch,
        int(write_state),
        int(snapshots is not None),
        int(tuples is not None),
        SOFTPLUS_BETA=softplus_beta,
        SOFTPLUS_THRESHOLD=softplus_threshold,
        H=num_k_heads,
        HV=num_v_heads,
        K=dim_k,
        V=dim_v,
        BK=block_k,
        BV=launch.block_v,
        HAS_STATE=states is not None,
        VARLEN=cu_seqlens is not None,
        L2_NORM=l2_norm,
        GATES_GIVEN=gates_given,
        TREE=parents is not None,
        PTX=triton_support.use_inline_ptx(),
        **overlapping(q),
        num_warps=launch.num_warps,
        num_stages=NUM_STAGES,
    )
