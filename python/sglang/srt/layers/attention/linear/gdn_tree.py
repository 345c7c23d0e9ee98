"""Gated-DeltaNet verify of draft trees: every node continues from its own parent's state.

Nodes of equal depth, of all requests, advance together. Pool states are read and never written; the
state and conv window after every node go to the verify scratch. Plain PyTorch, any device.
"""

from __future__ import annotations

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


def levels_of(parents: list[list[int]]) -> list[list[tuple[int, int, int]]]:
    """(request, node, parent) of every node, grouped by depth.

    A parent that is negative, the node itself or a later one cannot be continued from: such a node
    starts from the pool's state, and nothing else is touched.
    """
    levels: list[list[tuple[int, int, int]]] = []
    for request, own in enumerate(parents):
        depths: list[int] = []
        for node, parent in enumerate(own):
            valid = 0 <= parent < node
            depth = depths[parent] + 1 if valid else 0
            depths.append(depth)
            while len(levels) <= depth:
                levels.append([])
            levels[depth].append((request, node, parent if valid else -1))
    return levels


def record_trees(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    layer: RadixLinearAttention,
    scratch: TreeScratch,
    *,
    slots: Tensor,
    scratch_rows: Tensor,
    parents: Tensor,
) -> Tensor:
    """Convolve and run the recurrence over trees of D nodes.

    mixed_qkv [R * D, conv_dim], a, b [R * D, HV]; slots, scratch_rows [R], a negative slot skips its
    request; parents [R, D]. Returns [R * D, HV, V], zero for skipped requests.
    """
    num_requests, width = parents.shape
    device = mixed_qkv.device
    g, beta = gdn_torch.gates(a, b, layer.A_log, layer.dt_bias)
    out = mixed_qkv.new_zeros((num_requests * width, layer.num_v_heads, layer.head_v_dim))
    states = torch.zeros(
        (num_requests * width, *scratch.temporal.shape[1:]), dtype=torch.float32, device=device
    )
    windows = torch.zeros(
        (num_requests * width, *scratch.conv.shape[1:]), dtype=torch.float32, device=device
    )
    x = mixed_qkv.to(scratch.conv.dtype).float()
    live = (slots >= 0).tolist()
    slots = slots.long()
    for level in levels_of(parents.tolist()):
        nodes = [(r, r * width + node, r * width + parent) for r, node, parent in level if live[r]]
        if not nodes:
            continue
        request, row, above = torch.tensor(nodes, device=device).t()
        if level[0][2] < 0:
            own = slots[request]
            state, window = scratch.temporal[own].float(), scratch.conv[own].float()
        else:
            state, window = states[above], windows[above]
        inputs = torch.cat([window, x[row].unsqueeze(-1)], dim=-1)
        parts = _heads(_convolve(inputs, layer.conv_weights), layer, g[row], beta[row])
        states[row], out[row] = _step(state, parts)
        windows[row] = inputs[:, :, 1:]
    kept = torch.nonzero(slots >= 0).flatten()
    rows = scratch_rows.long()[kept]
    by_node = states.view(num_requests, width, *states.shape[1:])[kept]
    scratch.states[rows, :width] = by_node.to(scratch.states.dtype)
    by_node = windows.view(num_requests, width, *windows.shape[1:])[kept]
    scratch.windows[rows, :width] = by_node.to(scratch.windows.dtype)
    return out


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
