"""Hugging Face ``config.json`` of a hybrid Gated-DeltaNet model -> ModelConfig. No torch here."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang.bundled import resolve_model_path
from sglang.srt.configs.config_types import check_types
from sglang.srt.configs.quantization import QuantizationConfig
from sglang.srt.configs.rope_config import RopeConfig, rope_from_text_config

LINEAR_ATTENTION = "linear_attention"
FULL_ATTENTION = "full_attention"

FAMILY_OF_ARCHITECTURE = {
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
}
FAMILY_OF_MODEL_TYPE = {
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_next": "qwen3_next",
}
STATE_DTYPES = ("float32", "bfloat16")
WEIGHT_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelConfig:
    """Geometry and numerics of one target model, as its checkpoint states them."""

    model_path: str
    architecture: str
    family: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    attn_output_gate: bool
    attention_bias: bool
    layer_types: tuple[str, ...]
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    mamba_ssm_dtype: str
    output_gate_type: str
    hidden_act: str
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    norm_topk_prob: bool
    decoder_sparse_step: int
    mlp_only_layers: tuple[int, ...]
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    mtp_num_hidden_layers: int
    tie_word_embeddings: bool
    dtype: str
    quantization: QuantizationConfig | None
    eos_token_ids: frozenset[int]
    generation_defaults: dict[str, Any]

    @property
    def full_attention_layer_ids(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL_ATTENTION)

    @property
    def linear_layer_ids(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == LINEAR_ATTENTION)

    @property
    def key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_dim + self.value_dim

    def is_moe_layer(self, layer_id: int) -> bool:
        """Whether the MLP of ``layer_id`` is a mixture of experts."""
        if self.num_experts == 0 or layer_id in self.mlp_only_layers:
            return False
        return (layer_id + 1) % self.decoder_sparse_step == 0

    def mtp_config(self) -> ModelConfig:
        """The draft block as a model: one full-attention layer, everything else as the target.

        The target's own configuration is not touched. The block is MoE whenever the family is.
        """
        return replace(
            self,
            num_hidden_layers=1,
            layer_types=(FULL_ATTENTION,),
            decoder_sparse_step=1,
            mlp_only_layers=(),
        )

    @staticmethod
    def from_path(path: str) -> ModelConfig:
        """Read a checkpoint directory, a ``config.json`` or a bundled name.

        Raises:
            FileNotFoundError: no ``config.json`` at ``path``.
            ValueError: the architecture or a value in the config is not supported.
        """
        config_file = find_config_file(path)
        raw = read_json(config_file)
        generation_file = config_file.parent / "generation_config.json"
        generation = read_json(generation_file) if generation_file.is_file() else {}
        return ModelConfig.from_dict(raw, model_path=str(config_file.parent), generation=generation)

    @staticmethod
    def from_dict(
        raw: dict[str, Any], *, model_path: str = "", generation: dict[str, Any] | None = None
    ) -> ModelConfig:
        """Build the configuration from the parsed JSON files.

        Raises:
            ValueError: naming the key, its value and what is accepted.
        """
        text = text_config(raw)
        check_types(raw)
        check_types(text)
        architecture, family = _family(raw)
        generation = generation or {}
        layer_types = _layer_types(text)
        head_dim = int(text.get("head_dim") or 256)
        num_experts = int(text.get("num_experts") or 0) if family != "qwen3_5" else 0
        quantization = text.get("quantization_config")
        config = ModelConfig(
            model_path=model_path,
            architecture=architecture,
            family=family,
            vocab_size=_required(text, "vocab_size"),
            hidden_size=_required(text, "hidden_size"),
            num_hidden_layers=_required(text, "num_hidden_layers"),
            intermediate_size=int(text.get("intermediate_size") or 0),
            num_attention_heads=_required(text, "num_attention_heads"),
            num_key_value_heads=_required(text, "num_key_value_heads"),
            head_dim=head_dim,
            attn_output_gate=bool(text.get("attn_output_gate", True)),
            attention_bias=bool(text.get("attention_bias", False)),
            layer_types=layer_types,
            linear_num_key_heads=int(text.get("linear_num_key_heads", 16)),
            linear_num_value_heads=int(text.get("linear_num_value_heads", 32)),
            linear_key_head_dim=int(text.get("linear_key_head_dim", 128)),
            linear_value_head_dim=int(text.get("linear_value_head_dim", 128)),
            linear_conv_kernel_dim=int(text.get("linear_conv_kernel_dim", 4)),
            mamba_ssm_dtype=str(text.get("mamba_ssm_dtype") or "float32"),
            output_gate_type=_gate_type(text.get("output_gate_type")),
            hidden_act=str(text.get("hidden_act", "silu")),
            num_experts=num_experts,
            num_experts_per_tok=int(text.get("num_experts_per_tok") or 0),
            moe_intermediate_size=int(text.get("moe_intermediate_size") or 0),
            shared_expert_intermediate_size=int(text.get("shared_expert_intermediate_size") or 0),
            norm_topk_prob=bool(text.get("norm_topk_prob", True)),
            decoder_sparse_step=int(text.get("decoder_sparse_step") or 1),
            mlp_only_layers=tuple(int(i) for i in text.get("mlp_only_layers") or ()),
            rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
            rope=rope_from_text_config(
                text, head_dim=head_dim, default_theta=1e7, default_partial=0.25
            ),
            max_position_embeddings=int(text.get("max_position_embeddings") or 262144),
            mtp_num_hidden_layers=_mtp_layers(text, family),
            tie_word_embeddings=bool(text.get("tie_word_embeddings", False)),
            dtype=str(text.get("dtype") or text.get("torch_dtype") or "bfloat16"),
            quantization=QuantizationConfig.from_dict(quantization) if quantization else None,
            eos_token_ids=_eos_ids(generation) | _eos_ids(text) | _eos_ids(raw),
            generation_defaults=dict(generation),
        )
        _check(config)
        return config


def find_config_file(path: str) -> Path:
    """Locate ``config.json`` for a directory, a file or a bundled name."""
    location = Path(resolve_model_path(path))
    config_file = location / "config.json" if location.is_dir() else location
    if not config_file.is_file():
        raise FileNotFoundError(
            f"no config.json at {path!r}; pass a checkpoint directory, a config.json, "
            "or one of the bundled names"
        )
    return config_file


def read_json(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds. Raises: ValueError naming the file if it holds none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not JSON ({error}); give a model's config.json") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object; give a model's config.json")
    return content


def text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The language model's keys, completed from the root where the nested config is silent."""
    if "text_config" not in raw:
        return raw
    if not isinstance(raw["text_config"], dict):
        raise ValueError(f"config.json: text_config={raw['text_config']!r} must be an object")
    text = dict(raw["text_config"])
    if "dtype" not in text and "torch_dtype" not in text:
        text["dtype"] = raw.get("dtype", raw.get("torch_dtype"))
    for key in ("tie_word_embeddings", "quantization_config"):
        if text.get(key) is None and key in raw:
            text[key] = raw[key]
    return text


def _required(text: dict[str, Any], key: str) -> int:
    if text.get(key) is None:
        raise ValueError(f"config.json lacks {key!r}, which has no default")
    return int(text[key])


def _family(raw: dict[str, Any]) -> tuple[str, str]:
    architectures = raw.get("architectures") or [""]
    architecture = str(architectures[0])
    family = FAMILY_OF_ARCHITECTURE.get(architecture)
    if family is None:
        family = FAMILY_OF_MODEL_TYPE.get(str(raw.get("model_type"))) if not architecture else None
    if family is None:
        raise ValueError(
            f"architectures={architectures!r} (model_type={raw.get('model_type')!r}) is not "
            f"supported; supported are {', '.join(sorted(FAMILY_OF_ARCHITECTURE))}"
        )
    return architecture, family


def _layer_types(text: dict[str, Any]) -> tuple[str, ...]:
    num_layers = _required(text, "num_hidden_layers")
    if text.get("layer_types"):
        kinds = tuple(str(kind) for kind in text["layer_types"])
        unknown = sorted(set(kinds) - {LINEAR_ATTENTION, FULL_ATTENTION})
        if unknown or len(kinds) != num_layers:
            raise ValueError(
                f"layer_types must name {num_layers} layers as {LINEAR_ATTENTION!r} or "
                f"{FULL_ATTENTION!r}; got {len(kinds)} entries, unknown {unknown}"
            )
        return kinds
    interval = int(text.get("full_attention_interval") or 4)
    return tuple(
        FULL_ATTENTION if (i + 1) % interval == 0 else LINEAR_ATTENTION for i in range(num_layers)
    )


def _gate_type(value: str | None) -> str:
    names = {None: "silu", "silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}
    if value not in names:
        raise ValueError(f"output_gate_type={value!r} is not supported; use swish, silu or sigmoid")
    return names[value]


def _mtp_layers(text: dict[str, Any], family: str) -> int:
    """Qwen3-Next ships ``mtp.*`` weights without a key, hence its default of one block."""
    default = 1 if family == "qwen3_next" else 0
    return int(text.get("mtp_num_hidden_layers", default) or 0)


def _eos_ids(raw: dict[str, Any]) -> frozenset[int]:
    value = raw.get("eos_token_id")
    if value is None:
        return frozenset()
    return frozenset(int(i) for i in (value if isinstance(value, list) else [value]))


def _check(config: ModelConfig) -> None:
    moe = config.num_experts > 0
    rules = (
        (
            config.mtp_num_hidden_layers >= 0,
            f"mtp_num_hidden_layers={config.mtp_num_hidden_layers} must be at least 0",
        ),
        (config.hidden_act == "silu", f"hidden_act={config.hidden_act!r}; only silu is supported"),
        (
            config.mamba_ssm_dtype in STATE_DTYPES,
            f"mamba_ssm_dtype={config.mamba_ssm_dtype!r}; use one of {STATE_DTYPES}",
        ),
        (config.dtype in WEIGHT_DTYPES, f"dtype={config.dtype!r}; use one of {WEIGHT_DTYPES}"),
        (
            config.num_attention_heads % config.num_key_value_heads == 0,
            f"num_attention_heads={config.num_attention_heads} must be a multiple of "
            f"num_key_value_heads={config.num_key_value_heads}",
        ),
        (
            config.linear_num_value_heads % config.linear_num_key_heads == 0,
            f"linear_num_value_heads={config.linear_num_value_heads} must be a multiple of "
            f"linear_num_key_heads={config.linear_num_key_heads}",
        ),
        (
            config.family == "qwen3_5" or moe,
            f"num_experts={config.num_experts} for {config.architecture}, a mixture-of-experts model",
        ),
        (
            not moe or 0 < config.num_experts_per_tok <= config.num_experts,
            f"num_experts_per_tok={config.num_experts_per_tok} must lie in 1..{config.num_experts}",
        ),
        (
            config.intermediate_size > 0
            or all(config.is_moe_layer(i) for i in range(config.num_hidden_layers)),
            "intermediate_size is missing although the model has dense layers",
        ),
    )
    broken = [why for holds, why in rules if not holds]
    if broken:
        raise ValueError("config.json: " + "; ".join(broken))
