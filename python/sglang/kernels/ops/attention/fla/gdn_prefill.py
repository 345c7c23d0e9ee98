"""Chunked prefill of the gated delta rule, with states at track boundaries.

Triton kernels on accelerators; the same algorithm in PyTorch on a CPU, and as their reference. A request's
bits depend on its own rows, its start state and its cut, not on what else is in the call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.kernels import triton_support
from sglang.kernels.ops.attention.fla.chunk_delta_h import CHUNK_SIZE
from sglang.kernels.ops.attention.fla.fused_gdn_gating import fused_gdn_gating
from sglang.kernels.ops.attention.fla.prefill_launch import PrefillTiles, prefill_tiles
from sglang.kernels.ops.attention.fla.prefill_plan import PrefillPlan, PrefillTokens

if triton_support.AVAILABLE:
    from sglang.kernels.ops.attention.fla import prefill_call

_MIN_HEAD_DIM = 16


def normalise(x: torch.Tensor) -> torch.Tensor:
    """fp32 unit vectors along the last axis, with 1e-6 inside the square root."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _chunk_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk, fp32: q, k [HV, C, K], v [HV, C, V], g, beta [HV, C], state [HV, V, K] -> (out, state)."""
    size = q.shape[1]
    total = g.cumsum(-1)
    gap = (total[:, :, None] - total[:, None, :]).tril()
    decay = gap.exp().tril()
    lower = (beta[..., None] * (k @ k.mT) * decay).tril(-1)
    eye = torch.eye(size, device=q.device)
    values = beta[..., None] * (v - total.exp()[..., None] * (k @ state.mT))
    updates = torch.linalg.solve_triangular(eye + lower, values, upper=False, unitriangular=True)
    out = total.exp()[..., None] * (q @ state.mT) + ((q @ k.mT) * decay) @ updates
    tail = (total[:, -1:] - total).exp()
    state = total[:, -1].exp()[:, None, None] * state + (updates * tail[..., None]).mT @ k
    return out, state


def chunked_rule_torch(
    x: PrefillTokens, states: torch.Tensor, lengths: Sequence[int], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Portable form: states [N, HV, V, K] fp32 starts; returns (out [T, HV, V], final [N, HV, V, K] fp32)."""
    group = x.v.shape[1] // x.q.shape[1]
    gates = fused_gdn_gating(x.A_log, x.a, x.b, x.dt_bias)
    q = normalise(x.q).repeat_interleave(group, 1).transpose(0, 1) * scale
    k = normalise(x.k).repeat_interleave(group, 1).transpose(0, 1)
    v, g, beta = x.v.float().transpose(0, 1), gates[0][0].t(), gates[1][0].t()
    outs, finals, start = [], [], 0
    for i, length in enumerate(lengths):
        state = states[i].float()
        for lo in range(start, start + length, CHUNK_SIZE):
            cut = slice(lo, min(lo + CHUNK_SIZE, start + length))
            out, state = _chunk_torch(
                q[:, cut], k[:, cut], v[:, cut], g[:, cut], beta[:, cut], state
            )
            outs.append(out.transpose(0, 1))
        finals.append(state)
        start += length
    if not outs:
        return torch.empty_like(x.v), states.float()
    return torch.cat(outs).to(x.q.dtype), torch.stack(finals)


def _prefill_torch(
    x: PrefillTokens,
    pool: torch.Tensor,
    slots: torch.Tensor,
    plan: PrefillPlan,
    scale: float,
    track_dests: torch.Tensor | None,
) -> torch.Tensor:
    """The portable form over a pool, request by request; reads the slots on the host."""
    out = torch.empty(x.v.shape, dtype=x.q.dtype, device=x.q.device)
    dests = [-1] * len(plan.lengths) if track_dests is None else track_dests.tolist()
    row = 0
    for slot, dest, length, cut in zip(slots.tolist(), dests, plan.lengths, plan.cuts):
        known = 0 <= slot < pool.shape[0]
        state = pool[slot].float() if known else torch.zeros_like(pool[0], dtype=torch.float32)
        spans = ((row, row + cut, dest if cut else -1), (row + cut, row + length, slot))
        for low, high, to in spans:
            out[low:high], final = chunked_rule_torch(
                x.rows(low, high), state[None], [high - low], scale
            )
            state = final[0]
            if 0 <= to < pool.shape[0]:
                pool[to] = state.to(pool.dtype)
        row += length
    return out


def _require_layout(x: PrefillTokens, pool: torch.Tensor, plan: PrefillPlan) -> None:
    """Raises: ValueError for a shape or stride that the kernels would read wrongly."""
    heads, dim_k = x.q.shape[1:]
    value_heads, dim_v = x.v.shape[1:]
    if x.k.shape != x.q.shape or heads == 0 or value_heads % heads:
        raise ValueError(
            f"q {tuple(x.q.shape)} and k {tuple(x.k.shape)} must be [T, H, K] with H dividing the "
            f"{value_heads} heads of v"
        )
    if plan.num_rows != x.q.shape[0]:
        raise ValueError(f"the plan covers {plan.num_rows} rows, q has {x.q.shape[0]}")
    if pool.shape[1:] != (value_heads, dim_v, dim_k) or not pool[:1].is_contiguous():
        raise ValueError(
            f"pool must be [slots, {value_heads}, {dim_v}, {dim_k}] with contiguous slots, got "
            f"{tuple(pool.shape)} with strides {pool.stride()}"
        )
    for name, t in (("q", x.q), ("k", x.k), ("v", x.v), ("a", x.a), ("b", x.b)):
        if t.shape[0] and t.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous along its last axis, strides {t.stride()}")


def _is_tile_size(size: int) -> bool:
    return size >= _MIN_HEAD_DIM and size & (size - 1) == 0


def gdn_prefill(
    x: PrefillTokens,
    pool: torch.Tensor,
    slots: torch.Tensor,
    plan: PrefillPlan,
    *,
    scale: float,
    track_dests: torch.Tensor | None = None,
    tiles: PrefillTiles | None = None,
) -> torch.Tensor:
    """Run the prompts, advance their slots in place, and store boundary states.

    pool [S, HV, V, K] fp32 or bf16; slots [N], outside the pool starts from zero and stores nothing; the plan's
    lengths sum to T; track_dests [N]: where the state at a prompt's cut goes, outside the pool nowhere. A
    destination must not be another prompt's slot. No host synchronisation on an accelerator.
    Returns [T, HV, V] in q's dtype. Raises: ValueError for shapes that disagree.
    """
    _require_layout(x, pool, plan)
    dim_k, dim_v = x.q.shape[2], x.v.shape[2]
    fits = _is_tile_size(dim_k) and _is_tile_size(dim_v)
    if not (fits and triton_support.runs_on(x.q)):
        return _prefill_torch(x, pool, slots, plan, scale, track_dests)
    out = torch.empty(x.v.shape, dtype=x.q.dtype, device=x.q.device)
    if plan.num_rows:
        tiles = tiles or prefill_tiles(x.q.element_size())
        scratch = prefill_call.PrefillScratch.allocate(x, plan)
        prefill_call.run_chunks(x, plan, scratch, tiles, scale)
        prefill_call.run_states(x, plan, scratch, tiles, pool, slots, track_dests, out)
    return out
