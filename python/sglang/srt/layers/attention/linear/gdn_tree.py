"""Gated-DeltaNet verify of draft trees: every node continues from its own parent's state.

Nodes of equal depth, of all requests, advance together. Pool states are read and never written; the
state and conv window after every node go to the verify scratch. Plain PyTorch, any device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from sglang.kernels.ops.cpu import gdn_torch
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention


class SnapshotLayer(Protocol):
    """One layer of a state pool with verify scratch."""

    conv: list[Tensor]
    temporal: Tensor
    intermediate_ssm: Tensor | None
    intermediate_conv_window: list[Tensor]


@dataclass(frozen=True)
class TreeScratch:
    """One layer's pool and verify scratch (S state slots, R scratch rows, D nodes).

    temporal [S, HV, V, K], conv [S, conv_dim, W-1];
    states [R, D, HV, V, K], windows [R, D, conv_dim, W-1]
    """

    temporal: Tensor
    conv: Tensor
    states: Tensor
    windows: Tensor

    @staticmethod
    def of_layer(cache: SnapshotLayer) -> TreeScratch:
        """Raises: ValueError if the pool records update tuples instead of snapshots."""
        if cache.intermediate_ssm is None:
            raise ValueError(
                "a tree verify needs state snapshots; drop --enable-linear-lossless-verify"
            )
        return TreeScratch(
            temporal=cache.temporal,
            conv=cache.conv[0],
            states=cache.intermediate_ssm,
            windows=cache.intermediate_conv_window[0],
        )


Level = tuple[Tensor, Tensor, Tensor]


def tree_levels(parents: Sequence[Sequence[int]], device: torch.device) -> tuple[Level, ...]:
    """Nodes of all requests grouped by depth, once per call.

    parents [R][D]. Each level holds, as [n] int64 tensors, the request, the flat row ``r * D + node``,
    and the flat row of the parent (of the first level: the row itself, which nobody reads). A parent
    that is negative, the node itself or a later one cannot be continued from: such a node starts
    from the pool's state.
    """
    width = len(parents[0])
    levels: list[list[tuple[int, int, int]]] = []
    for request, own in enumerate(parents):
        depths: list[int] = []
        for node, parent in enumerate(own):
            valid = 0 <= parent < node
            depths.append(depths[parent] + 1 if valid else 0)
            while len(levels) <= depths[node]:
                levels.append([])
            row = request * width + node
            above = request * width + parent if valid else row
            levels[depths[node]].append((request, row, above))
    return tuple(tuple(torch.tensor(level).t().to(device)) for level in levels)


def record_trees(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    layer: RadixLinearAttention,
    scratch: TreeScratch,
    *,
    slots: Tensor,
    scratch_rows: Tensor,
    levels: Sequence[Level],
) -> Tensor:
    """Convolve and run the recurrence over trees of D nodes.

    mixed_qkv [R * D, conv_dim], a, b [R * D, HV]; slots, scratch_rows [R], a negative slot skips its
    request. Returns [R * D, HV, V], zero for skipped requests. Never waits for the device.
    """
    num_requests = slots.shape[0]
    width = mixed_qkv.shape[0] // num_requests
    g, beta = gdn_torch.gates(a, b, layer.A_log, layer.dt_bias)
    x = mixed_qkv.to(scratch.conv.dtype).float()
    out = x.new_zeros((num_requests * width, layer.num_v_heads, layer.head_v_dim))
    states = x.new_zeros((num_requests * width, *scratch.temporal.shape[1:]))
    windows = x.new_zeros((num_requests * width, *scratch.conv.shape[1:]))
    live = slots >= 0
    own_slots = slots.clamp_min(0).long()
    for depth, (request, row, above) in enumerate(levels):
        if depth == 0:
            own = own_slots[request]
            state, window = scratch.temporal[own].float(), scratch.conv[own].float()
        else:
            state, window = states[above], windows[above]
        inputs = torch.cat([window, x[row].unsqueeze(-1)], dim=-1)
        parts = _heads(_convolve(inputs, layer.conv_weights), layer, g[row], beta[row])
        states[row], out[row] = _step(state, parts)
        windows[row] = inputs[:, :, 1:]
    _store(scratch.states, scratch_rows, states.view(num_requests, width, *states.shape[1:]), live)
    _store(
        scratch.windows, scratch_rows, windows.view(num_requests, width, *windows.shape[1:]), live
    )
    keep = live.repeat_interleave(width).view(-1, 1, 1)
    return torch.where(keep, out, torch.zeros_like(out)).to(mixed_qkv.dtype)


def _store(buffer: Tensor, rows: Tensor, values: Tensor, live: Tensor) -> None:
    """buffer[rows[r], :D] = values[r] for live requests; rows of the others keep what they hold."""
    rows, width = rows.long(), values.shape[1]
    keep = live.view(-1, *[1] * (values.dim() - 1))
    buffer[rows, :width] = torch.where(keep, values.to(buffer.dtype), buffer[rows, :width])


def _convolve(inputs: Tensor, weights: Tensor) -> Tensor:
    """One output per row: inputs [n, dim, W] -> [n, dim], activated; oldest tap first."""
    weights = weights.float()
    total = inputs[:, :, 0] * weights[:, 0]
    for tap in range(1, weights.shape[1]):
        total = total + inputs[:, :, tap] * weights[:, tap]
    return F.silu(total)


def _heads(
    conv_out: Tensor, layer: RadixLinearAttention, g: Tensor, beta: Tensor
) -> gdn_torch.GDNInputs:
    q, k, v = gdn_torch.split_heads(
        conv_out,
        num_k_heads=layer.num_k_heads,
        head_k_dim=layer.head_k_dim,
        num_v_heads=layer.num_v_heads,
        head_v_dim=layer.head_v_dim,
    )
    return gdn_torch.GDNInputs(q, k, v, g, beta)


def _step(state: Tensor, parts: gdn_torch.GDNInputs) -> tuple[Tensor, Tensor]:
    """One token of n independent states [n, HV, V, K] -> (new states, outputs [n, HV, V])."""
    k = parts.k[:, :, None, :]
    decayed = state * torch.exp(parts.g)[..., None, None]
    u = parts.beta[..., None] * (parts.v - (decayed * k).sum(-1))
    new = gdn_torch.fused_update(decayed, parts.k, u)
    return new, (new * parts.q[:, :, None, :]).sum(-1)
