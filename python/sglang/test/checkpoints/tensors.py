"""Names, shapes and random values of a tiny checkpoint's tensors, before quantisation."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch

from sglang.test.checkpoints.geometry import TinyGeometry

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(arch: str, geo: TinyGeometry, *, tie: bool, mtp: bool, wrapper: bool) -> Shapes:
    """Every tensor with its shape, experts in the fused layout."""
    prefix = "model.language_model." if wrapper else "model."
    hidden = geo.hidden_size
    shapes: Shapes = {f"{prefix}embed_tokens.weight": (geo.vocab_size, hidden)}
    for index, layer_type in enumerate(geo.layer_types):
        shapes |= _layer_shapes(arch, geo, f"{prefix}layers.{index}.", layer_type)
    shapes[f"{prefix}norm.weight"] = (hidden,)
    if not tie:
        shapes["lm_head.weight"] = (geo.vocab_size, hidden)
    if mtp:
        shapes["mtp.fc.weight"] = (hidden, 2 * hidden)
        shapes["mtp.pre_fc_norm_embedding.weight"] = (hidden,)
        shapes["mtp.pre_fc_norm_hidden.weight"] = (hidden,)
        shapes["mtp.norm.weight"] = (hidden,)
        shapes |= _layer_shapes(arch, geo, "mtp.layers.0.", "full_attention")
    if wrapper:
        shapes |= _vision_shapes(hidden)
    return shapes


def _layer_shapes(arch: str, geo: TinyGeometry, prefix: str, layer_type: str) -> Shapes:
    hidden = geo.hidden_size
    shapes: Shapes = {
        f"{prefix}input_layernorm.weight": (hidden,),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
    }
    if layer_type == "full_attention":
        shapes |= _attention_shapes(geo, f"{prefix}self_attn.")
    else:
        shapes |= _gdn_shapes(arch, geo, f"{prefix}linear_attn.")
    if arch == "qwen3_5":
        shapes |= _mlp_shapes(hidden, geo.intermediate_size, f"{prefix}mlp.")
    else:
        shapes |= _moe_shapes(geo, f"{prefix}mlp.")
    return shapes


def _attention_shapes(geo: TinyGeometry, prefix: str) -> Shapes:
    hidden, dim = geo.hidden_size, geo.head_dim
    heads, kv_heads = geo.num_attention_heads, geo.num_key_value_heads
    return {
        f"{prefix}q_proj.weight": (heads * 2 * dim, hidden),
        f"{prefix}k_proj.weight": (kv_heads * dim, hidden),
        f"{prefix}v_proj.weight": (kv_heads * dim, hidden),
        f"{prefix}o_proj.weight": (hidden, heads * dim),
        f"{prefix}q_norm.weight": (dim,),
        f"{prefix}k_norm.weight": (dim,),
    }


def _gdn_shapes(arch: str, geo: TinyGeometry, prefix: str) -> Shapes:
    hidden, value_heads = geo.hidden_size, geo.linear_num_value_heads
    if arch == "qwen3_next":
        projections: Shapes = {
            f"{prefix}in_proj_qkvz.weight": (2 * geo.key_dim + 2 * geo.value_dim, hidden),
            f"{prefix}in_proj_ba.weight": (2 * value_heads, hidden),
        }
    else:
        projections = {
            f"{prefix}in_proj_qkv.weight": (geo.conv_dim, hidden),
            f"{prefix}in_proj_z.weight": (geo.value_dim, hidden),
            f"{prefix}in_proj_b.weight": (value_heads, hidden),
            f"{prefix}in_proj_a.weight": (value_heads, hidden),
        }
    return projections | {
        f"{prefix}conv1d.weight": (geo.conv_dim, 1, geo.linear_conv_kernel_dim),
        f"{prefix}A_log": (value_heads,),
        f"{prefix}dt_bias": (value_heads,),
        f"{prefix}norm.weight": (geo.linear_value_head_dim,),
        f"{prefix}out_proj.weight": (hidden, geo.value_dim),
    }


def _mlp_shapes(hidden: int, width: int, prefix: str) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (width, hidden),
        f"{prefix}up_proj.weight": (width, hidden),
        f"{prefix}down_proj.weight": (hidden, width),
    }


def _moe_shapes(geo: TinyGeometry, prefix: str) -> Shapes:
    hidden, experts, width = geo.hidden_size, geo.num_experts, geo.moe_intermediate_size
    shared = geo.shared_expert_intermediate_size
    return {
        f"{prefix}gate.weight": (experts, hidden),
        f"{prefix}experts.gate_up_proj": (experts, 2 * width, hidden),
        f"{prefix}experts.down_proj": (experts, hidden, width),
        **_mlp_shapes(hidden, shared, f"{prefix}shared_expert."),
        f"{prefix}shared_expert_gate.weight": (1, hidden),
    }


def _vision_shapes(text_hidden: int) -> Shapes:
    """Enough of the tower to prove that a text loader skips it; not a runnable tower."""
    return {
        "model.visual.patch_embed.proj.weight": (64, 3, 2, 16, 16),
        "model.visual.merger.linear_fc2.weight": (text_hidden, 256),
    }


def random_tensor(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """fp32 values for one tensor; they depend on ``seed`` and ``name`` alone, so that two layouts
    of one seed hold the same weights."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    leaf = name.rsplit(".", 1)[-1] if not name.endswith(".weight") else name.split(".")[-2]
    if leaf == "A_log":
        return torch.empty(shape).uniform_(0.5, 8.0, generator=generator).log()
    if leaf == "dt_bias":
        return torch.empty(shape).uniform_(-4.0, -1.0, generator=generator)
    values = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        is_plain_norm = name.endswith("linear_attn.norm.weight")
        return 0.1 * values + (1.0 if is_plain_norm else 0.0)
    if leaf == "embed_tokens":
        return values
    fan_in = math.prod(shape[1:]) if name.startswith("model.visual.") else shape[-1]
    return values / fan_in**0.5


def split_experts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Per-expert names and matrices of a fused expert tensor ``[E, 2I, H]`` or ``[E, H, I]``."""
    stem, kind = name.rsplit(".", 1)
    for expert, matrix in enumerate(tensor):
        if kind == "down_proj":
            yield f"{stem}.{expert}.down_proj.weight", matrix.contiguous()
            continue
        gate, up = matrix.chunk(2, dim=0)
        yield f"{stem}.{expert}.gate_proj.weight", gate.contiguous()
        yield f"{stem}.{expert}.up_proj.weight", up.contiguous()
