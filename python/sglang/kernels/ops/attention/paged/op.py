"""Attention of query rows over a paged context."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sglang.kernels import triton_support
from sglang.kernels.ops.attention.paged.launch import SPLIT_TOKENS, few_rows, many_rows

if triton_support.AVAILABLE:
    from sglang.kernels.ops.attention.paged.attention_kernel import (
        combine_splits_kernel,
        paged_attention_kernel,
    )

_LOG2_E = math.log2(math.e)


class SplitWorkspace:
    """Partial results of split contexts; allocated once for the largest step.

    partial  [splits, rows, N, d] fp32; lse [splits, rows, N] fp32
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_context: int,
        num_heads: int,
        head_dim: int,
        device: torch.device,
    ) -> None:
        self.max_rows = max_rows
        self.num_splits = -(-max_context // SPLIT_TOKENS)
        shape = (self.num_splits, max_rows, num_heads)
        self.partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=device)
        self.lse = torch.empty(shape, dtype=torch.float32, device=device)


def paged_attention(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    *,
    req_to_token: Tensor,
    rows: Tensor,
    prefix_lens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    scaling: float,
    is_causal: bool = True,
    sliding_window: int = 0,
    workspace: SplitWorkspace | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend each request's rows to its whole context, which the pool already holds.

    Shapes (R requests, T rows, N heads, Nkv KV heads, d head dim):
        q                    [T, N, d], last dim contiguous
        k_buffer, v_buffer   [num_slots, Nkv, d], any float dtype; read as q's
        req_to_token         [num_rows, max_context] int32, KV slot of each position
        rows                 [R] int64 rows of req_to_token; below 0: padding, its output is not written
        prefix_lens          [R] int64, context before the first row
        query_start_loc      [R+1] int32
        workspace            splits long contexts over programs; for at most its max_rows rows
    Returns: out [T, N, d] in q's dtype.
    Row t of request r sees positions 0 .. prefix_lens[r] + t (all of the request's if not causal), and
    with a window only those less than ``sliding_window`` away. Sums are fp32 in ascending position
    order within fixed splits, so a row's bits do not depend on the other requests.
    Raises: ValueError if heads do not divide or the workspace is too small.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_buffer.shape[1]
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} heads are not a multiple of {num_kv_heads} KV heads")
    if workspace is not None and num_rows > workspace.max_rows:
        raise ValueError(f"{num_rows} rows exceed the workspace's {workspace.max_rows}")
    out = torch.empty_like(q) if out is None else out
    group = num_heads // num_kv_heads
    tile_rows = max_query_len * group
    launch = few_rows(head_dim, tile_rows) if workspace is not None else many_rows(head_dim)
    tiles_m = -(-tile_rows // launch.block_m)
    num_requests = rows.shape[0]
    num_splits = workspace.num_splits if workspace is not None else 1
    block_d = 1 << (head_dim - 1).bit_length()
    part = workspace.partial if workspace is not None else q
    lse = workspace.lse if workspace is not None else q
    paged_attention_kernel[(num_requests, num_kv_heads * tiles_m, num_splits)](
        q,
        k_buffer,
        v_buffer,
        out,
        part,
        lse,
        req_to_token,
        rows,
        prefix_lens,
        query_start_loc,
        q.stride(0),
        q.stride(1),
        k_buffer.stride(0),
        k_buffer.stride(1),
        v_buffer.stride(0),
        v_buffer.stride(1),
        out.stride(0),
        out.stride(1),
        req_to_token.stride(0),
        num_rows,
        num_heads,
        tiles_m,
        scaling * _LOG2_E,
        sliding_window,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        SPLIT=SPLIT_TOKENS if workspace is not None else 0,
        IS_CAUSAL=is_causal,
        HAS_WINDOW=sliding_window > 0,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    if workspace is not None:
        combine_splits_kernel[(num_requests * max_query_len, num_heads)](
            part,
            lse,
            out,
            rows,
            prefix_lens,
            query_start_loc,
            out.stride(0),
            out.stride(1),
            num_rows,
            num_heads,
            max_query_len,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            SPLIT=SPLIT_TOKENS,
        )
    return out
