"""Launch of the Hopper kernel; needs Triton's Gluon and compute capability 9.0."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sglang.kernels.ops.attention.paged.hopper_kernel import hopper_prefill_kernel
from sglang.kernels.ops.attention.paged.launch import HopperLaunch

_PROMPT_TILE = 128  # two groups of 64 rows, as hopper_prefill_kernel has them


def hopper_prefill(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    out: Tensor,
    *,
    table: tuple[Tensor, Tensor, Tensor, Tensor],
    max_query_len: int,
    scale_log2: float,
    is_causal: bool,
    page_size: int,
    launch: HopperLaunch,
) -> None:
    """``paged_attention`` without splits and window into ``out``; see there.

    table  req_to_token, rows, prefix_lens, query_start_loc
    Raises: ValueError if a dtype is not bf16, blocks do not divide pages, or heads are not adjacent.
    """
    descriptors = _pages(q, k_buffer, v_buffer, page_size, launch)
    num_kv_heads, head_dim = k_buffer.shape[1:]
    group = q.shape[1] // num_kv_heads
    req_to_token, rows = table[:2]
    tiles = -(-max_query_len * group // _PROMPT_TILE)
    hopper_prefill_kernel[(tiles, rows.shape[0] * num_kv_heads)](
        q,
        *descriptors,
        out,
        *table,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        req_to_token.stride(0),
        num_kv_heads,
        scale_log2,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_N=launch.block_n,
        STAGES=launch.num_stages,
        IS_CAUSAL=is_causal,
        num_warps=4,
    )


def _pages(
    q: Tensor, k_buffer: Tensor, v_buffer: Tensor, page_size: int, launch: HopperLaunch
) -> list[TensorDescriptor]:
    """K and V as the copy engine addresses them."""
    if not q.dtype == k_buffer.dtype == v_buffer.dtype == torch.bfloat16:
        raise ValueError(f"rows are {q.dtype}, the pool {k_buffer.dtype}: both must be bfloat16")
    if page_size % launch.block_n:
        raise ValueError(f"pages of {page_size} tokens do not hold blocks of {launch.block_n}")
    if not (k_buffer.is_contiguous() and v_buffer.is_contiguous()):
        raise ValueError("K and V of a layer must be contiguous")
    num_slots, num_kv_heads, head_dim = k_buffer.shape
    block = [launch.block_n, head_dim]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    flat = (num_slots, num_kv_heads * head_dim)
    return [
        TensorDescriptor.from_tensor(buffer.view(flat), block, layout)
        for buffer in (k_buffer, v_buffer)
    ]
