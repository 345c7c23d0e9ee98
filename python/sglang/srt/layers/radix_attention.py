"""What an attention backend must know of a full-attention layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RadixAttention:
    """Geometry of one full-attention layer.

    ``layer_id`` counts all layers of the model, ``kv_layer`` its full-attention layers alone: the
    index into the KV pool. ``is_causal=False`` lets the rows of one call see each other;
    ``sliding_window`` > 0 hides keys that are ``sliding_window`` or more positions away.
    """

    layer_id: int
    kv_layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    is_causal: bool = True
    sliding_window: int = 0
