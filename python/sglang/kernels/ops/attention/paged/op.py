"""Attention of query rows over a paged context."""

from __future__ import annotations

import importlib.util
import math
from functools import cache

import torch
from torch import Tensor

from sglang.kernels import triton_support
from sglang.kernels.launch_overlap import overlapping
from sglang.kernels.ops.attention.paged.launch import (
    PROMPT_CHUNKS_ON_HOPPER,
    SPLITS,
    HopperLaunch,
    PagedLaunch,
    SplitRule,
    combine_warps,
    few_rows,
    many_rows,
    short_chunks,
)

if triton_support.AVAILABLE:
    from sglang.kernels.ops.attention.paged.attention_kernel import (
        combine_splits_kernel,
        paged_attention_kernel,
    )

_LOG2_E = math.log2(math.e)


class SplitWorkspace:
    """Partial results of split contexts; allocated once for the largest step.

    partial  [rows, N, splits, d] ``dtype``; lse [rows, N, splits] fp32
    A rule of at most ``max_splits`` splits bounds both, whatever the context.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_context: int,
        num_heads: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        rule: SplitRule = SPLITS,
    ) -> None:
        self.max_rows = max_rows
        self.rule = rule
        self.max_context = max_context
        self.num_splits = most_splits(rule, max_context)
        shape = (max_rows, num_heads, rule.max_splits)
        self.partial = torch.empty((*shape, head_dim), dtype=dtype, device=device)
        self.lse = torch.empty(shape, dtype=torch.float32, device=device)


def most_splits(rule: SplitRule, max_context: int) -> int:
    """Most splits of any context up to ``max_context`` tokens."""
    return min(rule.max_splits, -(-max_context // rule.min_tokens))


@cache
def _is_hopper(device: torch.device) -> bool:
    """Whether the kernel for compute capability 9.0 can be compiled and run on ``device``."""
    if device.type != "cuda" or torch.version.hip is not None or triton_support.INTERPRETING:
        return False
    experimental = importlib.util.find_spec("triton.experimental")
    if experimental is None or importlib.util.find_spec("triton.experimental.gluon") is None:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def _tile_for(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    *,
    page_size: int,
    group_rows: int | None,
    is_split: bool,
    has_window: bool,
) -> PagedLaunch | HopperLaunch:
    """The launch table's entry: a matter of the pool and of the kind of call, never of its batch.

    group_rows  query rows of a decode or verify step that share a KV head; None for prompt chunks
    """
    head_dim = q.shape[-1]
    launch = PROMPT_CHUNKS_ON_HOPPER
    if (
        launch is not None
        and not (is_split or has_window)
        and page_size % launch.block_n == 0
        and head_dim in (128, 256)
        and q.dtype == k_buffer.dtype == v_buffer.dtype == torch.bfloat16
        and k_buffer.is_contiguous()
        and v_buffer.is_contiguous()
        and _is_hopper(q.device)
    ):
        return launch
    amd = torch.version.hip is not None
    if group_rows is not None:
        return few_rows(head_dim, group_rows, amd=amd)
    return short_chunks(head_dim, amd=amd) if is_split else many_rows(head_dim, amd=amd)


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
    page_size: int = 1,
    prompt_chunks: bool = False,
    tile: PagedLaunch | HopperLaunch | None = None,
) -> Tensor:
    """Attend each request's rows to its whole context, which the pool already holds.

    Shapes (R requests, T rows, N heads, Nkv KV heads, d head dim):
        q                    [T, N, d], last dim contiguous
        k_buffer, v_buffer   [num_slots, Nkv, d], any float dtype; read as q's
        req_to_token         [num_rows, max_context] int32, KV slot of each position
        rows                 [R] int64 rows of req_to_token; below 0: padding, its output is not written
        prefix_lens          [R] int64, context before the first row
        query_start_loc      [R+1] int32
        max_query_len        at least the rows of any request; decides the grid
        workspace            splits long contexts over programs; for at most its max_rows rows
        page_size            positions k * page_size .. + page_size - 1 lie in consecutive slots
        prompt_chunks        with a workspace: the table's tile does not follow ``max_query_len``, which the
                             batch decides there; without one, it never does
        tile                 overrides the launch table; a ``HopperLaunch`` without window and workspace, for
                             bf16 rows and pool on compute capability 9.0
    Returns: out [T, N, d] in q's dtype.
    Row t of request r sees positions 0 .. prefix_lens[r] + t (all of the request's if not causal), and
    with a window only those less than ``sliding_window`` away. Sums are fp32 in ascending position
    order within splits that follow from the request's context, so a row's bits do not depend on the
    other requests. Nothing but shapes and numbers given here decides the launch: it may be captured.
    Raises: ValueError if heads do not divide, ``scaling`` is not positive, the workspace is too small
    or a tile does not fit its splits.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_buffer.shape[1]
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} heads are not a multiple of {num_kv_heads} KV heads")
    if scaling <= 0:
        raise ValueError(f"scaling={scaling} must be positive: maxima are taken before it")
    if workspace is not None and num_rows > workspace.max_rows:
        raise ValueError(f"{num_rows} rows exceed the workspace's {workspace.max_rows}")
    out = torch.empty_like(q) if out is None else out
    if not out.numel():
        return out
    group = num_heads // num_kv_heads
    if tile is None:
        few = workspace is not None and not prompt_chunks
        tile = _tile_for(
            q,
            k_buffer,
            v_buffer,
            page_size=page_size,
            group_rows=max_query_len * group if few else None,
            is_split=workspace is not None,
            has_window=sliding_window > 0,
        )
    if workspace is not None and workspace.rule.step_tokens % tile.block_n:
        step = workspace.rule.step_tokens
        raise ValueError(f"splits step by {step} tokens, blocks have {tile.block_n}")
    table = (req_to_token, rows, prefix_lens, query_start_loc)
    scale_log2 = scaling * _LOG2_E
    if isinstance(tile, PagedLaunch):
        _attend(
            q,
            k_buffer,
            v_buffer,
            out,
            workspace,
            table=table,
            max_query_len=max_query_len,
            scale_log2=scale_log2,
            is_causal=is_causal,
            sliding_window=sliding_window,
            page_size=page_size,
            tile=tile,
        )
    else:
        from sglang.kernels.ops.attention.paged.hopper import hopper_prefill

        if sliding_window or workspace is not None:
            raise ValueError("the Hopper kernel takes neither a sliding window nor a workspace")
        hopper_prefill(
            q,
            k_buffer,
            v_buffer,
            out,
            table=table,
            max_query_len=max_query_len,
            scale_log2=scale_log2,
            is_causal=is_causal,
            page_size=page_size,
            launch=tile,
        )
    if workspace is not None:
        _combine(out, workspace, table, max_query_len)
    return out


def _attend(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    out: Tensor,
    workspace: SplitWorkspace | None,
    *,
    table: tuple[Tensor, Tensor, Tensor, Tensor],
    max_query_len: int,
    scale_log2: float,
    is_causal: bool,
    sliding_window: int,
    page_size: int,
    tile: PagedLaunch,
) -> None:
    """The same by the kernel for every device, dtype and page."""
    head_dim = q.shape[-1]
    num_kv_heads = k_buffer.shape[1]
    group = q.shape[1] // num_kv_heads
    rule = SPLITS if workspace is None else workspace.rule
    tiles_m = -(-max_query_len * group // tile.block_m)
    pairs = table[1].shape[0] * num_kv_heads
    grid = (tiles_m, pairs) if workspace is None else (pairs, tiles_m, workspace.num_splits)
    paged_attention_kernel[grid](
        q,
        k_buffer,
        v_buffer,
        out,
        q if workspace is None else workspace.partial,
        q if workspace is None else workspace.lse,
        *table,
        q.stride(0),
        q.stride(1),
        k_buffer.stride(1),
        v_buffer.stride(1),
        out.stride(0),
        out.stride(1),
        table[0].stride(0),
        num_kv_heads,
        scale_log2,
        sliding_window,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=_block(head_dim),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        STRIDE_K=k_buffer.stride(0),
        STRIDE_V=v_buffer.stride(0),
        PAGE=page_size,
        MAX_SPLITS=0 if workspace is None else rule.max_splits,
        SPLIT_MIN=rule.min_tokens,
        SPLIT_STEP=rule.step_tokens,
        IS_CAUSAL=is_causal,
        HAS_WINDOW=sliding_window > 0,
        **overlapping(q),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _combine(
    out: Tensor,
    workspace: SplitWorkspace,
    table: tuple[Tensor, Tensor, Tensor, Tensor],
    max_query_len: int,
) -> None:
    """The splits of every row into ``out``."""
    num_heads, head_dim = out.shape[1:]
    rule = workspace.rule
    combine_splits_kernel[(table[1].shape[0] * max_query_len, num_heads)](
        workspace.partial,
        workspace.lse,
        out,
        *table[1:],
        out.stride(0),
        out.stride(1),
        num_heads,
        max_query_len,
        HEAD_DIM=head_dim,
        BLOCK_D=_block(head_dim),
        MAX_SPLITS=rule.max_splits,
        SPLIT_MIN=rule.min_tokens,
        SPLIT_STEP=rule.step_tokens,
        **overlapping(out),
        num_warps=combine_warps(rule.max_splits),
    )


def _block(size: int) -> int:
    return 1 << (size - 1).bit_length()
