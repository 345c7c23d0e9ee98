"""A layer's result that is still in parts: the norm that reads it adds it up, or ``total`` does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang.kernels import triton_support
from sglang.kernels.launch_overlap import overlapping

if triton_support.AVAILABLE:
    from sglang.kernels.ops.fused.sum_kernels import combine_kernel, split_sum_kernel

_BLOCK = 1024


@dataclass(frozen=True)
class SplitSum:
    """The sum over the first axis of parts [S, T, H] fp32, contiguous, in ascending order, rounded to dtype."""

    parts: Tensor
    dtype: torch.dtype

    def total(self) -> Tensor:
        """[T, H] in ``dtype``."""
        splits, num_rows, size = self.parts.shape
        out = torch.empty((num_rows, size), dtype=self.dtype, device=self.parts.device)
        if out.numel():
            split_sum_kernel[(num_rows, -(-size // _BLOCK))](
                self.parts,
                out,
                self.parts.stride(0),
                self.parts.stride(1),
                out.stride(0),
                size,
                SPLITS=splits,
                BLOCK=_BLOCK,
                **overlapping(out),
            )
        return out


@dataclass(frozen=True)
class RoutedSum:
    """``sum_j weights[t, j] parts[t * top_k + j] + sigmoid(shared_gate[t]) shared[t]``, in fp32, then rounded.

    parts          [T * top_k, H]
    weights        [T, top_k] contiguous
    chosen         [T, top_k] int32 contiguous; an expert id of -1 adds nothing
    shared         [T, H] or None
    shared_gate    [T, 1]; present if ``shared`` is
    """

    parts: Tensor
    weights: Tensor
    chosen: Tensor
    shared: Tensor | None
    shared_gate: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        return self.parts.dtype

    def shared_or_any(self) -> tuple[Tensor, Tensor]:
        """(shared, gate), or tensors that a kernel without them does not read."""
        if self.shared is None or self.shared_gate is None:
            return self.parts, self.parts
        return self.shared, self.shared_gate

    def total(self) -> Tensor:
        """[T, H] in parts' dtype."""
        num_rows, top_k = self.chosen.shape
        size = self.parts.shape[1]
        out = torch.empty((num_rows, size), dtype=self.parts.dtype, device=self.parts.device)
        shared, gate = self.shared_or_any()
        if out.numel():
            combine_kernel[(num_rows, -(-size // _BLOCK))](
                self.parts,
                self.weights,
                self.chosen,
                shared,
                gate,
                out,
                self.parts.stride(0),
                shared.stride(0),
                gate.stride(0),
                out.stride(0),
                size,
                TOP_K=top_k,
                HAS_SHARED=self.shared is not None,
                BLOCK=_BLOCK,
                **overlapping(out),
            )
        return out


Delta = Tensor | SplitSum | RoutedSum
"""What a layer adds to the residual stream."""


def total_of(delta: Delta) -> Tensor:
    return delta if isinstance(delta, Tensor) else delta.total()
