"""Convolution, gates and gated delta rule of one layer for all rows of a call, compiled."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang.kernels.ops.cpu.library import declare, library
from sglang.kernels.ops.cpu.structs import (
    GdnRowsArgs,
    GdnShapeArgs,
    GdnStateArgs,
    GdnWeightsArgs,
    pointer,
)

LANES = 16
STATE_DTYPES = (torch.float32, torch.bfloat16)
MODE_ADVANCE, MODE_VERIFY = 0, 1


@declare
def _signatures(lib: ctypes.CDLL) -> None:
    lib.sgl_gdn.argtypes = (ctypes.c_void_p,) * 4
    lib.sgl_gdn.restype = None


def covers(head_k_dim: int) -> bool:
    """Whether the compiled step runs heads of this key dim; the PyTorch twin runs all."""
    return library() is not None and head_k_dim % LANES == 0


@dataclass(frozen=True)
class VerifyScratch:
    """Scratch of one layer: conv windows, and either snapshots or u, k, g.

    window [R, D, conv_dim, W-1] any strides; snapshot [R, D, HV, V, K] state dtype;
    u [R, D, HV, V], k [R, D, HV, K], g [R, D, HV] fp32; dense behind D
    """

    window: Tensor
    snapshot: Tensor | None
    u: Tensor | None
    k: Tensor | None
    g: Tensor | None


def state_args(conv: Tensor, ssm: Tensor, scratch: VerifyScratch | None) -> GdnStateArgs:
    """Describe one layer's pools: conv [S, conv_dim, W-1], ssm [S, HV, V, K] dense per slot.

    Raises:
        ValueError: a dtype or layout that the kernel does not read.
    """
    dense = ssm.stride()[1:] == torch.empty(ssm.shape[1:], device="meta").stride()
    if conv.dtype not in STATE_DTYPES or ssm.dtype not in STATE_DTYPES or not dense:
        raise ValueError(
            f"GDN pools need fp32 or bf16 and dense slots; got conv {conv.dtype}, "
            f"ssm {ssm.dtype} with strides {ssm.stride()}"
        )
    args = GdnStateArgs(
        conv=conv.data_ptr(),
        conv_slot=conv.stride(0),
        conv_dim=conv.stride(1),
        conv_col=conv.stride(2),
        ssm=ssm.data_ptr(),
        ssm_slot=ssm.stride(0),
        num_slots=min(ssm.shape[0], conv.shape[0]),
        conv_bf16=conv.dtype == torch.bfloat16,
        ssm_bf16=ssm.dtype == torch.bfloat16,
    )
    if scratch is not None:
        _add_scratch(args, conv, ssm, scratch)
    return args


def _add_scratch(args: GdnStateArgs, conv: Tensor, ssm: Tensor, scratch: VerifyScratch) -> None:
    window = scratch.window
    if window.dtype != conv.dtype:
        raise ValueError(f"conv window scratch is {window.dtype}, conv pool {conv.dtype}")
    args.window = window.data_ptr()
    args.window_row, args.window_step, args.window_dim, args.window_col = window.stride()
    if scratch.u is not None and scratch.k is not None and scratch.g is not None:
        for name, tensor in (("u", scratch.u), ("k", scratch.k), ("g", scratch.g)):
            setattr(args, name, tensor.data_ptr())
            setattr(args, f"{name}_row", tensor.stride(0))
            setattr(args, f"{name}_step", tensor.stride(1))
    elif scratch.snapshot is not None:
        if scratch.snapshot.dtype != ssm.dtype:
            raise ValueError(f"snapshots are {scratch.snapshot.dtype}, states {ssm.dtype}")
        args.snapshot = scratch.snapshot.data_ptr()
        args.snapshot_row, args.snapshot_step = scratch.snapshot.stride()[:2]
    else:
        raise ValueError("verify scratch has neither snapshots nor update tuples")


@dataclass(frozen=True)
class GdnCall:
    """What one layer's call needs beside its rows.

    conv_weights [W, conv_dim] fp32; A_log, dt_bias [HV] fp32; starts [R+1], slots [R],
    scratch_rows [R] int32 (read by a verify); track_slots, track_rows [R] int64 or None
    """

    shape: GdnShapeArgs
    state: GdnStateArgs
    conv_weights: Tensor
    A_log: Tensor
    dt_bias: Tensor
    mode: int
    starts: Tensor
    slots: Tensor
    scratch_rows: Tensor
    track_slots: Tensor | None
    track_rows: Tensor | None


def forward(mixed_qkv: Tensor, a: Tensor, b: Tensor, call: GdnCall) -> Tensor:
    """mixed_qkv [T, conv_dim] before the convolution, a, b [T, HV], fp32 -> [T, HV, V] fp32.

    MODE_ADVANCE moves the slots' states on and stores boundary states; MODE_VERIFY records into the
    scratch and leaves every slot alone. Slot -1 skips a request; its rows come out as zero.
    """
    lib = library()
    if lib is None:
        raise RuntimeError("the compiled CPU kernels are not available")
    mixed_qkv = mixed_qkv.float()
    ab_stride = a.stride(0)
    if a.dtype != torch.float32 or b.stride(0) != ab_stride or mixed_qkv.stride(1) != 1:
        mixed_qkv = mixed_qkv.contiguous()
        a, b = a.float().contiguous(), b.float().contiguous()
        ab_stride = a.stride(0)
    shape = call.shape
    out = torch.empty((mixed_qkv.shape[0], shape.HV, shape.V))
    weights = GdnWeightsArgs(
        conv=call.conv_weights.data_ptr(),
        A_log=call.A_log.data_ptr(),
        dt_bias=call.dt_bias.data_ptr(),
    )
    rows = GdnRowsArgs(
        x=mixed_qkv.data_ptr(),
        ldx=mixed_qkv.stride(0),
        a=a.data_ptr(),
        b=b.data_ptr(),
        ld_ab=ab_stride,
        out=out.data_ptr(),
        mode=call.mode,
        num_requests=call.slots.shape[0],
        starts=call.starts.data_ptr(),
        slots=call.slots.data_ptr(),
        scratch_rows=call.scratch_rows.data_ptr(),
        track_slots=pointer(call.track_slots),
        track_rows=pointer(call.track_rows),
    )
    parts = (shape, weights, call.state, rows)
    lib.sgl_gdn(*(ctypes.addressof(part) for part in parts))
    return out
