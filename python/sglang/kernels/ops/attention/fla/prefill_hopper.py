"""Launch of the walk written for Hopper; needs Triton's Gluon and compute capability 9.0."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sglang.kernels.ops.attention.fla.chunk_delta_h import CHUNK_SIZE
from sglang.kernels.ops.attention.fla.prefill_hopper_kernel import prefill_state_hopper_kernel
from sglang.kernels.ops.attention.fla.prefill_plan import PrefillPlan, PrefillTokens

if TYPE_CHECKING:
    from sglang.kernels.ops.attention.fla.prefill_call import PrefillScratch

HEAD_DIM_K = 128
"""The kernel halves the columns of a state, and a half is as wide as a swizzled row of shared memory."""

BLOCK_V = 64
"""State rows of its one multiplying warp group."""

STAGES = 3
"""Chunks in shared memory, which they fill. Two were slower for one prompt and for eight (205 against 142 us, 134 against 101)."""

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def serves(x: PrefillTokens) -> bool:
    """Whether the kernel takes these rows; their addresses are the caller's to check."""
    shape_fits = x.q.shape[2] == HEAD_DIM_K and x.v.shape[2] % BLOCK_V == 0
    return shape_fits and x.q.dtype in _DTYPES


@functools.cache
def _layout(columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([CHUNK_SIZE, columns], _DTYPES[dtype])


def _descriptor(tensor: Tensor, shape: list[int], stride: int, columns: int) -> TensorDescriptor:
    layout = _layout(columns, tensor.dtype)
    return TensorDescriptor(tensor, shape, [stride, 1], [CHUNK_SIZE, columns], layout)


def _rows(tensor: Tensor, columns: int) -> TensorDescriptor:
    """Blocks of `columns` from rows [T, H, D], a head beginning H strides to the right."""
    width = (tensor.shape[1] - 1) * tensor.stride(1) + tensor.shape[2]
    return _descriptor(tensor, [tensor.shape[0], width], tensor.stride(0), columns)


def _squares(tensor: Tensor) -> TensorDescriptor:
    return _descriptor(tensor, [tensor.numel() // CHUNK_SIZE, CHUNK_SIZE], CHUNK_SIZE, CHUNK_SIZE)


def walk_in_order(
    x: PrefillTokens,
    plan: PrefillPlan,
    scratch: PrefillScratch,
    pool: Tensor,
    slots: Tensor,
    track_dests: Tensor | None,
    out: Tensor,
) -> None:
    """As `prefill_call.run_states`, for rows that `serves` and the copy engine take."""
    value_heads, dim_v = x.v.shape[1:]
    dim_k = x.q.shape[2]
    prefill_state_hopper_kernel[(dim_v // BLOCK_V, value_heads, len(plan.lengths))](
        _rows(x.q, dim_k),
        _rows(x.k, dim_k),
        _rows(x.v, BLOCK_V),
        _squares(scratch.solved),
        _squares(scratch.attn),
        _rows(out, BLOCK_V),
        x.k,
        x.v,
        scratch.q_coef,
        scratch.k_coef,
        scratch.s_coef,
        scratch.decay,
        out,
        pool,
        slots,
        track_dests,
        plan.requests,
        pool.shape[0],
        pool.stride(0),
        stride_k_token=x.k.stride(0),
        stride_v_token=x.v.stride(0),
        stride_q_head=x.q.stride(1),
        stride_k_head=x.k.stride(1),
        stride_v_head=x.v.stride(1),
        HV=value_heads,
        GROUP=value_heads // x.q.shape[1],
        K=dim_k,
        V=dim_v,
        C=CHUNK_SIZE,
        BV=BLOCK_V,
        STAGES=STAGES,
        HAS_DESTS=track_dests is not None,
        num_warps=4,
    )
