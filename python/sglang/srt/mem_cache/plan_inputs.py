"""What a memory plan needs to know about a model and its flags, derived without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.configs.draft_config import DraftConfig
from sglang.srt.configs.linear_state import DTYPE_BYTES, Mamba2StateShape
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.environ import envs
from sglang.srt.mem_cache.state_layout import StateLayout
from sglang.srt.mem_cache.state_sizing import slots_per_request
from sglang.srt.mem_cache.weight_sizes import (
    NO_WEIGHTS,
    WeightSize,
    block_draft_weights,
    kv_heads_per_rank,
    layer_ranges,
    mtp_weights,
    target_weights,
    weight_size,
)
from sglang.srt.utils.platform import is_cpu

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

MTP_ALGORITHMS = ("EAGLE", "NEXTN")
BLOCK_ALGORITHMS = ("DFLASH", "DSPARK")
STATE_DTYPES = ("float32", "bfloat16", "float16")


class MemoryPlanError(ValueError):
    """The model, the flags and the memory do not go together; the message says what to move."""


@dataclass(frozen=True)
class KVGeometry:
    """KV of one set of attention layers on one rank."""

    num_layers: int
    num_heads: int
    head_dim: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_heads * self.head_dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class DraftNeeds:
    """What the drafter adds on a rank: weights, KV for every slot, and rows beyond the verify.

    ``query_heads`` of its attention layers on the rank; 0 without ``kv``.
    """

    weights: WeightSize
    kv: KVGeometry | None
    tail_tokens: int
    query_heads: int = 0


def request_slot_ratio(args: ServerArgs) -> int:
    """State slots that one running request needs at its peak under these flags."""
    strategy = args.mamba_radix_cache_strategy
    return slots_per_request(
        radix_cache=not args.disable_radix_cache,
        extra_buffer=strategy in ("extra_buffer", "extra_buffer_lazy"),
        lazy=strategy == "extra_buffer_lazy",
        overlap=not args.disable_overlap_schedule,
        skip_decode_lock=bool(envs.SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK.get()),
    )


def state_dtypes(config: ModelConfig, args: ServerArgs) -> tuple[str, str]:
    """Names of the conv and the recurrent-state dtype: flag, then environment, then config.

    Conv windows hold inputs of the convolution: they are float32 where activations are, unless
    ``SGLANG_MAMBA_CONV_DTYPE`` says otherwise.
    """
    conv = str(envs.SGLANG_MAMBA_CONV_DTYPE.get())
    if not envs.SGLANG_MAMBA_CONV_DTYPE.is_set() and args.dtype == "float32":
        conv = "float32"
    environment = envs.SGLANG_MAMBA_SSM_DTYPE.get()
    temporal = config.mamba_ssm_dtype
    if environment in STATE_DTYPES:
        temporal = environment
    if args.mamba_ssm_dtype is not None:
        temporal = args.mamba_ssm_dtype
    return (conv if conv in STATE_DTYPES else "bfloat16"), temporal


def stage_layers(config: ModelConfig, pp_size: int, kind: str) -> list[list[int]]:
    """Per pipeline stage, the ids of its layers of one kind."""
    return [
        [layer for layer in stage if config.layer_types[layer] == kind]
        for stage in layer_ranges(config.num_hidden_layers, pp_size)
    ]


def state_layout(
    config: ModelConfig, args: ServerArgs, *, num_layers: int, chain: bool
) -> StateLayout:
    """Layout of the recurrent state of ``num_layers`` linear layers on one TP rank."""
    try:
        shape = Mamba2StateShape.create(
            tp_world_size=args.tp_size,
            intermediate_size=config.value_dim,
            n_groups=config.linear_num_key_heads,
            num_heads=config.linear_num_value_heads,
            head_dim=config.linear_value_head_dim,
            state_size=config.linear_key_head_dim,
            conv_kernel=config.linear_conv_kernel_dim,
        )
    except AssertionError as error:
        raise MemoryPlanError(f"--tp-size {args.tp_size}: {error}; lower it") from error
    conv_dtype, temporal_dtype = state_dtypes(config, args)
    return StateLayout(
        num_layers=num_layers,
        conv=tuple(shape.conv),
        temporal=shape.temporal,
        conv_dtype=conv_dtype,
        temporal_dtype=temporal_dtype,
        num_k_heads=shape.num_k_heads_per_tp,
        dedup=chain and not is_cpu(),
    )


def kv_geometry(config: ModelConfig, args: ServerArgs, num_layers: int) -> KVGeometry:
    """KV of ``num_layers`` full-attention layers of the target on one TP rank."""
    heads = kv_heads_per_rank(config.num_key_value_heads, args.tp_size)
    return KVGeometry(num_layers, heads, config.head_dim, kv_dtype(args))


def kv_dtype(args: ServerArgs) -> str:
    """Name of the KV element type."""
    names = {"bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "auto": args.dtype}
    return names.get(args.kv_cache_dtype, args.kv_cache_dtype)


def target_weight_size(config: ModelConfig, args: ServerArgs) -> WeightSize:
    """Weights of the fullest pipeline stage on one TP rank."""
    sizes = [
        weight_size(
            target_weights(config, tp_size=args.tp_size, pp_size=args.pp_size, pp_rank=rank),
            dtype=args.dtype,
            config=_stored_quantized(config, args),
        )
        for rank in range(args.pp_size)
    ]
    return max(sizes, key=lambda size: size.nbytes)


def _stored_quantized(config: ModelConfig, args: ServerArgs) -> ModelConfig | None:
    """FP8 weights stay FP8 on a GPU; the CPU engine widens them while loading."""
    return config if args.device != "cpu" else None


def draft_needs(
    config: ModelConfig, draft: DraftConfig | None, args: ServerArgs, draft_tokens: int | None
) -> DraftNeeds:
    """Weights, KV and spare rows of the algorithm's drafter."""
    algorithm = args.speculative_algorithm
    if algorithm is None:
        return DraftNeeds(NO_WEIGHTS, None, 1)
    if algorithm == "NGRAM":
        return DraftNeeds(NO_WEIGHTS, None, draft_tokens)
    if algorithm in MTP_ALGORITHMS:
        size = weight_size(
            mtp_weights(config, tp_size=args.tp_size),
            dtype=args.dtype,
            config=_stored_quantized(config, args),
        )
        layers = max(1, config.mtp_num_hidden_layers)
        heads = config.num_attention_heads // args.tp_size
        return DraftNeeds(size, kv_geometry(config, args, layers), draft_tokens, heads)
    if algorithm in BLOCK_ALGORITHMS:
        return _block_draft_needs(config, _draft_config(draft, args), args, draft_tokens)
    raise MemoryPlanError(
        f"--speculative-algorithm {algorithm}: no memory plan covers its draft model; use one of "
        f"{', '.join((*MTP_ALGORITHMS, 'NGRAM', *BLOCK_ALGORITHMS))}"
    )


def _draft_config(draft: DraftConfig | None, args: ServerArgs) -> DraftConfig:
    if draft is not None:
        return draft
    if args.speculative_draft_model_path is None:
        raise MemoryPlanError(
            f"--speculative-algorithm {args.speculative_algorithm} needs "
            "--speculative-draft-model-path: the plan counts the drafter's weights and KV"
        )
    return DraftConfig.from_path(args.speculative_draft_model_path)


def _block_draft_needs(
    config: ModelConfig, draft: DraftConfig, args: ServerArgs, draft_tokens: int
) -> DraftNeeds:
    _check_pair(config, draft, args)
    weights = block_draft_weights(
        draft,
        target_hidden_size=config.hidden_size,
        num_target_layers=config.num_hidden_layers,
        tp_size=args.tp_size,
    )
    heads = kv_heads_per_rank(draft.num_key_value_heads, args.tp_size)
    kv = KVGeometry(draft.num_hidden_layers, heads, draft.head_dim, kv_dtype(args))
    size = weight_size(weights, dtype=args.dtype)
    # A draft block is computed in slots beyond those of the verify.
    return DraftNeeds(size, kv, 2 * draft_tokens, draft.num_attention_heads // args.tp_size)


def _check_pair(config: ModelConfig, draft: DraftConfig, args: ServerArgs) -> None:
    """Raise MemoryPlanError for a drafter that was made for something else."""
    given = f"--speculative-draft-model-path {args.speculative_draft_model_path}"
    if draft.algorithm != args.speculative_algorithm:
        raise MemoryPlanError(
            f"--speculative-algorithm {args.speculative_algorithm}: {given} is a drafter for "
            f"{draft.algorithm}; use that algorithm or another drafter"
        )
    pairs = (
        ("vocab_size", draft.vocab_size, config.vocab_size),
        ("hidden_size", draft.hidden_size, config.hidden_size),
        ("num_target_layers", draft.num_target_layers, config.num_hidden_layers),
    )
    for key, mine, target in pairs:
        if mine and mine != target:
            raise MemoryPlanError(
                f"{given}: its {key} is {mine}, the target's {target}; use a drafter made for this "
                "target, whose embedding and head it shares"
            )


def stage_counts(config: ModelConfig, pp_size: int, kind: str) -> int:
    """Most layers of one kind that any pipeline stage holds."""
    return max(len(layers) for layers in stage_layers(config, pp_size, kind))
