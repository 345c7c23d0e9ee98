"""Norms, gates and rotation as one launch each, for tensors that Triton serves.

Shapes: T rows, H hidden size, N heads, d head dim. Last dims are contiguous; other strides are free.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.kernels import triton_support

if triton_support.AVAILABLE:
    from sglang.kernels.ops.fused.row_kernels import (
        gated_norm_kernel,
        norm_rope_kernel,
        rms_norm_kernel,
        sigmoid_mul_kernel,
        silu_mul_kernel,
    )

_SILU_BLOCK = 1024


def _block(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _warps(block: int) -> int:
    return max(1, min(8, block // 256))


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool) -> Tensor:
    """``x * rsqrt(mean(x^2) + eps) * scale`` over the last axis of x [..., H]; scale is 1 + weight with
    ``unit_offset``. Returns x's shape and dtype, contiguous."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        _launch_norm(rows, None, weight, out, out, eps, unit_offset)
    return out.view(x.shape)


def add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, *, unit_offset: bool
) -> tuple[Tensor, Tensor]:
    """(norm(x + delta), x + delta) of x, delta [T, H]; the sum is rounded to x's dtype before the norm."""
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = torch.empty_like(total)
    if out.numel():
        _launch_norm(x, delta, weight, total, out, eps, unit_offset)
    return out, total


def _launch_norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    total: Tensor,
    out: Tensor,
    eps: float,
    unit_offset: bool,
) -> None:
    size = x.shape[-1]
    added = x if delta is None else delta
    rms_norm_kernel[(x.shape[0],)](
        x,
        added,
        weight,
        total,
        out,
        x.stride(0),
        added.stride(0),
        total.stride(0),
        out.stride(0),
        size,
        eps,
        UNIT_OFFSET=unit_offset,
        HAS_DELTA=delta is not None,
        BLOCK=_block(size),
        num_warps=_warps(_block(size)),
    )


def gated_rms_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float, *, activation: str) -> Tensor:
    """``norm(o) * weight * act(z)`` per head of o, z [T, N, d]; "silu" or "sigmoid". [T, N, d] as z's dtype."""
    num_rows, num_heads, size = o.shape
    out = torch.empty(o.shape, dtype=z.dtype, device=z.device)
    if out.numel():
        gated_norm_kernel[(num_rows, num_heads)](
            o,
            z,
            weight,
            out,
            o.stride(0),
            o.stride(1),
            z.stride(0),
            z.stride(1),
            num_heads,
            size,
            eps,
            SILU=activation == "silu",
            BLOCK=_block(size),
            num_warps=1,
        )
    return out


def norm_rope(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    eps: float,
    *,
    unit_offset: bool,
) -> Tensor:
    """RMSNorm per head of x [T, N, d], rounded to x's dtype, then NeoX rotation of the first dims.

    cos, sin [positions, r / 2] fp32, contiguous: dims j and j + r / 2 turn together; positions [T] int64.
    Returns [T, N, d] in x's dtype.
    """
    num_rows, num_heads, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        norm_rope_kernel[(num_rows, num_heads)](
            x,
            weight,
            cos,
            sin,
            positions,
            out,
            x.stride(0),
            x.stride(1),
            num_heads,
            size,
            cos.shape[1],
            eps,
            UNIT_OFFSET=unit_offset,
            BLOCK=_block(size),
            num_warps=1,
        )
    return out


def silu_mul(both: Tensor) -> Tensor:
    """``silu(gate) * up`` of both [T, 2I], gate columns first. Returns [T, I]."""
    num_rows, size = both.shape[0], both.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=both.dtype, device=both.device)
    if out.numel():
        block = min(_SILU_BLOCK, _block(size))
        grid = (num_rows, -(-size // block))
        silu_mul_kernel[grid](both, out, both.stride(0), size, BLOCK=block)
    return out


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """``x * sigmoid(gate)`` of x, gate [T, N, d]. Returns [T, N, d] in x's dtype."""
    num_rows, num_heads, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        sigmoid_mul_kernel[(num_rows, num_heads)](
            x,
            gate,
            out,
            x.stride(0),
            x.stride(1),
            gate.stride(0),
            gate.stride(1),
            num_heads,
            size,
            BLOCK=_block(size),
            num_warps=1,
        )
    return out
