"""Gated delta rule verify and decode through the CUDA C++ kernel.

One compiled kernel serves snapshots and update tuples, so both give equal outputs by construction.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from sglang.kernels.launch_overlap import is_overlapping
from sglang.kernels.ops.gdn_cuda.launch_table import VerifyTile, select_tile
from sglang.kernels.ops.gdn_cuda.module import (
    HEAD_DIM,
    MAX_DRAFT_TOKENS,
    GdnCudaModule,
    load_module,
    unavailable_reason,
)

_POINTERS = (
    "q k v a b a_log dt_bias out states slots rows snapshots u_ring k_ring g_ring ring".split()
)
_STRIDES = "q_stride k_stride v_stride a_stride b_stride state_stride".split()
_INTS = (
    "num_units num_tokens num_k_heads num_v_heads num_slots num_rows pitch reserve slots_are_64 "
    "dt_bias_is_bf16 write_state write_snapshots write_tuples force_flush"
).split()


class _Params(ctypes.Structure):
    """Mirror of `Params` in csrc/gdn_verify.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_longlong) for name in _STRIDES),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in _INTS),
    ]


@dataclass(frozen=True)
class VerifyInputs:
    """One layer's tokens and state.

    q, k [N*T, H, 128] and v [N*T, HV, 128] bf16, any token stride that is a multiple of 8 elements;
    a, b [N*T, HV] bf16, any token stride; A_log [HV] fp32, dt_bias [HV] fp32 or bf16;
    states [S, HV, 128, 128] fp32 or bf16; slots [N] int32 or int64, out of range starts from zero;
    rows [N] int32 scratch rows, out of range records nothing, None records nothing at all.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    states: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor | None


def unsupported_reason(x: VerifyInputs) -> str | None:
    """None if the kernel serves these tensors, else what is missing."""
    if (reason := unavailable_reason()) is not None:
        return reason
    tokens = x.q.shape[0]
    num_requests = x.slots.shape[0]
    if x.q.shape[-1] != HEAD_DIM or x.v.shape[-1] != HEAD_DIM:
        return f"head dims {x.q.shape[-1]} and {x.v.shape[-1]} are not {HEAD_DIM}"
    if num_requests == 0 or tokens % num_requests or tokens // num_requests > MAX_DRAFT_TOKENS:
        return f"{tokens} tokens of {num_requests} requests are not 1..{MAX_DRAFT_TOKENS} for each"
    for name, tensor in (("q", x.q), ("k", x.k), ("v", x.v), ("a", x.a), ("b", x.b)):
        if tensor.dtype != torch.bfloat16:
            return f"{name} is {tensor.dtype}, not bfloat16"
        if tensor.stride(-1) != 1:
            return f"last axis of {name} is strided"
    for name, tensor in (("q", x.q), ("k", x.k), ("v", x.v)):
        if tensor.stride(0) % 8 or tensor.data_ptr() % 16 or tensor.stride(1) != HEAD_DIM:
            return f"rows of {name} are not 16-byte aligned with adjacent heads"
    if x.states.dtype not in (torch.float32, torch.bfloat16):
        return f"state dtype {x.states.dtype}"
    if x.states.data_ptr() % 16 or x.states.stride(0) * x.states.element_size() % 16:
        return "states are not 16-byte aligned"
    if x.A_log.dtype != torch.float32 or x.dt_bias.dtype not in (torch.float32, torch.bfloat16):
        return f"A_log {x.A_log.dtype} and dt_bias {x.dt_bias.dtype}"
    return None


def module_for(states: torch.Tensor, tile: VerifyTile) -> GdnCudaModule:
    """The compiled kernels that serve `states`."""
    index = states.device.index
    device_index = torch.cuda.current_device() if index is None else index
    return load_module(tile, states.dtype == torch.bfloat16, device_index)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def run_verify(
    x: VerifyInputs,
    *,
    scale: float,
    snapshots: torch.Tensor | None = None,
    tuples: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ring: torch.Tensor | None = None,
    reserve: int = 0,
    write_state: bool = False,
    tile: VerifyTile | None = None,
) -> torch.Tensor:
    """Run every token; record steps; optionally advance the slots. Returns bf16 [N*T, HV, 128].

    snapshots [R, D, HV, 128, 128] in state dtype; tuples (u, k [R, D, HV, 128], g [R, D, HV]) fp32, contiguous.
    ring int32 [R, 8] (`DeferredCommit.ring`) turns on the deferred commit: the pending cells of the
    tuple ring are replayed first; `reserve` is the largest draft width a later verify may append.
    Raises: ValueError naming what is unsupported.
    """
    if (reason := unsupported_reason(x)) is not None:
        raise ValueError(f"CUDA C++ verify: {reason}")
    num_requests, num_k_heads = x.slots.shape[0], x.q.shape[1]
    num_v_heads = x.v.shape[1]
    num_tokens = x.q.shape[0] // num_requests
    if tile is None:
        tile = select_tile(
            num_heads_in_batch=num_requests * num_v_heads,
            draft_tokens=num_tokens,
            deferred=ring is not None,
        )
    out = torch.empty(x.v.shape, dtype=torch.bfloat16, device=x.v.device)
    launch_units(
        x,
        out,
        tile=tile,
        num_tokens=num_tokens,
        num_k_heads=num_k_heads,
        num_v_heads=num_v_heads,
        scale=scale,
        snapshots=snapshots,
        tuples=tuples,
        ring=ring,
        reserve=reserve,
        write_state=write_state,
        force_flush=False,
    )
    return out


def launch_units(
    x: VerifyInputs,
    out: torch.Tensor,
    *,
    tile: VerifyTile,
    num_tokens: int,
    num_k_heads: int,
    num_v_heads: int,
    scale: float,
    snapshots: torch.Tensor | None,
    tuples: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    ring: torch.Tensor | None,
    reserve: int,
    write_state: bool,
    force_flush: bool,
) -> None:
    """Fill the parameter block and launch; num_tokens 0 replays pending tuples only."""
    pitch, num_rows = num_tokens, 0
    recorded = snapshots if snapshots is not None else (tuples[0] if tuples is not None else None)
    if recorded is not None and x.rows is not None:
        num_rows, pitch = recorded.shape[0], recorded.shape[1]
    u_ring, k_ring, g_ring = tuples if tuples is not None else (None, None, None)
    units = x.slots.shape[0] * num_v_heads * (HEAD_DIM // tile.unit_rows)
    params = _Params(
        _address(x.q),
        _address(x.k),
        _address(x.v),
        _address(x.a),
        _address(x.b),
        _address(x.A_log),
        _address(x.dt_bias),
        _address(out),
        _address(x.states),
        _address(x.slots),
        _address(x.rows),
        _address(snapshots),
        _address(u_ring),
        _address(k_ring),
        _address(g_ring),
        _address(ring),
        x.q.stride(0),
        x.k.stride(0),
        x.v.stride(0),
        x.a.stride(-2),
        x.b.stride(-2),
        x.states.stride(0),
        scale,
        units,
        num_tokens,
        num_k_heads,
        num_v_heads,
        x.states.shape[0],
        num_rows,
        pitch,
        reserve,
        int(x.slots.dtype == torch.int64),
        int(x.dt_bias.dtype == torch.bfloat16),
        int(write_state),
        int(snapshots is not None and num_tokens > 0),
        int(tuples is not None and num_tokens > 0),
        int(force_flush),
    )
    module = module_for(x.states, tile)
    grid = module.grid_for(units, num_tokens)
    module.launch(
        "gdn_verify",
        grid,
        tile.num_warps * 32,
        module.smem_bytes(num_tokens),
        [params],
        overlap_previous=tile.pdl and is_overlapping(x.states.device),
    )
