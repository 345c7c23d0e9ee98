"""Tiny random DFLASH, DFlash2 and DSPARK checkpoints for tests, in the published formats."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from sglang.srt.configs.model_config import ModelConfig

KINDS = ("dflash", "dflash2", "dspark")
_ARCHITECTURE = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkDraftModel",
}


@dataclass(frozen=True)
class DraftGeometry:
    """Sizes of a tiny drafter; the hidden size and the vocabulary are the target's."""

    block_size: int = 4
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 96
    target_layer_ids: tuple[int, ...] = (0, 2)
    sliding_window: int = 0
    is_causal: bool | None = None
    rank: int = 8
    markov_head_type: str = "vanilla"
    selector_top_k: int = 5
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    sample_from_anchor: bool = True


def make_draft_checkpoint(
    out: str,
    *,
    kind: str,
    target_path: str,
    seed: int = 0,
    geometry: DraftGeometry | None = None,
    prefix: str = "",
) -> str:
    """Write a drafter for the target at ``target_path``; returns ``out``.

    ``prefix`` is put before every tensor name (``"model."`` occurs in the wild).
    Raises: ValueError for an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; use one of {', '.join(KINDS)}")
    geo = geometry or DraftGeometry()
    target = ModelConfig.from_path(target_path)
    directory = Path(out)
    directory.mkdir(parents=True, exist_ok=True)
    config = _config(kind, geo, target)
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in _shapes(kind, geo, target).items():
        tensors[prefix + name] = _values(name, shape, generator)
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return str(directory)


def _config(kind: str, geo: DraftGeometry, target: ModelConfig) -> dict:
    mask_id = target.vocab_size - 1
    nested: dict = {"mask_token_id": mask_id, "target_layer_ids": list(geo.target_layer_ids)}
    top: dict = {}
    if kind == "dspark":
        nested["projector_type"] = "dspark"
        top = {
            "block_size": geo.block_size,
            "markov_rank": geo.rank,
            "markov_head_type": geo.markov_head_type,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "sample_from_anchor": geo.sample_from_anchor,
        }
    else:
        nested["block_size"] = geo.block_size
    if kind == "dflash2":
        nested |= {
            "conv_kernel_size": geo.conv_kernel_size,
            "conv_group_size": geo.conv_group_size,
            "selector_rank": geo.rank,
            "selector_top_k": geo.selector_top_k,
        }
    if geo.is_causal is not None:
        top["is_causal"] = geo.is_causal
    layer_type = "sliding_attention" if geo.sliding_window else "full_attention"
    if geo.sliding_window:
        top["sliding_window"] = geo.sliding_window
    return top | {
        "architectures": [_ARCHITECTURE[kind]],
        "model_type": "qwen3",
        "attention_bias": False,
        "dflash_config": nested,
        "dtype": "float32",
        "head_dim": geo.head_dim,
        "hidden_act": "silu",
        "hidden_size": target.hidden_size,
        "intermediate_size": geo.intermediate_size,
        "layer_types": [layer_type] * geo.num_layers,
        "max_position_embeddings": target.max_position_embeddings,
        "num_attention_heads": geo.num_heads,
        "num_hidden_layers": geo.num_layers,
        "num_key_value_heads": geo.num_kv_heads,
        "num_target_layers": target.num_hidden_layers,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10_000_000, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": target.vocab_size,
    }


def _shapes(kind: str, geo: DraftGeometry, target: ModelConfig) -> dict[str, tuple[int, ...]]:
    size, vocab = target.hidden_size, target.vocab_size
    q_rows, kv_rows = geo.num_heads * geo.head_dim, geo.num_kv_heads * geo.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, len(geo.target_layer_ids) * size),
        "hidden_norm.weight": (size,),
        "norm.weight": (size,),
    }
    for i in range(geo.num_layers):
        own = f"layers.{i}."
        shapes |= {
            f"{own}input_layernorm.weight": (size,),
            f"{own}post_attention_layernorm.weight": (size,),
            f"{own}self_attn.q_proj.weight": (q_rows, size),
            f"{own}self_attn.k_proj.weight": (kv_rows, size),
            f"{own}self_attn.v_proj.weight": (kv_rows, size),
            f"{own}self_attn.o_proj.weight": (size, q_rows),
            f"{own}self_attn.q_norm.weight": (geo.head_dim,),
            f"{own}self_attn.k_norm.weight": (geo.head_dim,),
            f"{own}mlp.gate_proj.weight": (geo.intermediate_size, size),
            f"{own}mlp.up_proj.weight": (geo.intermediate_size, size),
            f"{own}mlp.down_proj.weight": (size, geo.intermediate_size),
        }
        if kind == "dflash2":
            taps, groups = geo.conv_kernel_size, size // geo.conv_group_size
            for conv in ("attention_conv", "mlp_conv"):
                shapes[f"{own}{conv}.base_kernel"] = (2, taps, size)
                shapes[f"{own}{conv}.kernel_projection.weight"] = (2 * taps * groups, size)
    if kind == "dflash2":
        shapes |= {
            "candidate_selector.hidden_projection.weight": (geo.rank, size),
            "candidate_selector.predecessor_codebook": (vocab, geo.rank),
            "candidate_selector.successor_codebook": (vocab, geo.rank),
        }
    if kind == "dspark":
        shapes |= _dspark_shapes(geo, size, vocab)
    return shapes


def _dspark_shapes(geo: DraftGeometry, size: int, vocab: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "markov_head.markov_w1.weight": (vocab, geo.rank),
        "markov_head.markov_w2.weight": (vocab, geo.rank),
        "confidence_head.proj.weight": (1, size + geo.rank),
        "confidence_head.proj.bias": (1,),
    }
    if geo.markov_head_type == "gated":
        shapes["markov_head.gate_proj.weight"] = (geo.rank, size + geo.rank)
    if geo.markov_head_type == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * geo.rank, 2 * geo.rank + size)
        shapes["markov_head.joint_proj.bias"] = (3 * geo.rank,)
    return shapes


def _values(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=generator)
    if name.endswith("base_kernel"):
        values = 0.1 * values
        values[:, 0] += 1.0
        return values
    if len(shape) == 1:
        return 1.0 + 0.1 * values
    return values / shape[-1] ** 0.5
