"""Full attention of a tree verify, in plain PyTorch on any device."""

from __future__ import annotations

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
    rows = zip(fb.req_pool_indices.tolist(), fb.prefix_lens_cpu, strict=True)
    for r, (row, prefix) in enumerate(rows):
        slots = torch.cat(
            [req_to_token[row, :prefix].long(), fb.out_cache_loc[r * width : (r + 1) * width]]
        )
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
