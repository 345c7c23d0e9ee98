"""Geometry of the tiny checkpoints and the ``config.json`` that states it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ARCHITECTURES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")

END_OF_TEXT_ID = 4064
IM_END_ID = 4066
VISION_IDS = {
    "vision_start_token_id": 4073,
    "vision_end_token_id": 4074,
    "image_token_id": 4075,
    "video_token_id": 4076,
}

# The compact list whose effect matches the published FP8 packs: routers, the shared-expert gate,
# the b/a projections, the convolution, the embedding, the head and the MTP fusion stay unquantised.
FP8_NOT_CONVERTED = (
    "lm_head",
    "embed_tokens",
    "mtp.fc",
    "mlp.gate",
    "mlp.shared_expert_gate",
    "linear_attn.conv1d",
)
_TEXT_ARCHITECTURE = {
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}
_WRAPPER_ARCHITECTURE = {
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}


@dataclass(frozen=True)
class TinyGeometry:
    """Sizes of a tiny checkpoint. Lengths are element counts; ``head_dim`` is independent of
    ``hidden_size / num_attention_heads`` as in the real family."""

    vocab_size: int = 4096
    hidden_size: int = 128
    num_hidden_layers: int = 4
    full_attention_interval: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    intermediate_size: int = 256
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 64
    shared_expert_intermediate_size: int = 64
    partial_rotary_factor: float = 0.25
    rope_theta: float = 10_000_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096

    @property
    def key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_dim + self.value_dim

    @property
    def layer_types(self) -> list[str]:
        return [
            "full_attention" if (i + 1) % self.full_attention_interval == 0 else "linear_attention"
            for i in range(self.num_hidden_layers)
        ]


def default_geometry(dtype: str) -> TinyGeometry:
    """Geometry for ``dtype``. FP8 uses 128-wide GDN heads, as the published packs do, because block
    scales of ``[128, 128]`` must not straddle the q, k, v and z parts of a fused projection."""
    if dtype == "fp8":
        return TinyGeometry(
            hidden_size=256,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            moe_intermediate_size=128,
            shared_expert_intermediate_size=128,
        )
    return TinyGeometry()


def _mrope_section(num_frequencies: int) -> list[int]:
    height = (num_frequencies + 1) // 3
    width = num_frequencies // 3
    return [num_frequencies - height - width, height, width]


def _common_text_config(geo: TinyGeometry, dtype_name: str, tie: bool) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": END_OF_TEXT_ID,
        "dtype": dtype_name,
        "eos_token_id": END_OF_TEXT_ID,
        "full_attention_interval": geo.full_attention_interval,
        "head_dim": geo.head_dim,
        "hidden_act": "silu",
        "hidden_size": geo.hidden_size,
        "initializer_range": 0.02,
        "linear_conv_kernel_dim": geo.linear_conv_kernel_dim,
        "linear_key_head_dim": geo.linear_key_head_dim,
        "linear_num_key_heads": geo.linear_num_key_heads,
        "linear_num_value_heads": geo.linear_num_value_heads,
        "linear_value_head_dim": geo.linear_value_head_dim,
        "max_position_embeddings": geo.max_position_embeddings,
        "num_attention_heads": geo.num_attention_heads,
        "num_hidden_layers": geo.num_hidden_layers,
        "num_key_value_heads": geo.num_key_value_heads,
        "rms_norm_eps": geo.rms_norm_eps,
        "tie_word_embeddings": tie,
        "use_cache": True,
        "vocab_size": geo.vocab_size,
    }


def _moe_config(geo: TinyGeometry) -> dict[str, Any]:
    return {
        "mlp_only_layers": [],
        "moe_intermediate_size": geo.moe_intermediate_size,
        "num_experts": geo.num_experts,
        "num_experts_per_tok": geo.num_experts_per_tok,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": geo.shared_expert_intermediate_size,
    }


def _text_config(
    arch: str, geo: TinyGeometry, dtype_name: str, tie: bool, mtp: bool
) -> dict[str, Any]:
    config = _common_text_config(geo, dtype_name, tie)
    if arch == "qwen3_next":
        config |= _moe_config(geo) | {
            "decoder_sparse_step": 1,
            "intermediate_size": geo.intermediate_size,
            "model_type": "qwen3_next",
            "norm_topk_prob": True,
            "partial_rotary_factor": geo.partial_rotary_factor,
            "rope_scaling": None,
            "rope_theta": geo.rope_theta,
        }
        return config
    rotary_dim = int(geo.head_dim * geo.partial_rotary_factor)
    config |= {
        "attn_output_gate": True,
        "layer_types": geo.layer_types,
        "mamba_ssm_dtype": "float32",
        "model_type": f"{arch}_text",
        "mtp_num_hidden_layers": 1 if mtp else 0,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": _mrope_section(rotary_dim // 2),
            "partial_rotary_factor": geo.partial_rotary_factor,
            "rope_theta": geo.rope_theta,
            "rope_type": "default",
        },
    }
    if arch == "qwen3_5_moe":
        return config | _moe_config(geo)
    return config | {"intermediate_size": geo.intermediate_size, "mlp_only_layers": []}


def build_config(
    arch: str, geo: TinyGeometry, *, dtype: str, tie: bool, mtp: bool, wrapper: bool
) -> dict[str, Any]:
    """The ``config.json`` content for one tiny checkpoint."""
    dtype_name = "float32" if dtype == "fp32" else "bfloat16"
    text = _text_config(arch, geo, dtype_name, tie, mtp)
    if wrapper:
        config: dict[str, Any] = {
            "architectures": [_WRAPPER_ARCHITECTURE[arch]],
            "model_type": arch,
            "text_config": text,
            "tie_word_embeddings": tie,
            "vision_config": _vision_config(arch, geo),
            **VISION_IDS,
        }
    else:
        config = {"architectures": [_TEXT_ARCHITECTURE[arch]], **text}
    if dtype == "fp8":
        split_ba = ("linear_attn.in_proj_a", "linear_attn.in_proj_b")
        fused_ba = ("linear_attn.in_proj_ba",)
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": [
                *FP8_NOT_CONVERTED,
                *(fused_ba if arch == "qwen3_next" else split_ba),
                *(("model.visual",) if wrapper else ()),
            ],
        }
    return config


def _vision_config(arch: str, geo: TinyGeometry) -> dict[str, Any]:
    return {
        "deepstack_visual_indexes": [],
        "depth": 1,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 64,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 128,
        "model_type": f"{arch}_vision",
        "num_heads": 2,
        "num_position_embeddings": 16,
        "out_hidden_size": geo.hidden_size,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
