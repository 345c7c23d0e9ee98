"""Full attention of a tree verify, in plain PyTorch on any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def attend_trees(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    req_to_token: Tensor,
    layer: RadixAttention,
    fb: ForwardBatch,
) -> Tensor:
    """Every row sees its request's whole prefix, its ancestors and itself.

    q [R * D, N, d]; keys, values [slots, Nkv, d] with this call's rows already written at
    ``fb.out_cache_loc``; returns [R * D, N, d].
    Raises: ValueError if the batch carries no tree.
    """
    if fb.tree_mask is None:
        raise ValueError("ForwardBatch.tree_mask is None; this call has no trees")
    width = fb.tree_mask.shape[-1]
    group = layer.num_heads // layer.num_kv_heads
    out = torch.empty_like(q)
    longest = max(fb.prefix_lens_cpu)
    table = req_to_token[:, :longest].index_select(0, fb.req_pool_indices)
    for r, prefix in enumerate(fb.prefix_lens_cpu):
        slots = torch.cat([table[r, :prefix].long(), fb.out_cache_loc[r * width : (r + 1) * width]])
        k, v = (
            pool[slots].to(q.dtype).repeat_interleave(group, dim=1).transpose(0, 1)[None]
            for pool in (keys, values)
        )
        visible = torch.ones((width, prefix + width), dtype=torch.bool, device=q.device)
        visible[:, prefix:] = fb.tree_mask[r]
        own = slice(r * width, (r + 1) * width)
        mixed = F.scaled_dot_product_attention(
            q[own].transpose(0, 1)[None], k, v, attn_mask=visible, scale=layer.scaling
        )
        out[own] = mixed[0].transpose(0, 1)
    return out


@dataclass(frozen=True)
class TreeRowSlots:
    """What each row of a tree verify attends to, as a list of its own.

    slots [T, longest] int32, entries beyond ``last_seen [T]`` int64 mean nothing
    """

    slots: Tensor
    last_seen: Tensor


def tree_row_slots(fb: ForwardBatch, mask: Tensor, req_to_token: Tensor) -> TreeRowSlots:
    """Slots of the request's prefix, then those of the row's ancestors and its own.

    mask [R, D, D] bool; req_to_token [rows, positions] int32
    """
    num_requests, width = mask.shape[:2]
    counts = mask.sum(dim=-1)
    most = int(counts.max())
    ancestors_first = torch.argsort(mask.to(torch.uint8), dim=-1, descending=True, stable=True)
    own = fb.out_cache_loc.view(num_requests, 1, width).expand(-1, width, -1)
    ancestors = own.gather(-1, ancestors_first)[:, :, :most].to(torch.int32)
    slots = torch.zeros((num_requests, width, max(fb.prefix_lens_cpu) + most), dtype=torch.int32)
    for r, (row, prefix) in enumerate(zip(fb.req_pool_indices.tolist(), fb.prefix_lens_cpu)):
        slots[r, :, :prefix] = req_to_token[row, :prefix]
        slots[r, :, prefix : prefix + most] = ancestors[r]
    last_seen = fb.prefix_lens.unsqueeze(1) + counts - 1
    return TreeRowSlots(slots.view(num_requests * width, -1), last_seen.reshape(-1))
