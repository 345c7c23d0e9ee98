"""Where a checkpoint tensor goes: names, shapes and cuts, nothing about files.

Names are normalised: ``model.`` for the text backbone, ``lm_head.``, ``mtp.``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.decoder_layer import DecoderLayer
from sglang.srt.layers.gated_attention import GatedAttention
from sglang.srt.layers.gated_delta_net import GatedDeltaNet
from sglang.srt.layers.mlp import DenseMLP
from sglang.srt.layers.moe import SparseMoE

Cut = tuple[slice, ...]
WHOLE: Cut = (slice(None),)


@dataclass(frozen=True)
class WeightSlot:
    """One checkpoint tensor of ``shape``, viewed as ``view``, cut into destinations.

    ``copies`` pairs a destination (a view of a parameter) with the cut of the source it receives.
    """

    shape: tuple[int, ...]
    view: tuple[int, ...]
    copies: tuple[tuple[Tensor, Cut], ...]

    def fill(self, source: Tensor) -> None:
        """Copy ``source`` (already of ``shape``) into place, converting dtype."""
        viewed = source.reshape(self.view)
        for dest, cut in self.copies:
            dest.copy_(viewed[cut])


@dataclass
class WeightSlots:
    """All slots of a model.

    ``ignored`` names may be present and are not read. Every other slot is required, except that
    the members of ``alternatives`` (one fused tensor, or its parts one by one) stand for each other.
    """

    slots: dict[str, WeightSlot] = field(default_factory=dict)
    ignored: set[str] = field(default_factory=set)
    alternatives: list[tuple[frozenset[str], frozenset[str]]] = field(default_factory=list)

    def add(self, name: str, dest: Tensor, *, shape: tuple[int, ...] | None = None) -> None:
        """Fill all of ``dest`` from ``name``; ``shape`` if the checkpoint's differs from dest's."""
        own = tuple(dest.shape)
        self.slots[name] = WeightSlot(shape or own, own, ((dest, WHOLE),))

    def add_cut(
        self,
        name: str,
        *,
        shape: tuple[int, ...],
        view: tuple[int, ...],
        copies: tuple[tuple[Tensor, Cut], ...],
    ) -> None:
        self.slots[name] = WeightSlot(shape, view, copies)

    def ignore(self, name: str) -> None:
        self.ignored.add(name)

    def missing(self, seen: set[str]) -> list[str]:
        """Required names that are not in ``seen``, sorted."""
        absent = set(self.slots) - seen
        for one, other in self.alternatives:
            if one <= seen:
                absent -= other
            elif other <= seen:
                absent -= one
            else:
                absent -= one if seen & other else other
        return sorted(absent)


def decoder_slots(layers: nn.ModuleList, *, prefix: str, config: ModelConfig) -> WeightSlots:
    """Slots of decoder layers named ``{prefix}{i}.``."""
    slots = WeightSlots()
    for i, layer in enumerate(layers):
        _layer_slots(slots, f"{prefix}{i}.", layer, config)
    return slots


def _layer_slots(slots: WeightSlots, prefix: str, layer: DecoderLayer, config: ModelConfig) -> None:
    slots.add(f"{prefix}input_layernorm.weight", layer.input_layernorm.weight)
    slots.add(f"{prefix}post_attention_layernorm.weight", layer.post_attention_layernorm.weight)
    if isinstance(layer.mixer, GatedAttention):
        _attention_slots(slots, f"{prefix}self_attn.", layer.mixer)
    else:
        _gdn_slots(slots, f"{prefix}linear_attn.", layer.mixer, config)
    if isinstance(layer.mlp, DenseMLP):
        _mlp_slots(slots, f"{prefix}mlp.", layer.mlp)
    else:
        _moe_slots(slots, f"{prefix}mlp.", layer.mlp)


def _attention_slots(slots: WeightSlots, prefix: str, mixer: GatedAttention) -> None:
    parts = mixer.qkv_proj.weight.split((mixer.q_rows, mixer.kv_rows, mixer.kv_rows))
    names = ("q_proj", "k_proj", "v_proj")
    for name, weight in zip(names, parts):
        slots.add(f"{prefix}{name}.weight", weight)
    slots.add(f"{prefix}o_proj.weight", mixer.o_proj.weight)
    slots.add(f"{prefix}q_norm.weight", mixer.q_norm.weight)
    slots.add(f"{prefix}k_norm.weight", mixer.k_norm.weight)
    if mixer.qkv_proj.bias is not None and mixer.o_proj.bias is not None:
        biases = mixer.qkv_proj.bias.split((mixer.q_rows, mixer.kv_rows, mixer.kv_rows))
        for name, bias in zip(names, biases):
            slots.add(f"{prefix}{name}.bias", bias)
        slots.add(f"{prefix}o_proj.bias", mixer.o_proj.bias)


def _gdn_slots(slots: WeightSlots, prefix: str, mixer: GatedDeltaNet, config: ModelConfig) -> None:
    qkv, z, b, a = mixer.in_proj.weight.split(mixer.in_rows)
    if config.family == "qwen3_next":
        _interleaved_gdn_slots(slots, prefix, mixer, config)
    else:
        for name, part in (("qkv", qkv), ("z", z), ("b", b), ("a", a)):
            slots.add(f"{prefix}in_proj_{name}.weight", part)
    conv = mixer.attn.conv_weights
    slots.add(f"{prefix}conv1d.weight", conv, shape=(conv.shape[0], 1, conv.shape[1]))
    slots.add(f"{prefix}A_log", mixer.attn.A_log)
    slots.add(f"{prefix}dt_bias", mixer.attn.dt_bias)
    slots.add(f"{prefix}norm.weight", mixer.norm.weight)
    slots.add(f"{prefix}out_proj.weight", mixer.out_proj.weight)


def _interleaved_gdn_slots(
    slots: WeightSlots, prefix: str, mixer: GatedDeltaNet, config: ModelConfig
) -> None:
    """Qwen3-Next: rows grouped by key head, ``q | k | v.. | z..`` and ``b.. | a..`` per group."""
    groups, size = config.linear_num_key_heads, config.hidden_size
    k_dim = config.linear_key_head_dim
    per_group = config.linear_num_value_heads // groups
    v_rows = per_group * config.linear_value_head_dim
    qkv, z, b, a = mixer.in_proj.weight.split(mixer.in_rows)
    q, k, v = qkv.split((config.key_dim, config.key_dim, config.value_dim))

    def cuts(parts: tuple[tuple[Tensor, int], ...]) -> tuple[tuple[Tensor, Cut], ...]:
        start, copies = 0, []
        for dest, rows in parts:
            cut = (slice(None), slice(start, start + rows))
            copies.append((dest.view(groups, rows, size), cut))
            start += rows
        return tuple(copies)

    slots.add_cut(
        f"{prefix}in_proj_qkvz.weight",
        shape=(sum(mixer.in_rows[:2]), size),
        view=(groups, 2 * k_dim + 2 * v_rows, size),
        copies=cuts(((q, k_dim), (k, k_dim), (v, v_rows), (z, v_rows))),
    )
    slots.add_cut(
        f"{prefix}in_proj_ba.weight",
        shape=(sum(mixer.in_rows[2:]), size),
        view=(groups, 2 * per_group, size),
        copies=cuts(((b, per_group), (a, per_group))),
    )


def _mlp_slots(slots: WeightSlots, prefix: str, mlp: DenseMLP) -> None:
    gate, up = mlp.gate_up.weight.split(mlp.intermediate_size)
    slots.add(f"{prefix}gate_proj.weight", gate)
    slots.add(f"{prefix}up_proj.weight", up)
    slots.add(f"{prefix}down_proj.weight", mlp.down.weight)


def _moe_slots(slots: WeightSlots, prefix: str, moe: SparseMoE) -> None:
    """Router, shared expert, and the experts in both layouts a checkpoint may use."""
    slots.add(f"{prefix}gate.weight", moe.gate.weight)
    slots.add(f"{prefix}shared_expert_gate.weight", moe.shared_expert_gate.weight)
    _mlp_slots(slots, f"{prefix}shared_expert.", moe.shared_expert)
    experts = moe.experts
    fused = (f"{prefix}experts.gate_up_proj", f"{prefix}experts.down_proj")
    slots.add(fused[0], experts.gate_up)
    slots.add(fused[1], experts.down)
    single = []
    for e in range(experts.gate_up.shape[0]):
        gate, up = experts.gate_up[e].split(experts.intermediate_size)
        parts = (("gate_proj", gate), ("up_proj", up), ("down_proj", experts.down[e]))
        for name, dest in parts:
            single.append(f"{prefix}experts.{e}.{name}.weight")
            slots.add(single[-1], dest)
    slots.alternatives.append((frozenset(fused), frozenset(single)))
