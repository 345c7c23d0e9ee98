"""The largest score of each row of a vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.kernels import triton_support
from sglang.kernels.launch_overlap import overlapping

if triton_support.AVAILABLE:
    from sglang.kernels.ops.fused.argmax_kernels import (
        largest_of_parts_kernel,
        largest_part_kernel,
    )

_PARTS = 32
_BLOCK = 2048


def argmax_rows(scores: Tensor) -> Tensor:
    """``torch.argmax(scores, -1)`` of scores [R, V] in any float dtype, columns contiguous: [R] int64.

    The lowest column wins a tie, and NaN is the largest score, as there. Rows are cut over many programs:
    a few rows of a vocabulary keep every core busy.
    """
    num_rows, num_columns = scores.shape
    if not triton_support.runs_on(scores) or not num_rows:
        return torch.argmax(scores, dim=-1)
    keys = torch.empty((num_rows, _PARTS), dtype=torch.int64, device=scores.device)
    out = torch.empty(num_rows, dtype=torch.int64, device=scores.device)
    share = -(-num_columns // (_PARTS * 8)) * 8
    largest_of_parts_kernel[(num_rows, _PARTS)](
        scores,
        keys,
        scores.stride(0),
        num_columns,
        share,
        BLOCK=_BLOCK,
        PARTS=_PARTS,
        **overlapping(scores),
    )
    largest_part_kernel[(num_rows,)](keys, out, PARTS=_PARTS, **overlapping(keys), num_warps=1)
    return out
