"""Attention over a paged context, written for reading: fp32, one row and head at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def paged_attention_reference(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    *,
    req_to_token: Tensor,
    rows: Tensor,
    prefix_lens: Tensor,
    query_start_loc: Tensor,
    scaling: float,
    is_causal: bool = True,
    sliding_window: int = 0,
) -> Tensor:
    """Same arguments and result as ``kernels.ops.attention.paged.op.paged_attention``."""
    out = torch.zeros_like(q)
    group = q.shape[1] // k_buffer.shape[1]
    for r, row in enumerate(rows.tolist()):
        begin, end = query_start_loc[r].item(), query_start_loc[r + 1].item()
        prefix = prefix_lens[r].item()
        context = prefix + end - begin
        slots = req_to_token[row, :context].long()
        for t in range(end - begin):
            position = prefix + t
            visible = torch.arange(context, device=q.device)
            seen = torch.ones_like(visible, dtype=torch.bool)
            if is_causal:
                seen &= visible <= position
            if sliding_window:
                seen &= (visible - position).abs() < sliding_window
            chosen = slots[seen]
            for head in range(q.shape[1]):
                keys = k_buffer[chosen, head // group].float()
                values = v_buffer[chosen, head // group].float()
                weight = torch.softmax(keys @ q[begin + t, head].float() * scaling, dim=0)
                out[begin + t, head] = (weight @ values).to(q.dtype)
    return out
