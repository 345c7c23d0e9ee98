"""Which class runs which checkpoint family."""

from __future__ import annotations

import os

import torch

from sglang.kernels.ops.cpu import gemm, library
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


CPU_KERNELS_ENV = "SGLANG_CPU_KERNELS"


def configure_cpu_kernels() -> None:
    """Take the kernels that ``SGLANG_CPU_KERNELS`` asks for (auto, native, torch), unless chosen.

    Kernel calls may use as many threads as torch does.
    Raises:
        ValueError: the variable holds something else.
    """
    if not library.is_selected():
        library.select(os.environ.get(CPU_KERNELS_ENV, "auto").strip().lower())
    if library.library() is not None:
        gemm.set_threads(torch.get_num_threads())


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
    device = torch.device(device)
    if device.type == "cpu":
        configure_cpu_kernels()
    return MODEL_OF_FAMILY[model_config.family](
        model_config,
        device=device,
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
