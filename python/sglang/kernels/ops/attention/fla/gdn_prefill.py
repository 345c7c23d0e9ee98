"""Chunked prefill of the gated delta rule, with states at track boundaries.

On accelerators the chunk kernels come from fla-core (extra: [cuda]); without it a portable PyTorch form of
the same chunked algorithm serves, with one warning.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from sglang.kernels.ops.attention.fla.chunk_delta_h import CHUNK_SIZE
from sglang.kernels.ops.mamba.mamba_state_scatter_triton import fused_mamba_state_scatter_with_mask

logger = logging.getLogger(__name__)

_HAS_FLA = importlib.util.find_spec("fla") is not None


@lru_cache(maxsize=1)
def _fla_chunk_rule():
    """fla-core's chunk op, or None with a warning saying what to install."""
    if not _HAS_FLA:
        logger.warning(
            "fla-core is not installed: GDN prefill runs in PyTorch, slowly ([cuda] extra)"
        )
        return None
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    if "state_v_first" not in inspect.signature(chunk_gated_delta_rule).parameters:
        logger.warning("fla-core is older than 0.6: GDN prefill runs in PyTorch, slowly")
        return None
    return chunk_gated_delta_rule


@dataclass(frozen=True)
class PrefillTokens:
    """Packed prompts of one layer: q, k [T, H, K]; v [T, HV, V]; g, beta [T, HV] fp32; q, k not normalised."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def select(self, rows: torch.Tensor) -> PrefillTokens:
        return PrefillTokens(*(x[rows] for x in (self.q, self.k, self.v, self.g, self.beta)))


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
    q = normalise(x.q).repeat_interleave(group, 1).transpose(0, 1) * scale
    k = normalise(x.k).repeat_interleave(group, 1).transpose(0, 1)
    v, g, beta = x.v.float().transpose(0, 1), x.g.float().t(), x.beta.float().t()
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


def _run(
    x: PrefillTokens, states: torch.Tensor, lengths: Sequence[int], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rule = _fla_chunk_rule() if x.q.device.type != "cpu" else None
    if rule is None:
        return chunked_rule_torch(x, states, lengths, scale)
    bounds = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    out, final = rule(
        x.q.unsqueeze(0).contiguous(),
        x.k.unsqueeze(0).contiguous(),
        x.v.unsqueeze(0).contiguous(),
        x.g.unsqueeze(0).contiguous(),
        x.beta.unsqueeze(0).contiguous(),
        scale=scale,
        initial_state=states.float().contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        state_v_first=True,
        cu_seqlens=bounds.to(x.q.device, non_blocking=True),
        cu_seqlens_cpu=bounds,
    )
    return out[0], final


def gdn_prefill(
    x: PrefillTokens,
    pool: torch.Tensor,
    slots: torch.Tensor,
    lengths: Sequence[int],
    *,
    scale: float,
    track_rows: Sequence[int] | None = None,
    track_dests: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the prompts, advance their slots in place, and store boundary states.

    pool [S, HV, V, K]; slots [N], -1 starts from zero and stores nothing; lengths [N] on the host, all > 0;
    track_rows [N] on the host: store the state after so many rows at track_dests [N], -1 none.
    A tracked prompt is cut at its boundary and continued from there. Returns [T, HV, V] in q's dtype.
    """
    slots = slots.long()
    starts = pool[slots.clamp(min=0)].float()
    starts = torch.where((slots >= 0)[:, None, None, None], starts, 0.0)
    cuts = list(track_rows) if track_rows is not None else [-1] * len(lengths)
    first = [cut if 0 < cut < length else length for cut, length in zip(cuts, lengths)]
    if first == list(lengths):
        out, final = _run(x, starts, lengths, scale)
        boundary = final
    else:
        out, boundary, final = _run_cut(x, starts, lengths, first, scale)
    if track_dests is not None:
        wanted = torch.tensor([0 < c <= n for c, n in zip(cuts, lengths)], device=pool.device)
        _store(pool, torch.where(wanted, track_dests.long(), -1), boundary)
    _store(pool, slots, final)
    return out


def _run_cut(
    x: PrefillTokens,
    starts: torch.Tensor,
    lengths: Sequence[int],
    first: Sequence[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, states at the cuts, final states): heads of all prompts first, then what is left of some."""
    head_rows: list[int] = []
    tail_rows: list[int] = []
    start = 0
    for length, cut in zip(lengths, first):
        head_rows += range(start, start + cut)
        tail_rows += range(start + cut, start + length)
        start += length
    device = x.q.device
    heads, tails = (torch.tensor(rows, device=device) for rows in (head_rows, tail_rows))
    out_head, boundary = _run(x.select(heads), starts, first, scale)
    rest = [i for i, (length, cut) in enumerate(zip(lengths, first)) if cut < length]
    which = torch.tensor(rest, device=device)
    tail_lengths = [lengths[i] - first[i] for i in rest]
    out_tail, tail_final = _run(x.select(tails), boundary[which], tail_lengths, scale)
    out = torch.empty(x.v.shape, dtype=out_head.dtype, device=device)
    out[heads], out[tails] = out_head, out_tail
    final = boundary.clone()
    final[which] = tail_final
    return out, boundary, final


def _store(pool: torch.Tensor, dests: torch.Tensor, states: torch.Tensor) -> None:
    """pool[dest] = state; destinations outside the pool are skipped."""
    source = states.to(pool.dtype).contiguous()[None, :, None]
    step = torch.zeros_like(dests)
    fused_mamba_state_scatter_with_mask(pool[None], source, dests, step)
