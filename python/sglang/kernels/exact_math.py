"""fp32 arithmetic with exactly the roundings of the kernels, in plain PyTorch.

`fma_f32` is the correctly rounded a*b+c: the product of two fp32 numbers is exact in fp64, the sum is
rounded to odd there, and rounding to odd with 29 spare bits makes the last rounding the only one.
"""

from __future__ import annotations

import torch


def fma_f32(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """fp32 a*b+c with one rounding; shapes broadcast, inputs are fp32."""
    product = a.double() * b.double()
    addend = c.double()
    total = product + addend
    shadow = total - product
    error = (product - (total - shadow)) + (addend - shadow)
    total = total.contiguous()
    bits = total.view(torch.int64)
    inexact_even = (error != 0) & torch.isfinite(error) & ((bits & 1) == 0)
    away = torch.where((error > 0) == (total > 0), 1, -1)
    odd = (bits + away).view(torch.float64)
    return torch.where(inexact_even, odd, total).float()


def step_state(
    state: torch.Tensor, decay: torch.Tensor, k: torch.Tensor, u: torch.Tensor
) -> torch.Tensor:
    """fp32 state [..., V, K] after one step: one rounded multiply feeding one fused multiply-add.

    decay [...], k [..., K], u [..., V], all fp32.
    """
    return fma_f32(u.unsqueeze(-1), k.unsqueeze(-2), state * decay[..., None, None])
