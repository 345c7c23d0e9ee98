"""Parameters and bytes of a model's weights on one rank, from its configuration alone. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from sglang.srt.configs.draft_config import DraftConfig
from sglang.srt.configs.linear_state import dtype_bytes
from sglang.srt.configs.model_config import FULL_ATTENTION, ModelConfig

SCALE_BYTES = 2
"""Block scales of FP8 packs are bfloat16."""


@dataclass(frozen=True)
class Weight:
    """One parameter tensor of a rank. ``copies`` counts experts; ``linear`` marks quantizable ones."""

    name: str
    shape: tuple[int, ...]
    linear: bool = False
    copies: int = 1

    @property
    def num_params(self) -> int:
        return prod(self.shape) * self.copies


@dataclass(frozen=True)
class WeightSize:
    """Totals of a list of weights."""

    num_params: int
    nbytes: int

    def __add__(self, other: WeightSize) -> WeightSize:
        return WeightSize(self.num_params + other.num_params, self.nbytes + other.nbytes)


NO_WEIGHTS = WeightSize(0, 0)


def layer_ranges(num_layers: int, pp_size: int) -> list[range]:
    """Layers of each pipeline stage; the first stages take one more when it does not divide."""
    base, extra = divmod(num_layers, pp_size)
    starts = [stage * base + min(stage, extra) for stage in range(pp_size + 1)]
    return [range(a, b) for a, b in zip(starts, starts[1:])]


def _shard(total: int, tp_size: int, what: str) -> int:
    if total % tp_size:
        raise ValueError(f"--tp-size {tp_size} does not divide the {total} {what}; lower it")
    return total // tp_size


def kv_heads_per_rank(num_kv_heads: int, tp_size: int) -> int:
    """KV heads on one rank; heads are replicated when there are fewer than ranks."""
    if num_kv_heads < tp_size:
        if tp_size % num_kv_heads:
            raise ValueError(
                f"--tp-size {tp_size} is no multiple of the {num_kv_heads} KV heads, so that a rank "
                "would need parts of two; choose a multiple or a divisor"
            )
        return 1
    return _shard(num_kv_heads, tp_size, "KV heads")


def _attention(config: ModelConfig, prefix: str, tp: int) -> Iterator[Weight]:
    hidden, dim = config.hidden_size, config.head_dim
    heads = _shard(config.num_attention_heads, tp, "attention heads")
    kv = kv_heads_per_rank(config.num_key_value_heads, tp) * dim
    q_rows = heads * dim * (2 if config.attn_output_gate else 1)
    for name, rows, columns in (
        ("q_proj", q_rows, hidden),
        ("k_proj", kv, hidden),
        ("v_proj", kv, hidden),
        ("o_proj", hidden, heads * dim),
    ):
        yield Weight(f"{prefix}self_attn.{name}", (rows, columns), linear=True)
        if config.attention_bias:
            yield Weight(f"{prefix}self_attn.{name}.bias", (rows,))
    yield Weight(f"{prefix}self_attn.q_norm", (dim,))
    yield Weight(f"{prefix}self_attn.k_norm", (dim,))


def _linear_attention(config: ModelConfig, prefix: str, tp: int) -> Iterator[Weight]:
    hidden = config.hidden_size
    heads = _shard(config.linear_num_value_heads, tp, "linear value heads")
    keys = _shard(config.linear_num_key_heads, tp, "linear key heads") * config.linear_key_head_dim
    values = heads * config.linear_value_head_dim
    conv = 2 * keys + values
    at = f"{prefix}linear_attn."
    yield Weight(at + "in_proj_qkv", (conv, hidden), linear=True)
    yield Weight(at + "in_proj_z", (values, hidden), linear=True)
    yield Weight(at + "in_proj_b", (heads, hidden), linear=True)
    yield Weight(at + "in_proj_a", (heads, hidden), linear=True)
    yield Weight(at + "conv1d", (conv, 1, config.linear_conv_kernel_dim))
    yield Weight(at + "A_log", (heads,))
    yield Weight(at + "dt_bias", (heads,))
    yield Weight(at + "norm", (config.linear_value_head_dim,))
    yield Weight(at + "out_proj", (hidden, values), linear=True)


def _swiglu(prefix: str, hidden: int, width: int, copies: int = 1) -> Iterator[Weight]:
    yield Weight(f"{prefix}.gate_proj", (width, hidden), linear=True, copies=copies)
    yield Weight(f"{prefix}.up_proj", (width, hidden), linear=True, copies=copies)
    yield Weight(f"{prefix}.down_proj", (hidden, width), linear=True, copies=copies)


def _mlp(config: ModelConfig, layer_id: int, prefix: str, tp: int) -> Iterator[Weight]:
    hidden = config.hidden_size
    if not config.is_moe_layer(layer_id):
        width = _shard(config.intermediate_size, tp, "MLP channels")
        yield from _swiglu(f"{prefix}mlp", hidden, width)
        return
    yield Weight(f"{prefix}mlp.gate", (config.num_experts, hidden), linear=True)
    width = _shard(config.moe_intermediate_size, tp, "expert channels")
    yield from _swiglu(f"{prefix}mlp.experts", hidden, width, copies=config.num_experts)
    if config.shared_expert_intermediate_size:
        width = _shard(config.shared_expert_intermediate_size, tp, "shared-expert channels")
        yield from _swiglu(f"{prefix}mlp.shared_expert", hidden, width)
        yield Weight(f"{prefix}mlp.shared_expert_gate", (1, hidden), linear=True)


def block_weights(config: ModelConfig, layer_id: int, *, tp_size: int = 1) -> Iterator[Weight]:
    """Weights of one decoder layer on one rank."""
    prefix = f"model.layers.{layer_id}."
    yield Weight(prefix + "input_layernorm", (config.hidden_size,))
    yield Weight(prefix + "post_attention_layernorm", (config.hidden_size,))
    if config.layer_types[layer_id] == FULL_ATTENTION:
        yield from _attention(config, prefix, tp_size)
    else:
        yield from _linear_attention(config, prefix, tp_size)
    yield from _mlp(config, layer_id, prefix, tp_size)


def embedding_weights(
    config: ModelConfig, *, tp_size: int = 1, first: bool = True, last: bool = True
) -> Iterator[Weight]:
    """Embedding (first stage), final norm and head (last stage). The vocabulary is padded for TP."""
    rows = -(-config.vocab_size // tp_size)
    shared = config.tie_word_embeddings and first and last
    if first:
        yield Weight("model.embed_tokens", (rows, config.hidden_size))
    if last:
        yield Weight("model.norm", (config.hidden_size,))
        if not shared:
            yield Weight("lm_head", (rows, config.hidden_size))


def target_weights(
    config: ModelConfig, *, tp_size: int = 1, pp_size: int = 1, pp_rank: int = 0
) -> Iterator[Weight]:
    """Every weight of the text model on one rank; vision towers are never loaded."""
    yield from embedding_weights(
        config, tp_size=tp_size, first=pp_rank == 0, last=pp_rank == pp_size - 1
    )
    for layer_id in layer_ranges(config.num_hidden_layers, pp_size)[pp_rank]:
        yield from block_weights(config, layer_id, tp_size=tp_size)


def mtp_weights(config: ModelConfig, *, tp_size: int = 1) -> Iterator[Weight]:
    """Weights of the multi-token-prediction block; embedding and head are the target's."""
    hidden = config.hidden_size
    yield Weight("mtp.fc", (hidden, 2 * hidden), linear=True)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        yield Weight(f"mtp.{name}", (hidden,))
    block = config.mtp_config()
    for layer in range(config.mtp_num_hidden_layers):
        for weight in block_weights(block, 0, tp_size=tp_size):
            name = weight.name.replace("model.layers.0.", f"mtp.layers.{layer}.")
            yield Weight(name, weight.shape, weight.linear, weight.copies)


def block_draft_weights(
    config: DraftConfig, *, target_hidden_size: int, num_target_layers: int, tp_size: int = 1
) -> Iterator[Weight]:
    """Weights of a DFLASH, DFlash2 or DSPARK drafter on one rank; embedding and head are shared."""
    hidden, dim = config.hidden_size, config.head_dim
    taps = len(config.resolved_target_layer_ids(num_target_layers))
    yield Weight("fc", (hidden, taps * target_hidden_size), linear=True)
    yield Weight("hidden_norm", (hidden,))
    yield Weight("norm", (hidden,))
    heads = _shard(config.num_attention_heads, tp_size, "draft attention heads") * dim
    kv = kv_heads_per_rank(config.num_key_value_heads, tp_size) * dim
    width = _shard(config.intermediate_size, tp_size, "draft MLP channels")
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}."
        yield Weight(at + "input_layernorm", (hidden,))
        yield Weight(at + "post_attention_layernorm", (hidden,))
        yield Weight(at + "self_attn.q_proj", (heads, hidden), linear=True)
        yield Weight(at + "self_attn.k_proj", (kv, hidden), linear=True)
        yield Weight(at + "self_attn.v_proj", (kv, hidden), linear=True)
        yield Weight(at + "self_attn.o_proj", (hidden, heads), linear=True)
        yield Weight(at + "self_attn.q_norm", (dim,))
        yield Weight(at + "self_attn.k_norm", (dim,))
        yield from _swiglu(at + "mlp", hidden, width)
        yield from _dynamic_convs(config, at)
    yield from _selector(config)
    yield from _markov_head(config)


def _dynamic_convs(config: DraftConfig, prefix: str) -> Iterator[Weight]:
    if not config.conv_kernel_size:
        return
    hidden, taps = config.hidden_size, config.conv_kernel_size
    rows = 2 * taps * (hidden // config.conv_group_size)
    for name in ("attention_conv", "mlp_conv"):
        yield Weight(f"{prefix}{name}.base_kernel", (2, taps, hidden))
        yield Weight(f"{prefix}{name}.kernel_projection", (rows, hidden))


def _selector(config: DraftConfig) -> Iterator[Weight]:
    if not config.selector_rank:
        return
    rank = config.selector_rank
    yield Weight("candidate_selector.hidden_projection", (rank, config.hidden_size))
    yield Weight("candidate_selector.predecessor_codebook", (config.vocab_size, rank))
    yield Weight("candidate_selector.successor_codebook", (config.vocab_size, rank))


def _markov_head(config: DraftConfig) -> Iterator[Weight]:
    rank, hidden = config.markov_rank, config.hidden_size
    if not rank:
        return
    yield Weight("markov_head.markov_w1", (config.vocab_size, rank))
    yield Weight("markov_head.markov_w2", (config.vocab_size, rank))
    if config.markov_head_type == "gated":
        yield Weight("markov_head.gate_proj", (rank, hidden + rank))
    if config.markov_head_type == "rnn":
        yield Weight("markov_head.joint_proj", (3 * rank, 2 * rank + hidden))
    if config.enable_confidence_head:
        width = hidden + (rank if config.confidence_head_with_markov else 0)
        yield Weight("confidence_head.proj", (1, width))
        yield Weight("confidence_head.proj.bias", (1,))


def weight_size(
    weights: Iterator[Weight], *, dtype: str, config: ModelConfig | None = None
) -> WeightSize:
    """Parameters and bytes of ``weights`` stored as ``dtype``.

    With ``config.quantization`` the linear layers that its pack does not list as ignored take one
    byte a parameter and one bfloat16 scale a block.
    """
    quantization = config.quantization if config is not None else None
    itemsize = dtype_bytes(dtype)
    params = nbytes = 0
    for weight in weights:
        params += weight.num_params
        if quantization is None or not weight.linear or quantization.is_ignored(weight.name):
            nbytes += weight.num_params * itemsize
            continue
        rows, columns = quantization.weight_block_size
        blocks = -(-weight.shape[0] // rows) * -(-weight.shape[1] // columns) * weight.copies
        nbytes += weight.num_params + blocks * SCALE_BYTES
    return WeightSize(params, nbytes)
