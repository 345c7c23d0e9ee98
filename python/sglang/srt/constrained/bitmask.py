"""Masks of 32 tokens a word, applied to logits on any device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sglang.srt.constrained.grammar_state import BITS


def forbid(logits: Tensor, mask: np.ndarray) -> None:
    """Set the logits of tokens without a bit to minus infinity, in place.

    logits [M, vocab] fp32; mask [M, words] int32, bit t % 32 of word t // 32 for token t.
    The grammar wins over a minimum length that forbids the only tokens it allows.
    """
    words = torch.from_numpy(mask).to(logits.device)
    shifts = torch.arange(BITS, dtype=torch.int32, device=logits.device)
    bits = (words.unsqueeze(-1) >> shifts) & 1
    allowed = bits.reshape(mask.shape[0], -1)[:, : logits.shape[-1]].bool()
    logits.masked_fill_(~allowed, float("-inf"))
    is_empty = torch.isneginf(logits).all(dim=-1, keepdim=True)
    logits.masked_fill_(is_empty & allowed, 0.0)
