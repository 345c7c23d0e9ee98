"""Block-scaled FP8 weights -> compute dtype."""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_SUFFIX = "_scale_inv"


def dequantize(weight: Tensor, scale: Tensor, block: tuple[int, int], *, name: str) -> Tensor:
    """``weight[o, i] * scale[o // block[0], i // block[1]]`` in fp32.

    weight [out, in] float8_e4m3fn; scale [ceil(out / block[0]), ceil(in / block[1])] bf16 or fp32.
    Raises:
        ValueError: the scale's shape does not cover the weight.
    """
    rows, cols = weight.shape
    wanted = (-(-rows // block[0]), -(-cols // block[1]))
    if tuple(scale.shape) != wanted:
        raise ValueError(
            f"{name}{SCALE_SUFFIX} has shape {tuple(scale.shape)}; blocks of {block} over "
            f"{tuple(weight.shape)} need {wanted}"
        )
    out = weight.float()
    scale32 = scale.float()
    for i in range(wanted[0]):
        stripe = out[i * block[0] : (i + 1) * block[0]]
        stripe.mul_(scale32[i].repeat_interleave(block[1])[:cols])
    return out


def is_fp8(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float8_e4m3fn
