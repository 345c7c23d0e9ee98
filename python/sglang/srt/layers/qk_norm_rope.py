"""Norm and rotation of queries and keys, in one launch where Triton serves the tensor."""

from __future__ import annotations

from torch import Tensor

from sglang.kernels import triton_support
from sglang.kernels.ops.fused.rows import norm_rope
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding import RotaryEmbedding


def norm_and_rotate(x: Tensor, norm: RMSNorm, rotary: RotaryEmbedding, positions: Tensor) -> Tensor:
    """Per head of x [T, N, d]: RMSNorm over d, then the rotation at ``positions`` [T]."""
    if not triton_support.runs_on(x):
        return rotary.rotate(norm(x), positions)
    return norm_rope(
        x,
        norm.weight,
        rotary.cos,
        rotary.sin,
        positions,
        norm.eps,
        unit_offset=norm.unit_offset,
    )
