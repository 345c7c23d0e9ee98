"""Qwen3.5 / 3.6 / 3.8 mixture-of-experts text models (also inside the vision wrapper)."""

from __future__ import annotations

from sglang.srt.models.hybrid_gdn import HybridGDNForCausalLM


class Qwen3_5MoeForCausalLM(HybridGDNForCausalLM):
    """Experts come fused per layer or one by one; router weights are always renormalised."""
