"""Configuration of DFLASH and DSPARK draft checkpoints. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang.srt.configs.model_config import FULL_ATTENTION, find_config_file, read_json
from sglang.srt.configs.quantization import QuantizationConfig
from sglang.srt.configs.rope_config import RopeConfig, rope_from_text_config

SLIDING_ATTENTION = "sliding_attention"
DFLASH_ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel")
DSPARK_ARCHITECTURES = ("DSparkDraftModel", "Qwen3DSparkModel")
MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
REQUIRED_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
)


@dataclass(frozen=True)
class DraftConfig:
    """A block drafter: Qwen3-shaped layers over tapped target features.

    ``block_size`` is the number of query rows of one draft forward. ``mask_token_id`` is None when
    the checkpoint names a ``mask_token`` string that the tokenizer has to resolve. ``is_causal`` is
    None when the checkpoint does not say. ``target_layer_ids`` are 0-based target layers whose output
    residual stream is tapped, empty when the checkpoint does not list them. ``markov_rank`` is 0
    for DFLASH; ``selector_rank`` and ``conv_kernel_size`` are 0 unless the checkpoint is DFlash2.
    """

    model_path: str
    algorithm: str
    architecture: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    attention_bias: bool
    layer_types: tuple[str, ...]
    sliding_window: int
    is_causal: bool | None
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    dtype: str
    block_size: int
    mask_token_id: int | None
    mask_token: str
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int
    output_multiplier: float
    final_logit_softcapping: float
    attention_value_scale: float
    attention_sink_bias: bool
    markov_rank: int
    markov_head_type: str
    enable_confidence_head: bool
    confidence_head_with_markov: bool
    sample_from_anchor: bool
    quantization: QuantizationConfig | None = None

    def resolved_target_layer_ids(self, num_target_layers: int) -> tuple[int, ...]:
        """Tapped layers for a target of ``num_target_layers``, spread evenly if not listed.

        Raises:
            ValueError: the ids are not strictly increasing below the target's last layer.
        """
        ids = self.target_layer_ids
        if not ids:
            count, last = self.num_hidden_layers, num_target_layers - 3
            ids = (num_target_layers // 2,)
            if count > 1:
                ids = tuple(round(1 + i * (last - 1) / (count - 1)) for i in range(count))
        increasing = all(a < b for a, b in zip(ids, ids[1:], strict=False))
        if not increasing or ids[0] < 0 or ids[-1] >= num_target_layers - 1:
            raise ValueError(
                f"target_layer_ids={list(ids)} must increase strictly and stay below "
                f"{num_target_layers - 1} for a target of {num_target_layers} layers"
            )
        return ids

    @staticmethod
    def from_path(path: str) -> DraftConfig:
        """Read a draft checkpoint directory, a ``config.json`` or a bundled name.

        Raises:
            FileNotFoundError: no ``config.json`` there.
            ValueError: it is no DFLASH or DSPARK checkpoint, or a value is not supported.
        """
        config_file = find_config_file(path)
        return DraftConfig.from_dict(read_json(config_file), model_path=str(config_file.parent))

    @staticmethod
    def from_dict(raw: dict[str, Any], *, model_path: str = "") -> DraftConfig:
        """Build from parsed JSON; nested ``dflash_config``/``dspark_config`` keys win over the root."""
        architecture = str((raw.get("architectures") or [""])[0])
        nested = {**(raw.get("dspark_config") or {}), **(raw.get("dflash_config") or {})}
        keys = {**raw, **nested}
        algorithm = _algorithm(architecture, keys)
        _check_sizes(raw)
        heads = int(raw["num_attention_heads"])
        head_dim = int(raw.get("head_dim") or raw["hidden_size"] // heads)
        num_layers = int(raw["num_hidden_layers"])
        block_size = int(keys.get("block_size") or 0)
        markov_rank = int(keys.get("markov_rank") or 0)
        mask_id = keys.get("mask_token_id")
        head_type = str(keys.get("markov_head_type", "vanilla"))
        quantization = raw.get("quantization_config")
        softcap = keys.get("final_logit_softcapping")
        config = DraftConfig(
            model_path=model_path,
            algorithm=algorithm,
            architecture=architecture,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            num_hidden_layers=num_layers,
            intermediate_size=int(raw["intermediate_size"]),
            num_attention_heads=heads,
            num_key_value_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            attention_bias=bool(raw.get("attention_bias", False)),
            layer_types=tuple(raw.get("layer_types") or (FULL_ATTENTION,) * num_layers),
            sliding_window=int(raw.get("sliding_window") or 0),
            is_causal=raw.get("is_causal"),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=_draft_rope(raw, head_dim),
            max_position_embeddings=int(raw.get("max_position_embeddings") or 262144),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"),
            block_size=block_size,
            mask_token_id=None if mask_id is None else int(mask_id),
            mask_token=str(keys.get("mask_token", "<|MASK|>")),
            target_layer_ids=tuple(int(i) for i in keys.get("target_layer_ids") or ()),
            num_target_layers=int(keys.get("num_target_layers") or 0),
            conv_kernel_size=int(keys.get("conv_kernel_size") or 0),
            conv_group_size=int(keys.get("conv_group_size") or 0),
            selector_rank=int(keys.get("selector_rank") or 0),
            selector_top_k=int(keys.get("selector_top_k") or 0),
            output_multiplier=float(keys.get("output_multiplier") or 1.0),
            final_logit_softcapping=float(softcap or 0.0),
            attention_value_scale=float(keys.get("attention_value_scale") or 1.0),
            attention_sink_bias=bool(keys.get("attention_sink_bias", False)),
            markov_rank=markov_rank,
            markov_head_type=head_type,
            enable_confidence_head=bool(keys.get("enable_confidence_head", False)),
            confidence_head_with_markov=bool(keys.get("confidence_head_with_markov", False)),
            sample_from_anchor=bool(keys.get("sample_from_anchor", True)),
            quantization=QuantizationConfig.from_dict(quantization) if quantization else None,
        )
        _check(config)
        return config


def _check_sizes(raw: dict[str, Any]) -> None:
    for key in REQUIRED_SIZES:
        value = raw.get(key)
        if type(value) is not int or value < 1:
            raise ValueError(f"draft config.json: {key}={value!r} must be a whole number above 0")


def _algorithm(architecture: str, keys: dict[str, Any]) -> str:
    if architecture in DSPARK_ARCHITECTURES or keys.get("projector_type") == "dspark":
        return "DSPARK"
    if architecture in DFLASH_ARCHITECTURES:
        return "DFLASH"
    raise ValueError(
        f"architectures=[{architecture!r}] is no draft model; supported are "
        + ", ".join(DFLASH_ARCHITECTURES + DSPARK_ARCHITECTURES)
    )


def _draft_rope(raw: dict[str, Any], head_dim: int) -> RopeConfig:
    """Drafters rotate the whole head; partial factors and mRoPE keys copied from a target are noise."""
    cleaned = {k: v for k, v in raw.items() if k != "partial_rotary_factor"}
    params = dict(raw.get("rope_parameters") or {})
    params.pop("partial_rotary_factor", None)
    cleaned["rope_parameters"] = params
    return rope_from_text_config(cleaned, head_dim=head_dim, default_theta=1e7, default_partial=1.0)


def _check(config: DraftConfig) -> None:
    known = {FULL_ATTENTION, SLIDING_ATTENTION}
    unknown = sorted(set(config.layer_types) - known)
    rules = (
        (config.block_size >= 2, f"block_size={config.block_size} must be at least 2"),
        (
            not unknown and len(config.layer_types) == config.num_hidden_layers,
            f"layer_types must name {config.num_hidden_layers} layers from {sorted(known)}",
        ),
        (
            SLIDING_ATTENTION not in config.layer_types or config.sliding_window > 0,
            "sliding_window is missing although a layer is sliding_attention",
        ),
        (
            config.algorithm != "DSPARK" or config.markov_rank > 0,
            f"markov_rank={config.markov_rank} must be positive for DSPARK",
        ),
        (
            config.markov_head_type in MARKOV_HEAD_TYPES,
            f"markov_head_type={config.markov_head_type!r}; use one of {MARKOV_HEAD_TYPES}",
        ),
        (
            config.algorithm != "DSPARK" or config.mask_token_id is not None,
            "mask_token_id is required for DSPARK",
        ),
    )
    broken = [why for holds, why in rules if not holds]
    if broken:
        raise ValueError("draft config.json: " + "; ".join(broken))
