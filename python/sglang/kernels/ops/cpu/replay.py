"""Advance pool states over accepted draft steps from recorded tuples: the commit of a lossless verify.

The step is the one that verify ran (csrc/gdn.h, or gdn_torch without a compiler), so the result
equals the snapshot that verify would have stored, bit for bit.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from sglang.kernels.ops.cpu import gdn, gdn_torch
from sglang.kernels.ops.cpu.library import declare, library
from sglang.kernels.ops.cpu.structs import ReplayArgs


@declare
def _signatures(lib: ctypes.CDLL) -> None:
    lib.sgl_replay.argtypes = (ctypes.c_void_p,)
    lib.sgl_replay.restype = None


def replay_tuples(
    ssm_states: Tensor,
    u: Tensor,
    k: Tensor,
    g: Tensor,
    cache_rows: Tensor,
    slots: Tensor,
    steps: Tensor,
    dests: Tensor,
) -> None:
    """Write into ``dests`` the state of ``slots`` after steps 0..step of the recorded tuples.

    Shapes (L layers, S slots, R scratch rows, D draft steps, HV heads, V/K head dims, n requests):
        ssm_states  [L, S, HV, V, K]  fp32 or bf16, rounded once at the end
        u [L, R, D, HV, V], k [L, R, D, HV, K], g [L, R, D, HV]  fp32
        cache_rows, slots, steps, dests  [n]  integer
    A request is skipped, and its memory left alone, if its step is outside 0..D-1, its slot or dest
    outside 0..S-1, or its cache row outside 0..R-1.
    Raises:
        ValueError: shapes or dtypes disagree, or an innermost axis is not dense.
    """
    _check(ssm_states, u, k, g, (cache_rows, slots, steps, dests))
    if cache_rows.shape[0] == 0:
        return
    lib = library()
    if lib is None or not gdn.covers(ssm_states.shape[-1]):
        gdn_torch.replay(ssm_states, u, k, g, cache_rows, slots, steps, dests)
        return
    index = [x.to(torch.int64).contiguous() for x in (cache_rows, slots, steps, dests)]
    num_layers, num_slots, heads, v_dim, k_dim = ssm_states.shape
    args = ReplayArgs(
        ssm=ssm_states.data_ptr(),
        ssm_bf16=ssm_states.dtype == torch.bfloat16,
        ssm_layer=ssm_states.stride(0),
        ssm_slot=ssm_states.stride(1),
        ssm_head=ssm_states.stride(2),
        L=num_layers,
        S=num_slots,
        R=u.shape[1],
        D=u.shape[2],
        HV=heads,
        V=v_dim,
        K=k_dim,
        n=index[0].shape[0],
        cache_rows=index[0].data_ptr(),
        slots=index[1].data_ptr(),
        steps=index[2].data_ptr(),
        dests=index[3].data_ptr(),
    )
    for name, tensor in (("u", u), ("k", k), ("g", g)):
        setattr(args, name, tensor.data_ptr())
        for axis, stride in zip(("layer", "row", "step", "head"), tensor.stride()):
            setattr(args, f"{name}_{axis}", stride)
    lib.sgl_replay(ctypes.addressof(args))


def _check(ssm_states: Tensor, u: Tensor, k: Tensor, g: Tensor, index: tuple[Tensor, ...]) -> None:
    num_layers, _, heads, v_dim, k_dim = ssm_states.shape
    leading = (num_layers, *g.shape[1:3], heads)
    wanted = (("u", u, (*leading, v_dim)), ("k", k, (*leading, k_dim)), ("g", g, leading))
    for name, tensor, shape in wanted:
        if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
            raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}; needs {shape} fp32")
    if ssm_states.dtype not in gdn.STATE_DTYPES:
        raise ValueError(f"ssm_states is {ssm_states.dtype}; needs fp32 or bf16")
    if ssm_states.stride()[3:] != (k_dim, 1) or u.stride(-1) != 1 or k.stride(-1) != 1:
        raise ValueError("ssm_states must be dense in [V, K], u and k in their last axis")
    if any(x.shape != index[0].shape or x.is_floating_point() for x in index):
        raise ValueError("cache_rows, slots, steps, dests must be integer tensors of one length")
