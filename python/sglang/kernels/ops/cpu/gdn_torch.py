"""Plain PyTorch twin of the CPU's GDN kernels: one step routine, used by every mode.

The step decays with one rounded multiply and updates with one fused multiply-add. Torch has no
fused multiply-add, so the sum is formed in float64, where a product of two fp32 numbers is exact.
Source: gated delta rule, arXiv:2412.06464.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

L2_EPS = 1e-6


@dataclass(frozen=True)
class GDNInputs:
    """What the recurrence of T tokens needs, per value head, fp32.

    q (scaled), k  [T, HV, K]; v [T, HV, V]; g [T, HV] log decay; beta [T, HV]
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def rows(self, start: int, end: int) -> GDNInputs:
        parts = (self.q, self.k, self.v, self.g, self.beta)
        return GDNInputs(*(x[start:end] for x in parts))


def gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """(g, beta) from the projections a, b [T, HV]; softplus is linear above 20."""
    g = -torch.exp(A_log.float()) * F.softplus(a.float() + dt_bias.float(), 1.0, 20.0)
    return g, torch.sigmoid(b.float())


def l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def conv_rows(x: Tensor, window: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution with silu.

    x [T, dim] fp32, window [dim, W-1] the inputs before it, weights [dim, W] fp32
    Returns the activated output [T, dim] and all inputs [dim, W-1+T], oldest first: columns
    t+1 .. t+W-1 are the window after t+1 tokens.
    """
    inputs = torch.cat([window.float(), x.t()], dim=1)
    taps = weights.shape[1]
    num_rows = x.shape[0]
    total = inputs[:, :num_rows] * weights[:, :1]
    for tap in range(1, taps):
        total = total + inputs[:, tap : tap + num_rows] * weights[:, tap : tap + 1]
    return F.silu(total).t(), inputs


def split_heads(
    conv_out: Tensor, *, num_k_heads: int, head_k_dim: int, num_v_heads: int, head_v_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """conv_out [T, conv_dim] -> q (scaled), k, both of unit norm and per value head, and v."""
    key_dim = num_k_heads * head_k_dim
    q, k, v = conv_out.split((key_dim, key_dim, num_v_heads * head_v_dim), dim=-1)
    group = num_v_heads // num_k_heads
    q, k = (
        l2norm(x.reshape(-1, num_k_heads, head_k_dim)).repeat_interleave(group, dim=1)
        for x in (q, k)
    )
    return q * head_k_dim**-0.5, k, v.reshape(-1, num_v_heads, head_v_dim)


def decay_update(state: Tensor, g: Tensor, k: Tensor, u: Tensor) -> Tensor:
    """``fma(k, u, round(state * exp(g)))`` for state [.., V, K], g [..], k [.., K], u [.., V]."""
    decayed = state * torch.exp(g)[..., None, None]
    return fused_update(decayed, k, u)


def fused_update(decayed: Tensor, k: Tensor, u: Tensor) -> Tensor:
    product = u.double()[..., :, None] * k.double()[..., None, :]
    return (decayed.double() + product).float()


def step(state: Tensor, inputs: GDNInputs, t: int) -> tuple[Tensor, Tensor, Tensor]:
    """One token: state [HV, V, K] fp32 -> (new state, u [HV, V], output [HV, V])."""
    k, q = inputs.k[t], inputs.q[t]
    decayed = state * torch.exp(inputs.g[t])[:, None, None]
    u = inputs.beta[t][:, None] * (inputs.v[t] - (decayed * k[:, None, :]).sum(-1))
    new_state = fused_update(decayed, k, u)
    return new_state, u, (new_state * q[:, None, :]).sum(-1)


def chunked(state: Tensor, inputs: GDNInputs, *, chunk: int = 64) -> tuple[Tensor, Tensor]:
    """The recurrence over all rows in chunks; equal to ``step`` in exact arithmetic only.

    state [HV, V, K] fp32 -> (state after all rows, outputs [T, HV, V])
    """
    num_rows = inputs.q.shape[0]
    outputs = []
    for start in range(0, num_rows, chunk):
        part = inputs.rows(start, min(start + chunk, num_rows))
        state, out = _one_chunk(state, part)
        outputs.append(out)
    return state, torch.cat(outputs)


def _one_chunk(state: Tensor, part: GDNInputs) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(0, 1) for x in (part.q, part.k, part.v))
    beta = part.beta.t()[..., None]
    total = part.g.t().cumsum(-1)
    num_rows = q.shape[1]
    eye = torch.eye(num_rows, device=q.device)
    lower = torch.ones_like(eye).tril()
    decay = torch.exp((total[:, :, None] - total[:, None, :]) * lower) * lower
    system = beta * (k @ k.transpose(1, 2)) * decay * (lower - eye) + eye
    start = state.transpose(1, 2)
    carried = v - torch.exp(total)[..., None] * (k @ start)
    updates = torch.linalg.solve_triangular(system, beta * carried, upper=False, unitriangular=True)
    out = torch.exp(total)[..., None] * (q @ start) + ((q @ k.transpose(1, 2)) * decay) @ updates
    remaining = torch.exp(total[:, -1:] - total)[..., None]
    end = torch.exp(total[:, -1])[:, None, None] * start + (k * remaining).transpose(1, 2) @ updates
    return end.transpose(1, 2).contiguous(), out.transpose(0, 1)


def replay(
    ssm_states: Tensor,
    u: Tensor,
    k: Tensor,
    g: Tensor,
    cache_rows: Tensor,
    slots: Tensor,
    steps: Tensor,
    dests: Tensor,
) -> None:
    """Twin of ``replay.replay_tuples``; same arguments and skip rules."""
    num_slots, (num_rows, num_steps) = ssm_states.shape[1], u.shape[1:3]
    index = (cache_rows.tolist(), slots.tolist(), steps.tolist(), dests.tolist())
    for row, slot, last, dest in zip(*index):
        inside = 0 <= row < num_rows and 0 <= slot < num_slots and 0 <= dest < num_slots
        if not inside or not 0 <= last < num_steps:
            continue
        state = ssm_states[:, slot].float()
        for t in range(last + 1):
            state = decay_update(state, g[:, row, t], k[:, row, t], u[:, row, t])
        ssm_states[:, dest] = state.to(ssm_states.dtype)
