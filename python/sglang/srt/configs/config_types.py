"""Types and ranges of the keys of a model's ``config.json``; JSON has no way to say them."""

from __future__ import annotations

from typing import Any

SIZE_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "max_position_embeddings",
)
"""Keys that must be positive where they are given."""
KEY_TYPES: dict[str, tuple[type, ...]] = {
    "architectures": (list,),
    "layer_types": (list,),
    "mlp_only_layers": (list,),
    "quantization_config": (dict,),
    "rope_parameters": (dict,),
    "rope_scaling": (dict,),
    "eos_token_id": (int, list),
    "intermediate_size": (int,),
    "moe_intermediate_size": (int,),
    "shared_expert_intermediate_size": (int,),
    "num_experts": (int,),
    "num_experts_per_tok": (int,),
    "decoder_sparse_step": (int,),
    "full_attention_interval": (int,),
    "mtp_num_hidden_layers": (int,),
    "rms_norm_eps": (int, float),
    "rope_theta": (int, float),
    "partial_rotary_factor": (int, float),
    "output_gate_type": (str,),
    "tie_word_embeddings": (bool,),
}
"""Types of other keys where they are given."""
ITEM_TYPES = {"architectures": str, "mlp_only_layers": int, "eos_token_id": int}


def check_types(raw: dict[str, Any]) -> None:
    """Raise ValueError for the first key whose value has another type than it must have."""
    for key in SIZE_KEYS:
        value = raw.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"config.json: {key}={value!r} must be a whole number of at least 1")
    for key, kinds in KEY_TYPES.items():
        value = raw.get(key)
        if value is not None and type(value) not in kinds:
            names = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"config.json: {key}={value!r} must be of type {names}")
    for key, kind in ITEM_TYPES.items():
        value = raw.get(key)
        if isinstance(value, list) and not all(type(item) is kind for item in value):
            raise ValueError(
                f"config.json: {key}={value!r} must list values of type {kind.__name__}"
            )
