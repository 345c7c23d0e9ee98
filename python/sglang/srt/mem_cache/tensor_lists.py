"""Tensors of KV and request pools by name, shape and dtype; what the pools allocate. No torch."""

from __future__ import annotations

from sglang.srt.mem_cache.state_layout import TensorSpec


def kv_tensor_specs(
    *, size: int, page_size: int, dtype: str, head_num: int, head_dim: int, layer_num: int
) -> list[TensorSpec]:
    """Every tensor of a KV pool: one K and one V buffer per layer, with the padding page."""
    shape = (size + page_size, head_num, head_dim)
    return [
        TensorSpec(f"{side}_buffer.{layer}", shape, dtype)
        for side in ("k", "v")
        for layer in range(layer_num)
    ]


def req_tensor_specs(
    *, size: int, max_context_len: int, hybrid: bool = True, track_entries: int = 0
) -> list[TensorSpec]:
    """Every device tensor of a request pool of ``size`` rows, without its state pool."""
    specs = [TensorSpec("req_to_token", (size + 1, max_context_len), "int32")]
    if hybrid:
        specs.append(TensorSpec("req_index_to_mamba_index_mapping", (size + 1,), "int32"))
    if track_entries:
        name = "req_index_to_mamba_ping_pong_mapping"
        specs.append(TensorSpec(name, (size + 1, track_entries), "int64"))
    return specs


def num_track_entries(*, extra_buffer: bool, lazy: bool, overlap: bool) -> int:
    """Track slots a request may own: a pair where one is written while the other is kept."""
    if not extra_buffer:
        return 0
    return 2 if overlap or lazy else 1
