"""Causal depthwise convolution with carried state: prompts, decode tokens and verify blocks.

Accelerator tensors only; sums run in fp32 from the oldest tap to the newest.
"""

from __future__ import annotations

import torch

from sglang.kernels import triton_support
from sglang.kernels.launch_overlap import overlapping
from sglang.kernels.ops.mamba.conv_launch import PREFILL_TILE, ConvTile

if triton_support.AVAILABLE:
    from sglang.kernels.ops.mamba import conv_kernels

PAD_SLOT_ID = -1
_BLOCK = 256


def _use_silu(activation: str | bool | None) -> bool:
    if activation in (None, False):
        return False
    if activation in ("silu", "swish", True):
        return True
    raise ValueError(f"activation must be None, 'silu' or 'swish', got {activation!r}")


def _window_block(width: int) -> int:
    """Power of two that covers the columns of a window."""
    return 1 << max(width - 2, 0).bit_length()


def _require_kernel(x: torch.Tensor) -> None:
    if not triton_support.runs_on(x):
        raise ValueError(
            f"tensors are on {x.device}; this op serves accelerators, CPU tensors are served by "
            "sglang.kernels.ops.cpu"
        )


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | bool | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
    num_accept_tokens: torch.Tensor | None = None,
    intermediate_conv_window: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    retrieve_next_token: torch.Tensor | None = None,
    retrieve_next_sibling: torch.Tensor | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
    pad_slot_id: int = PAD_SLOT_ID,
) -> torch.Tensor:
    """Convolve the next tokens of each request.

    Shapes: x [N, dim] or [N, dim, T], any strides; conv_state [S, dim, W-1]; weight [dim, W];
    conv_state_indices [N] slots, `pad_slot_id` and out-of-range slots give zeros and write nothing;
    intermediate_conv_window [R, D, dim, W-1] (windows may overlap in memory for a chain) and
    intermediate_state_indices [>= N] scratch rows; retrieve_parent_token [N, T] for a tree.
    Written: with intermediate_conv_window, the window after every token and not conv_state; else conv_state.
    Returns: x's shape, tokens before channels in memory. Raises: ValueError for cache_seqlens, num_accept_tokens, or a shape disagreement.
    """
    _require_kernel(x)
    if cache_seqlens is not None or num_accept_tokens is not None:
        raise ValueError("cache_seqlens and num_accept_tokens are not served; windows are recorded")
    if retrieve_parent_token is None and (
        retrieve_next_token is not None or retrieve_next_sibling is not None
    ):
        raise ValueError("a tree needs retrieve_parent_token")
    flat = x.dim() == 2
    x3 = x.unsqueeze(-1) if flat else x
    num_requests, dim, num_tokens = x3.shape
    width = weight.shape[1]
    if weight.shape[0] != dim or conv_state.shape[1:] != (dim, width - 1):
        raise ValueError(
            f"x has dim {dim}: weight must be [{dim}, W] and conv_state [S, {dim}, W-1], got "
            f"{tuple(weight.shape)} and {tuple(conv_state.shape)}"
        )
    record = intermediate_conv_window is not None
    if record and intermediate_state_indices is None:
        intermediate_state_indices = torch.arange(num_requests, dtype=torch.int32, device=x.device)
    if retrieve_parent_token is not None and not record:
        raise ValueError("a tree records windows; pass intermediate_conv_window")
    out = x.new_empty(num_requests, num_tokens, dim).transpose(1, 2)
    if x.numel() == 0:
        return out.squeeze(-1) if flat else out
    windows = intermediate_conv_window if record else conv_state
    window_strides = windows.stride() if record else (0, 0, 0, 0)
    grid = (-(-dim // _BLOCK), num_requests, num_tokens if record else 1)
    conv_kernels.conv_update_kernel[grid](
        x3,
        out,
        weight,
        bias,
        conv_state,
        conv_state_indices,
        windows,
        intermediate_state_indices,
        retrieve_parent_token,
        dim,
        num_tokens,
        conv_state.shape[0],
        windows.shape[0],
        windows.shape[1],
        pad_slot_id,
        *x3.stride(),
        *out.stride(),
        weight.stride(0),
        *conv_state.stride(),
        *window_strides,
        0 if retrieve_parent_token is None else retrieve_parent_token.stride(0),
        WIDTH=width,
        HAS_BIAS=bias is not None,
        SILU=_use_silu(activation),
        HAS_SLOTS=conv_state_indices is not None,
        RECORD=record,
        TREE=retrieve_parent_token is not None,
        BLOCK=_BLOCK,
        BLOCK_W=_window_block(width),
        **overlapping(x),
    )
    return out.squeeze(-1) if flat else out


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor | None,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: list[int],
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    activation: str | bool | None = "silu",
    pad_slot_id: int = PAD_SLOT_ID,
    track_dests: torch.Tensor | None = None,
    track_rows: torch.Tensor | None = None,
    tile: ConvTile = PREFILL_TILE,
) -> torch.Tensor:
    """Convolve packed prompts and carry their windows on.

    Shapes: x [dim, T], any strides; weight [dim, W]; conv_states [S, dim, W-1]; query_start_loc [N+1];
    seq_lens_cpu lengths on the host; cache_indices [N]; has_initial_state [N] or None (all have one);
    track_dests / track_rows [N] slot and row count of a boundary window, -1 none.
    Written: windows at track_dests first, then the slots' own windows. Returns: like x.
    """
    _require_kernel(x)
    dim, width = weight.shape
    out = x.new_empty(x.shape[1], dim).t()
    num_prompts = query_start_loc.numel() - 1
    if num_prompts == 0 or x.numel() == 0:
        return out
    if conv_states is not None and cache_indices is None:
        cache_indices = torch.arange(num_prompts, dtype=torch.int32, device=x.device)
    state_strides = (0, 0, 0) if conv_states is None else conv_states.stride()
    num_slots = 0 if conv_states is None else conv_states.shape[0]
    longest = max(seq_lens_cpu)
    grid = (-(-dim // tile.block), -(-longest // tile.block_t), num_prompts)
    conv_kernels.conv_prefill_kernel[grid](
        x,
        out,
        weight,
        bias,
        x if conv_states is None else conv_states,
        cache_indices,
        has_initial_state,
        query_start_loc,
        dim,
        num_slots,
        pad_slot_id,
        *x.stride(),
        *out.stride(),
        weight.stride(0),
        *state_strides,
        WIDTH=width,
        HAS_BIAS=bias is not None,
        SILU=_use_silu(activation),
        HAS_STATE=conv_states is not None,
        HAS_MASK=has_initial_state is not None,
        BLOCK_T=tile.block_t,
        ROWS=tile.rows,
        BLOCK=tile.block,
        num_warps=tile.num_warps,
    )
    if conv_states is None:
        return out
    has_track = track_dests is not None and track_rows is not None
    conv_kernels.conv_window_kernel[(-(-dim // _BLOCK), num_prompts)](
        x,
        conv_states,
        cache_indices,
        track_dests if has_track else None,
        track_rows if has_track else None,
        has_initial_state,
        query_start_loc,
        dim,
        num_slots,
        *x.stride(),
        *state_strides,
        WIDTH=width,
        HAS_TRACK=has_track,
        HAS_MASK=has_initial_state is not None,
        BLOCK=_BLOCK,
        BLOCK_W=_window_block(width),
    )
    return out
