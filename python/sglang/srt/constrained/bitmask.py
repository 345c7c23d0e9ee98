"""Masks of 32 tokens a word, applied to logits on any device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_BITS_OF_BYTE = 8


def forbid(logits: Tensor, mask: np.ndarray) -> None:
    """Set the logits of tokens without a bit to minus infinity, in place.

    logits [M, vocab] fp32; mask [M, words] int32, bit t % 32 of word t // 32 for token t.
    The grammar wins over a minimum length that forbids the only tokens it allows.
    """
    is_forbidden = ~_bits(mask, logits)
    logits.masked_fill_(is_forbidden, float("-inf"))
    is_empty = torch.isneginf(logits.amax(dim=-1))
    if is_empty.any():
        logits.masked_fill_(is_empty.unsqueeze(-1) & ~is_forbidden, 0.0)


def _bits(mask: np.ndarray, logits: Tensor) -> Tensor:
    """[M, vocab] bool on the logits' device; a GPU gets the words and unpacks them itself."""
    octets = mask.view(np.uint8)
    if logits.device.type == "cpu":
        flat = np.unpackbits(octets, axis=1, bitorder="little")
        return torch.from_numpy(flat).view(torch.bool)[:, : logits.shape[-1]]
    shifts = torch.arange(_BITS_OF_BYTE, dtype=torch.uint8, device=logits.device)
    bits = (torch.from_numpy(octets).to(logits.device).unsqueeze(-1) >> shifts) & 1
    return bits.view(mask.shape[0], -1)[:, : logits.shape[-1]].bool()
