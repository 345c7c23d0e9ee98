"""Which class runs which checkpoint family."""

from __future__ import annotations

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.models.hybrid_gdn import HybridGDNForCausalLM
from sglang.srt.models.qwen3_5 import Qwen3_5ForCausalLM
from sglang.srt.models.qwen3_5_moe import Qwen3_5MoeForCausalLM
from sglang.srt.models.qwen3_5_mtp import Qwen3_5MTP
from sglang.srt.models.qwen3_next import Qwen3NextForCausalLM

MODEL_OF_FAMILY: dict[str, type[HybridGDNForCausalLM]] = {
    "qwen3_5": Qwen3_5ForCausalLM,
    "qwen3_5_moe": Qwen3_5MoeForCausalLM,
    "qwen3_next": Qwen3NextForCausalLM,
}


def build_model(
    model_config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    attn_backend: AttentionBackend,
    batch_invariant: bool = False,
) -> HybridGDNForCausalLM:
    """Allocate the target model; ``model_loader.load_weights`` fills it.

    ``dtype`` is that of the weights; activations are fp32 on the CPU.
    """
    return MODEL_OF_FAMILY[model_config.family](
        model_config,
        device=torch.device(device),
        dtype=dtype,
        attn_backend=attn_backend,
        batch_invariant=batch_invariant,
    )


def build_draft_model(
    model_config: ModelConfig,
    *,
    target: HybridGDNForCausalLM,
    device: torch.device,
    dtype: torch.dtype,
    attn_backend: AttentionBackend,
    batch_invariant: bool = False,
) -> Qwen3_5MTP:
    """Allocate the MTP block of the target's checkpoint over the target's embedding and head.

    Raises:
        ValueError: the checkpoint ships no MTP block.
    """
    if model_config.mtp_num_hidden_layers < 1:
        raise ValueError(
            f"{model_config.model_path or model_config.architecture} has no MTP weights "
            "(mtp_num_hidden_layers=0); use another --speculative-algorithm or none"
        )
    return Qwen3_5MTP(
        model_config,
        target=target,
        device=torch.device(device),
        dtype=dtype,
        attn_backend=attn_backend,
        batch_invariant=batch_invariant,
    )
