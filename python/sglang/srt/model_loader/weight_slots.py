"""Where a checkpoint tensor goes: names, shapes and cuts, nothing about files.

Names are normalised: ``model.`` for the text backbone, ``lm_head.``, ``mtp.``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from sglang.kernels.ops.quantization.rows import GROUP
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.decoder_layer import DecoderLayer
from sglang.srt.layers.fp8_linear import FP8Linear, PartlyFP8Linear
from sglang.srt.layers.gated_attention import GatedAttention
from sglang.srt.layers.gated_delta_net import GatedDeltaNet
from sglang.srt.layers.gpu_experts import GpuExperts, GpuSparseMoE
from sglang.srt.layers.linear import Linear
from sglang.srt.layers.mlp import DenseMLP
from sglang.srt.layers.moe import SparseMoE
from sglang.srt.model_loader.fp8 import SCALE_SUFFIX

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

    def add_rows(
        self, names: Sequence[str], linear: Linear | FP8Linear, rows: Sequence[int]
    ) -> None:
        """Consecutive parts of ``rows`` output rows from ``{name}.weight``, and of an FP8 map their scales.

        Raises:
            ValueError: a part but the last ends inside a scale block.
        """
        for name, part in zip(names, linear.weight.split(list(rows)), strict=True):
            self.add(f"{name}.weight", part)
        if not isinstance(linear, FP8Linear):
            return
        if any(count % GROUP for count in rows[:-1]):
            raise ValueError(
                f"FP8 parts {', '.join(names)} have {', '.join(map(str, rows))} rows; all but the last "
                f"must be multiples of {GROUP} to share a scale tensor"
            )
        blocks = [-(-count // GROUP) for count in rows]
        for name, part in zip(names, linear.weight_scale.split(blocks), strict=True):
            self.add(f"{name}.weight{SCALE_SUFFIX}", part)

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
    elif isinstance(layer.mlp, GpuSparseMoE):
        _gpu_moe_slots(slots, f"{prefix}mlp.", layer.mlp)
    else:
        _moe_slots(slots, f"{prefix}mlp.", layer.mlp)


def _attention_slots(slots: WeightSlots, prefix: str, mixer: GatedAttention) -> None:
    names = ("q_proj", "k_proj", "v_proj")
    rows = (mixer.q_rows, mixer.kv_rows, mixer.kv_rows)
    slots.add_rows([f"{prefix}{name}" for name in names], mixer.qkv_proj, rows)
    slots.add_rows([f"{prefix}o_proj"], mixer.o_proj, [mixer.o_proj.out_features])
    slots.add(f"{prefix}q_norm.weight", mixer.q_norm.weight)
    slots.add(f"{prefix}k_norm.weight", mixer.k_norm.weight)
    if mixer.qkv_proj.bias is not None and mixer.o_proj.bias is not None:
        biases = mixer.qkv_proj.bias.split(rows)
        for name, bias in zip(names, biases):
            slots.add(f"{prefix}{name}.bias", bias)
        slots.add(f"{prefix}o_proj.bias", mixer.o_proj.bias)


def _gdn_slots(slots: WeightSlots, prefix: str, mixer: GatedDeltaNet, config: ModelConfig) -> None:
    if config.family == "qwen3_next":
        _interleaved_gdn_slots(slots, prefix, mixer, config)
    else:
        names = [f"{prefix}in_proj_{part}" for part in ("qkv", "z", "b", "a")]
        if isinstance(mixer.in_proj, PartlyFP8Linear):
            slots.add_rows(names[:2], mixer.in_proj.quantized, mixer.in_rows[:2])
            slots.add_rows(names[2:], mixer.in_proj.plain, mixer.in_rows[2:])
        else:
            slots.add_rows(names, mixer.in_proj, mixer.in_rows)
    conv = mixer.attn.conv_weights
    slots.add(f"{prefix}conv1d.weight", conv, shape=(conv.shape[0], 1, conv.shape[1]))
    slots.add(f"{prefix}A_log", mixer.attn.A_log)
    slots.add(f"{prefix}dt_bias", mixer.attn.dt_bias)
    slots.add(f"{prefix}norm.weight", mixer.norm.weight)
    slots.add_rows([f"{prefix}out_proj"], mixer.out_proj, [mixer.out_proj.out_features])


def _interleaved_gdn_slots(
    slots: WeightSlots, prefix: str, mixer: GatedDeltaNet, config: ModelConfig
) -> None:
    """Qwen3-Next: rows grouped by key head, ``q | k | v.. | z..`` and ``b.. | a..`` per group."""
    heads = config.linear_num_value_heads
    qkvz_rows = (config.key_dim, config.key_dim, config.value_dim, config.value_dim)
    qkvz, ba = f"{prefix}in_proj_qkvz.weight", f"{prefix}in_proj_ba.weight"
    groups = config.linear_num_key_heads
    if isinstance(mixer.in_proj, PartlyFP8Linear):
        quantized = mixer.in_proj.quantized
        if config.linear_key_head_dim % GROUP or config.linear_value_head_dim % GROUP:
            raise ValueError(
                f"{qkvz} is FP8 with heads of {config.linear_key_head_dim} and "
                f"{config.linear_value_head_dim} rows; they must be multiples of {GROUP}"
            )
        blocks = [rows // GROUP for rows in qkvz_rows]
        _add_grouped(slots, qkvz, quantized.weight, qkvz_rows, groups)
        _add_grouped(slots, qkvz + SCALE_SUFFIX, quantized.weight_scale, blocks, groups)
        _add_grouped(slots, ba, mixer.in_proj.plain.weight, (heads, heads), groups)
        return
    first, last = mixer.in_proj.weight.split((sum(mixer.in_rows[:2]), 2 * heads))
    _add_grouped(slots, qkvz, first, qkvz_rows, groups)
    _add_grouped(slots, ba, last, (heads, heads), groups)


def _add_grouped(
    slots: WeightSlots, name: str, dest: Tensor, rows: Sequence[int], groups: int
) -> None:
    """``dest`` holds parts of ``rows``; the source holds group by group what each part has of it."""
    size, start, copies = dest.shape[1], 0, []
    for part, count in zip(dest.split(list(rows)), rows, strict=True):
        own = count // groups
        copies.append((part.view(groups, own, size), (slice(None), slice(start, start + own))))
        start += own
    slots.add_cut(name, shape=(sum(rows), size), view=(groups, start, size), copies=tuple(copies))


def _mlp_slots(slots: WeightSlots, prefix: str, mlp: DenseMLP) -> None:
    names = [f"{prefix}gate_proj", f"{prefix}up_proj"]
    slots.add_rows(names, mlp.gate_up, [mlp.intermediate_size] * 2)
    slots.add_rows([f"{prefix}down_proj"], mlp.down, [mlp.down.out_features])


def _moe_slots(slots: WeightSlots, prefix: str, moe: SparseMoE) -> None:
    """Router, shared expert, and the experts in both layouts a checkpoint may use."""
    slots.add(f"{prefix}gate.weight", moe.gate.weight)
    slots.add(f"{prefix}shared_expert_gate.weight", moe.shared_expert_gate.weight)
    _mlp_slots(slots, f"{prefix}shared_expert.", moe.shared_expert)
    _expert_slots(slots, f"{prefix}experts.", moe.experts.gate_up, moe.experts.down)


def _gpu_moe_slots(slots: WeightSlots, prefix: str, moe: GpuSparseMoE) -> None:
    """The same names, where one map holds router and gate, and the shared expert may be an expert."""
    count, experts = moe.num_experts, moe.experts
    slots.add(f"{prefix}gate.weight", moe.router.weight[:count])
    slots.add(f"{prefix}shared_expert_gate.weight", moe.router.weight[count : count + 1])
    if moe.shared_expert is not None:
        _mlp_slots(slots, f"{prefix}shared_expert.", moe.shared_expert)
    else:
        _one_expert_slots(slots, f"{prefix}shared_expert.", experts, count)
    if experts.gate_up_scale is None:
        gate_up, down = experts.gate_up[:count], experts.down[:count]
        _expert_slots(slots, f"{prefix}experts.", gate_up, down)
        return
    for e in range(count):
        _one_expert_slots(slots, f"{prefix}experts.{e}.", experts, e)


def _expert_slots(slots: WeightSlots, prefix: str, gate_up: Tensor, down: Tensor) -> None:
    fused = (f"{prefix}gate_up_proj", f"{prefix}down_proj")
    slots.add(fused[0], gate_up)
    slots.add(fused[1], down)
    single = []
    for e in range(gate_up.shape[0]):
        gate, up = gate_up[e].split(gate_up.shape[1] // 2)
        parts = (("gate_proj", gate), ("up_proj", up), ("down_proj", down[e]))
        for name, dest in parts:
            single.append(f"{prefix}{e}.{name}.weight")
            slots.add(single[-1], dest)
    slots.alternatives.append((frozenset(fused), frozenset(single)))


def _one_expert_slots(slots: WeightSlots, prefix: str, experts: GpuExperts, e: int) -> None:
    """Expert ``e`` by itself, the only layout of FP8 packs, and its scales if it has any.

    Raises:
        ValueError: gate and up would share a scale block.
    """
    size = experts.intermediate_size
    sides = [("weight", size, experts.gate_up, experts.down)]
    if experts.gate_up_scale is not None:
        if size % GROUP:
            raise ValueError(
                f"{prefix}gate_proj.weight is FP8 with {size} rows; they must be a multiple of {GROUP}"
            )
        scales = (experts.gate_up_scale, experts.down_scale)
        sides.append((f"weight{SCALE_SUFFIX}", size // GROUP, *scales))
    for suffix, rows, gate_up, down in sides:
        gate, up = gate_up[e].split(rows)
        for name, dest in (("gate_proj", gate), ("up_proj", up), ("down_proj", down[e])):
            slots.add(f"{prefix}{name}.{suffix}", dest)
