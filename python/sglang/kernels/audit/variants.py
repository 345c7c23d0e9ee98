"""The kernels under audit, the shapes they are compiled with, and planted wrong ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import triton
import triton.language as tl

from sglang.kernels.ops.attention.fla.gdn_step import fused_mul_add, rounded_mul
from sglang.kernels.ops.attention.fla.recurrent_kernel import recurrent_step_kernel
from sglang.kernels.ops.mamba.replay_kernels import replay_tuples_kernel

HEAD = 128


@dataclass(frozen=True)
class Target:
    """A GPU to compile for."""

    name: str
    backend: str
    arch: int | str
    warp_size: int

    @property
    def is_nvidia(self) -> bool:
        return self.backend == "cuda"


TARGETS = (
    Target("sm_80", "cuda", 80, 32),
    Target("sm_90", "cuda", 90, 32),
    Target("sm_100", "cuda", 100, 32),
    Target("sm_120", "cuda", 120, 32),
    Target("gfx942", "hip", "gfx942", 64),
    Target("gfx950", "hip", "gfx950", 64),
)


@dataclass(frozen=True)
class Variant:
    """One compiled form. `tile` is (state rows, warps); `planted` ones must fail the audit."""

    name: str
    kernel: Any
    pointers: dict[str, str]
    constants: dict[str, Any]
    tile: tuple[int, int] = (32, 1)
    only: tuple[str, ...] = ()
    planted: bool = False
    aligned: tuple[str, ...] = field(default=())

    def serves(self, target: Target) -> bool:
        return not self.only or target.name in self.only

    def elements_per_thread(self, target: Target) -> int:
        rows, warps = self.tile
        return rows * HEAD // (target.warp_size * warps)


@triton.jit
def contracted_step_kernel(states, k, u, g, steps, BV: tl.constexpr, BK: tl.constexpr):
    """Planted: one expression, in which the compiler chooses what to fuse."""
    o_k = tl.arange(0, BK)
    o_v = tl.arange(0, BV)
    p_h = states + o_v[:, None] * BK + o_k[None, :]
    b_h = tl.load(p_h)
    t = 0
    while t < steps:
        decay = tl.exp(tl.load(g + t))
        b_k = tl.load(k + t * BK + o_k)
        b_u = tl.load(u + t * BV + o_v)
        b_h = b_h * decay + b_k[None, :] * b_u[:, None]
        t += 1
    tl.store(p_h, b_h)


@triton.jit
def swapped_step_kernel(states, k, u, g, steps, BV: tl.constexpr, BK: tl.constexpr):
    """Planted: k*u rounded and the state multiplied inside the fma."""
    o_k = tl.arange(0, BK)
    o_v = tl.arange(0, BV)
    p_h = states + o_v[:, None] * BK + o_k[None, :]
    b_h = tl.load(p_h)
    t = 0
    while t < steps:
        decay = tl.zeros_like(b_h) + tl.exp(tl.load(g + t))
        b_k = tl.broadcast_to(tl.load(k + t * BK + o_k)[None, :], [BV, BK])
        b_u = tl.broadcast_to(tl.load(u + t * BV + o_v)[:, None], [BV, BK])
        b_h = fused_mul_add(b_h, decay, rounded_mul(b_k, b_u, False), False)
        t += 1
    tl.store(p_h, b_h)


def _recurrent(name: str, state: str, *, tree: bool, **more: Any) -> Variant:
    fp32 = ("a_log", "dt_bias", "u_ring", "k_ring", "g_ring")
    ints = ("slots", "cu_seqlens", "rows")
    pointers = dict.fromkeys(("q", "k", "v", "a", "b", "out"), "*bf16")
    pointers |= dict.fromkeys(fp32, "*fp32") | dict.fromkeys(ints, "*i32")
    pointers |= {"states": f"*{state}", "snapshots": f"*{state}", "scale": "fp32"}
    constants: dict[str, Any] = {
        "SOFTPLUS_BETA": 1.0,
        "SOFTPLUS_THRESHOLD": 20.0,
        "H": 16,
        "HV": 32,
        "K": HEAD,
        "V": HEAD,
        "BK": HEAD,
        "HAS_STATE": True,
        "VARLEN": True,
        "L2_NORM": True,
        "GATES_GIVEN": False,
        "TREE": tree,
    }
    if tree:
        pointers["parents"] = "*i64"
    else:
        constants["parents"] = None
    return Variant(
        name, recurrent_step_kernel, pointers, constants, aligned=("state_stride_slot",), **more
    )


def _replay(name: str, state: str, *, dests: bool, track: bool) -> Variant:
    pointers = {"states": f"*{state}", "u": "*fp32", "k": "*fp32", "g": "*fp32"}
    pointers |= dict.fromkeys(("src_rows", "slots"), "*i32") | {"steps": "*i64"}
    constants: dict[str, Any] = {
        "HV": 32,
        "K": HEAD,
        "V": HEAD,
        "BK": HEAD,
        "HAS_DESTS": dests,
        "HAS_TRACK": track,
        "BLOCK_N": 64,
    }
    for names, present in ((("dests",), dests), (("track_dests", "track_steps"), track)):
        if present:
            pointers |= dict.fromkeys(names, "*i64")
        else:
            constants |= dict.fromkeys(names)
    aligned = ("state_stride_layer", "state_stride_slot", "u_stride_layer", "u_stride_row")
    return Variant(name, replay_tuples_kernel, pointers, constants, tile=(32, 4), aligned=aligned)


def _planted(name: str, kernel: Any) -> Variant:
    pointers = dict.fromkeys(("states", "k", "u", "g"), "*fp32")
    return Variant(name, kernel, pointers, {"BK": HEAD}, planted=True)


def all_variants() -> list[Variant]:
    """Chain verify serves decode, snapshots and tuples in one compiled kernel; trees have their own."""
    found = []
    for state in ("fp32", "bf16"):
        found.append(_recurrent(f"verify chain {state}", state, tree=False))
        found.append(
            _recurrent(f"verify chain {state} BV4", state, tree=False, tile=(4, 1), only=("sm_90",))
        )
        found.append(_recurrent(f"verify tree {state}", state, tree=True))
        found.append(_replay(f"replay in place {state}", state, dests=False, track=False))
        found.append(_replay(f"replay to dest {state}", state, dests=True, track=False))
        found.append(_replay(f"commit with track {state}", state, dests=False, track=True))
    for rows, warps in ((8, 4), (16, 2)):
        name = f"verify chain fp32 BV{rows}"
        found.append(_recurrent(name, "fp32", tree=False, tile=(rows, warps), only=("gfx950",)))
    found.append(_planted("planted: one expression", contracted_step_kernel))
    found.append(_planted("planted: fused the wrong product", swapped_step_kernel))
    return found
