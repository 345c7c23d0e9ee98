"""Qwen3-Next mixture-of-experts models."""

from __future__ import annotations

from sglang.srt.models.hybrid_gdn import HybridGDNForCausalLM


class Qwen3NextForCausalLM(HybridGDNForCausalLM):
    """GDN projections come fused and interleaved by key head; the loader separates them."""
