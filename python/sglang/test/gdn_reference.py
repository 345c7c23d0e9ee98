"""fp32 plain-PyTorch twins of the GDN ops: slow, readable, and with the kernels' state arithmetic.

The state update is one rounded multiply and one fused multiply-add, as in every kernel. Reductions follow
PyTorch's order, so outputs agree with a kernel within a tolerance and replays agree exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from sglang.kernels.exact_math import step_state

StepFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

OUTPUT_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
"""Absolute bound on outputs of order one: reduction order in fp32, one rounding in bf16."""


def unfused_step_state(
    state: torch.Tensor, decay: torch.Tensor, k: torch.Tensor, u: torch.Tensor
) -> torch.Tensor:
    """The step with a rounded product: what Triton's interpreter computes, and a wrong kernel."""
    return state * decay[..., None, None] + u.unsqueeze(-1) * k.unsqueeze(-2)


@dataclass
class GdnTrace:
    """Everything one call may record. out [N, T, HV, V]; snapshots [N, T, HV, V, K] in state dtype;
    u [N, T, HV, V], k [N, T, HV, K], g [N, T, HV] fp32; final [N, HV, V, K] fp32."""

    out: torch.Tensor
    snapshots: torch.Tensor
    u: torch.Tensor
    k: torch.Tensor
    g: torch.Tensor
    final: torch.Tensor


@dataclass
class GdnInputs:
    """q, k [N, T, H, K]; v [N, T, HV, V]; a, b [N, T, HV]; A_log, dt_bias [HV]; start [N, HV, V, K]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    start: torch.Tensor
    scale: float | None = None
    parents: list[list[int]] | None = field(default=None)


def gdn_reference(x: GdnInputs, *, step: StepFn = step_state) -> GdnTrace:
    """The gated delta rule, token by token, fp32, with L2-normalised q and k."""
    n, num_tokens, num_k_heads, dim_k = x.q.shape
    group = x.v.shape[2] // num_k_heads
    scale = dim_k**-0.5 if x.scale is None else x.scale
    q, k = (normalise(t.float()).repeat_interleave(group, dim=2) for t in (x.q, x.k))
    q = q * scale
    g = -x.A_log.float().exp() * F.softplus(x.a.float() + x.dt_bias.float())
    beta = x.b.float().sigmoid()
    start = x.start.float()
    state = start
    outs, snaps, updates = [], [], []
    for t in range(num_tokens):
        if x.parents is not None:
            state = torch.stack([_parent_state(x, snaps, start, i, t) for i in range(n)])
        decay = g[:, t].exp()
        decayed = state * decay[..., None, None]
        seen = (decayed * k[:, t].unsqueeze(-2)).sum(-1)
        u = (x.v[:, t].float() - seen) * beta[:, t][..., None]
        state = step(state, decay, k[:, t], u)
        outs.append((state * q[:, t].unsqueeze(-2)).sum(-1))
        snaps.append(state.to(x.start.dtype))
        updates.append(u)
    return GdnTrace(
        out=torch.stack(outs, 1).to(x.q.dtype),
        snapshots=torch.stack(snaps, 1),
        u=torch.stack(updates, 1),
        k=k,
        g=g,
        final=state,
    )


def _parent_state(
    x: GdnInputs, snaps: list[torch.Tensor], start: torch.Tensor, i: int, t: int
) -> torch.Tensor:
    parent = x.parents[i][t] if x.parents is not None else t - 1
    return snaps[parent][i].float() if 0 <= parent < t else start[i]


def normalise(x: torch.Tensor) -> torch.Tensor:
    """Unit length along the last axis, with 1e-6 inside the square root."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def replay_reference(
    start: torch.Tensor,
    u: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    num_steps: int,
    *,
    step: StepFn = step_state,
) -> torch.Tensor:
    """start [HV, V, K] advanced over the first num_steps tuples of u [D, HV, V], k [D, HV, K], g [D, HV]."""
    state = start.float()
    for t in range(num_steps):
        state = step(state, g[t].exp(), k[t], u[t])
    return state.to(start.dtype)


def conv_reference(
    history: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    silu: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal depthwise convolution. history [dim, W-1], x [dim, T], weight [dim, W].

    Returns (out [dim, T] in x's dtype, windows [T, dim, W-1] after each token).
    """
    width = weight.shape[1]
    joined = torch.cat([history.float(), x.float()], dim=1)
    out = torch.zeros_like(x, dtype=torch.float32)
    if bias is not None:
        out += bias.float()[:, None]
    for w in range(width):
        out += joined[:, w : w + x.shape[1]] * weight[:, w : w + 1].float()
    if silu:
        out = out * torch.sigmoid(out)
    raw = torch.cat([history, x.to(history.dtype)], dim=1)
    windows = torch.stack([raw[:, t + 1 : t + width] for t in range(x.shape[1])])
    return out.to(x.dtype), windows
