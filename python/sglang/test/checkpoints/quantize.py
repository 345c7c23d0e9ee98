"""Block-wise FP8 (e4m3) weights with ``weight_scale_inv``, as the published packs store them."""

from __future__ import annotations

import torch

FP8_MAX = 448.0
BLOCK = 128

_QUANTISED_LEAVES = frozenset(
    {
        "q_proj", "k_proj", "v_proj", "o_proj",
        "in_proj_qkv", "in_proj_z", "in_proj_qkvz", "out_proj",
        "gate_proj", "up_proj", "down_proj",
    }
)  # fmt: skip


def is_quantised(name: str) -> bool:
    """Whether the tensor ``name`` is an FP8 matrix in a published pack."""
    if name.startswith("model.visual.") or not name.endswith(".weight"):
        return False
    return name.split(".")[-2] in _QUANTISED_LEAVES


def quantize_blockwise(
    weight: torch.Tensor, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight [out, in]`` fp32 -> (e4m3 ``[out, in]``, scale ``[ceil(out/128), ceil(in/128)]``).

    The weight is ``e4m3 * scale`` of its block. The scale is rounded to its stored dtype first and
    the division uses the rounded value, so no element is clipped twice.
    """
    rows, cols = weight.shape
    row_blocks, col_blocks = -(-rows // BLOCK), -(-cols // BLOCK)
    padded = weight.new_zeros(row_blocks * BLOCK, col_blocks * BLOCK)
    padded[:rows, :cols] = weight
    blocks = padded.view(row_blocks, BLOCK, col_blocks, BLOCK)
    scale = (blocks.abs().amax(dim=(1, 3)).clamp_min(1e-12) / FP8_MAX).to(scale_dtype)
    scaled = (blocks / scale.float()[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX)
    quantised = scaled.reshape_as(padded)[:rows, :cols].to(torch.float8_e4m3fn)
    return quantised.contiguous(), scale


def dequantize_blockwise(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`quantize_blockwise`; fp32 ``[out, in]``."""
    rows, cols = weight.shape
    expanded = scale.float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return weight.float() * expanded[:rows, :cols]
