"""Qwen3.5 / 3.6 / 3.8 dense text models (also inside the vision wrapper)."""

from __future__ import annotations

from sglang.srt.models.hybrid_gdn import HybridGDNForCausalLM


class Qwen3_5ForCausalLM(HybridGDNForCausalLM):
    """Dense MLP in every layer; GDN projections are separate tensors in the checkpoint."""
