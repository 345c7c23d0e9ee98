"""Norms, gates and rotation as one launch each, for tensors that Triton serves.

Shapes: T rows, H hidden size, N heads, d head dim. Last dims are contiguous; other strides are free.
Forms named ``quantized`` return the rows that quantising the plain form's result gives, in one launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang.kernels import triton_support
from sglang.kernels.launch_overlap import overlapping
from sglang.kernels.ops.fused.sums import Delta, RoutedSum, SplitSum
from sglang.kernels.ops.quantization.fp8 import quantize
from sglang.kernels.ops.quantization.rows import GROUP, NormedRows, QuantizedRows, num_groups

if triton_support.AVAILABLE:
    from sglang.kernels.ops.fused.gate_kernels import gate_mul_kernel, gated_norm_kernel
    from sglang.kernels.ops.fused.row_kernels import norm_rope_kernel, rms_norm_kernel


@dataclass(frozen=True)
class GateLaunch:
    """How the gated norm and the gates run; no choice changes a bit of heads of whole groups of 128 columns,
    as long as a thread holds 8 elements or more.

    elements  of a program, which holds several heads or groups
    pairs     bf16 rows in the short forms of `pair_arith.py`, in place of the exact ones
    """

    elements: int
    num_warps: int
    pairs: bool = True


GATED_NORM = GateLaunch(1024, 2)
GATE_MUL = GateLaunch(2048, 4)


def _block(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool) -> Tensor:
    """``x * rsqrt(mean(x^2) + eps) * scale`` over the last axis of x [..., H]; scale is 1 + weight with
    ``unit_offset``. Returns x's shape and dtype, contiguous."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    _launch_norm(rows, None, weight, out, out, None, eps, unit_offset)
    return out.view(x.shape)


def add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, *, unit_offset: bool
) -> tuple[Tensor, Tensor]:
    """(norm(x + delta), x + delta) of x, delta [T, H]; the sum is rounded to x's dtype before the norm."""
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = torch.empty_like(total)
    _launch_norm(x, delta, weight, total, out, None, eps, unit_offset)
    return out, total


def norm_rows(
    x: Tensor,
    delta: Delta | None,
    weight: Tensor,
    eps: float,
    *,
    unit_offset: bool,
    plain: bool,
    quantized: bool,
    pairs: bool | None = None,
) -> tuple[NormedRows, Tensor]:
    """(norm(x + delta) in the forms asked for; x + delta) of x, delta [T, H].

    ``delta`` None: the norm of x, and x itself. Bits are those of ``rms_norm`` or ``add_rms_norm`` of the
    delta's total. ``pairs`` runs bf16 rows in the short forms of `pair_arith.py`, which change no bit; None:
    all but sums of experts, which take longer so when rows are few.
    """
    total = x if delta is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if plain else None
    rows = QuantizedRows.empty(*x.shape, dtype=x.dtype, device=x.device) if quantized else None
    _launch_norm(x, delta, weight, total, out, rows, eps, unit_offset, pairs)
    return NormedRows(out, rows), total


@dataclass(frozen=True)
class _DeltaArguments:
    """A delta as the kernel takes it; tensors of another kind stand where it reads nothing."""

    kind: str
    count: int
    has_shared: bool
    delta: Tensor
    weights: Tensor
    chosen: Tensor
    shared: Tensor
    gate: Tensor
    stride_row: int
    stride_split: int

    @staticmethod
    def of(delta: Delta | None, x: Tensor) -> _DeltaArguments:
        if isinstance(delta, SplitSum):
            parts = delta.parts
            return _DeltaArguments(
                "split", parts.shape[0], False, parts, x, x, x, x, parts.stride(1), parts.stride(0)
            )
        if isinstance(delta, RoutedSum):
            shared, gate = delta.shared_or_any()
            return _DeltaArguments(
                "routed",
                delta.chosen.shape[1],
                delta.shared is not None,
                delta.parts,
                delta.weights,
                delta.chosen,
                shared,
                gate,
                delta.parts.stride(0),
                0,
            )
        kind, added = ("none", x) if delta is None else ("tensor", delta)
        return _DeltaArguments(kind, 0, False, added, x, x, x, x, added.stride(0), 0)


def _launch_norm(
    x: Tensor,
    delta: Delta | None,
    weight: Tensor,
    total: Tensor,
    out: Tensor | None,
    quantized: QuantizedRows | None,
    eps: float,
    unit_offset: bool,
    pairs: bool | None = None,
) -> None:
    if not x.numel():
        return
    size = x.shape[-1]
    added = _DeltaArguments.of(delta, x)
    rounding = x if out is None else out
    values = x if quantized is None else quantized.values
    scale = weight if quantized is None else quantized.scale
    block_g = _block(num_groups(size))
    pairs = added.kind != "routed" if pairs is None else pairs
    of_pairs = (x, total, rounding, *((added.delta,) if added.kind == "tensor" else ()))
    rms_norm_kernel[(x.shape[0],)](
        x,
        added.delta,
        weight,
        total,
        rounding,
        values,
        scale,
        added.weights,
        added.chosen,
        added.shared,
        added.gate,
        x.stride(0),
        added.stride_row,
        added.stride_split,
        added.shared.stride(0),
        added.gate.stride(0),
        total.stride(0),
        rounding.stride(0),
        values.stride(0),
        scale.stride(0),
        size,
        eps,
        DELTA=added.kind,
        COUNT=added.count,
        HAS_SHARED=added.has_shared,
        UNIT_OFFSET=unit_offset,
        PLAIN=out is not None,
        QUANTIZE=quantized is not None,
        BLOCK_G=block_g,
        GROUP=GROUP,
        PAIRED=pairs and _in_pairs(*of_pairs),
        **overlapping(x),
        num_warps=max(1, min(8, block_g // 2)),
    )


def gated_rms_norm(
    o: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float,
    *,
    activation: str,
    launch: GateLaunch = GATED_NORM,
) -> Tensor:
    """``norm(o) * weight * act(z)`` per head of o, z [T, N, d]; "silu" or "sigmoid". [T, N, d] as z's dtype."""
    out = torch.empty(o.shape, dtype=z.dtype, device=z.device)
    _launch_gated_norm(o, z, weight, out, None, eps, activation, launch)
    return out


def gated_rms_norm_quantized(
    o: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float,
    *,
    activation: str,
    launch: GateLaunch = GATED_NORM,
) -> QuantizedRows:
    """``gated_rms_norm`` as FP8 rows [T, N * d]."""
    num_rows, num_heads, size = o.shape
    if size != GROUP:
        gated = gated_rms_norm(o, z, weight, eps, activation=activation, launch=launch)
        return quantize(gated.view(num_rows, num_heads * size))
    out = QuantizedRows.empty(num_rows, num_heads * size, dtype=z.dtype, device=z.device)
    _launch_gated_norm(o, z, weight, out.values, out.scale, eps, activation, launch)
    return out


def _launch_gated_norm(
    o: Tensor,
    z: Tensor,
    weight: Tensor,
    out: Tensor,
    scale: Tensor | None,
    eps: float,
    activation: str,
    launch: GateLaunch,
) -> None:
    num_rows, num_heads, size = o.shape
    num_items = num_rows * num_heads
    if not out.numel():
        return
    block = _block(size)
    block_h = max(1, launch.elements // block)
    gated_norm_kernel[(-(-num_items // block_h),)](
        o,
        z,
        weight,
        out,
        out if scale is None else scale,
        o.stride(0),
        o.stride(1),
        z.stride(0),
        z.stride(1),
        num_items,
        eps,
        NUM_HEADS=num_heads,
        SIZE=size,
        SILU=activation == "silu",
        QUANTIZE=scale is not None,
        BLOCK_H=block_h,
        BLOCK=block,
        PAIRED=launch.pairs and _in_pairs(o, z),
        **overlapping(o),
        num_warps=launch.num_warps,
    )


def _in_pairs(*rows: Tensor) -> bool:
    """Whether ``rows`` are bf16 on a device of compute capability 9.0 or later."""
    is_bf16 = all(x.dtype is torch.bfloat16 for x in rows)
    return is_bf16 and triton_support.is_hopper_or_later(rows[0].device)


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
            **overlapping(x),
            num_warps=1,
        )
    return out


def silu_mul(both: Tensor, *, launch: GateLaunch = GATE_MUL) -> Tensor:
    """``silu(gate) * up`` of both [T, 2I], gate columns first. Returns [T, I]."""
    gate, up = both.unsqueeze(1).chunk(2, dim=-1)
    out = torch.empty((both.shape[0], up.shape[-1]), dtype=both.dtype, device=both.device)
    _launch_gate_mul(up, gate, out, None, silu=True, launch=launch)
    return out


def silu_mul_quantized(both: Tensor, *, launch: GateLaunch = GATE_MUL) -> QuantizedRows:
    """``silu_mul`` as FP8 rows [T, I]."""
    gate, up = both.unsqueeze(1).chunk(2, dim=-1)
    out = QuantizedRows.empty(both.shape[0], up.shape[-1], dtype=both.dtype, device=both.device)
    _launch_gate_mul(up, gate, out.values, out.scale, silu=True, launch=launch)
    return out


def sigmoid_mul(x: Tensor, gate: Tensor, *, launch: GateLaunch = GATE_MUL) -> Tensor:
    """``x * sigmoid(gate)`` of x, gate [T, N, d]. Returns [T, N, d] in x's dtype."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_gate_mul(x, gate, out, None, silu=False, launch=launch)
    return out


def sigmoid_mul_quantized(
    x: Tensor, gate: Tensor, *, launch: GateLaunch = GATE_MUL
) -> QuantizedRows:
    """``sigmoid_mul`` as FP8 rows [T, N * d]."""
    num_rows, num_heads, size = x.shape
    if size % GROUP and num_heads > 1:
        return quantize(sigmoid_mul(x, gate, launch=launch).view(num_rows, num_heads * size))
    out = QuantizedRows.empty(num_rows, num_heads * size, dtype=x.dtype, device=x.device)
    _launch_gate_mul(x, gate, out.values, out.scale, silu=False, launch=launch)
    return out


def _launch_gate_mul(
    x: Tensor,
    gate: Tensor,
    out: Tensor,
    scale: Tensor | None,
    *,
    silu: bool,
    launch: GateLaunch,
) -> None:
    num_rows, num_heads, size = x.shape
    num_items = num_rows * num_heads * num_groups(size)
    if not out.numel():
        return
    block_g = launch.elements // GROUP
    gate_mul_kernel[(-(-num_items // block_g),)](
        x,
        gate,
        out,
        out if scale is None else scale,
        x.stride(0),
        x.stride(1),
        gate.stride(0),
        gate.stride(1),
        num_items,
        NUM_HEADS=num_heads,
        SIZE=size,
        SILU=silu,
        QUANTIZE=scale is not None,
        BLOCK_G=block_g,
        GROUP=GROUP,
        PAIRED=launch.pairs and _in_pairs(x, gate),
        **overlapping(x),
        num_warps=launch.num_warps,
    )
