"""fp32 plain-PyTorch twins of the FP8 and MoE ops, with their roundings of inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.test.checkpoints.quantize import BLOCK, FP8_MAX


def quantize_activations_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """(q [M, K] e4m3, scale [M, ceil(K/128)] fp32); see ``quantize_activations``."""
    num_rows, num_columns = x.shape
    groups = -(-num_columns // BLOCK)
    padded = torch.zeros(num_rows, groups * BLOCK)
    padded[:, :num_columns] = x.float()
    blocks = padded.view(num_rows, groups, BLOCK)
    largest = blocks.abs().amax(-1)
    scale = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    q = (blocks / scale[..., None]).clamp(-FP8_MAX, FP8_MAX).view(num_rows, -1)
    return q[:, :num_columns].to(torch.float8_e4m3fn), scale


def dequantize_activations(q: Tensor, scale: Tensor) -> Tensor:
    """[M, K] fp32."""
    return q.float() * scale.repeat_interleave(BLOCK, 1)[:, : q.shape[1]]


def experts_reference(
    x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Weighted sum of gated MLPs, fp32: gate_up [E, 2I, H], down [E, H, I]; chosen -1 adds nothing."""
    out = torch.zeros(x.shape[0], down.shape[1])
    for t in range(x.shape[0]):
        for weight, expert in zip(weights[t], chosen[t].tolist(), strict=True):
            if expert < 0:
                continue
            gate, up = (gate_up[expert] @ x[t]).chunk(2)
            out[t] += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    return out


def fake_quantize(x: Tensor) -> Tensor:
    """x [M, K] as the FP8 kernels see it: quantised in groups of 128 and back, fp32."""
    return dequantize_activations(*quantize_activations_reference(x))


def rounded_experts_reference(
    rounded: Tensor,
    weights: Tensor,
    chosen: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """Weighted sum of gated MLPs, fp32, with the kernels' roundings: inputs to FP8, results to ``dtype``.

    As ``experts_reference``; rows ``rounded`` are FP8 values already, gate_up and down dequantised weights.
    """
    out = torch.zeros(rounded.shape[0], down.shape[1])
    for expert in chosen.unique().tolist():
        rows, ranks = torch.nonzero(chosen == expert, as_tuple=True)
        both = (rounded[rows] @ gate_up[expert].T).to(dtype).float()
        gate, up = both.chunk(2, dim=1)
        inner = (torch.nn.functional.silu(gate) * up).to(dtype)
        part = (fake_quantize(inner) @ down[expert].T).to(dtype).float()
        out.index_add_(0, rows, part * weights[rows, ranks, None].float())
    return out
