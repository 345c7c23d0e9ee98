"""Memory that is set aside before pools are sized: activations, captured graphs, the runtime itself.

Estimates, not measurements, but for split contexts; every one is a line of the plan. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.kernels.ops.attention.paged.launch import SHORT_CHUNKS, SPLITS
from sglang.srt.arg_groups.basic_hook import reachable_graph_sizes
from sglang.srt.configs.linear_state import dtype_bytes
from sglang.srt.configs.model_config import ModelConfig

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

MIB = 1 << 20
CUDA_RUNTIME_BYTES = 1024 * MIB
"""CUDA context, cuBLAS and Triton workspaces, allocator fragmentation; a guess."""
CPU_RUNTIME_BYTES = 300 * MIB
"""Interpreter, torch and tokenizer; a guess."""
BYTES_PER_GRAPH = 2 * MIB
"""Kernel nodes and parameters of one captured graph; a guess."""
ACTIVATION_SLACK = 1.25
CHUNK_TOKENS = 64
FP8_GROUP = 128
SLOT_TILE_ROWS = 128
"""Rows of a tile that one expert has to itself where FP8 rows of prompts lie by slot."""
FEW_ROWS = 128
"""Up to so many rows experts gather theirs and nothing lies by slot."""


@dataclass(frozen=True)
class ReserveLine:
    """One amount set aside, with what it is for."""

    name: str
    nbytes: int
    note: str


def activation_bytes_per_token(config: ModelConfig, dtype: str, tp_size: int) -> int:
    """Peak live activations of one token inside the widest layer of one rank."""
    width = dtype_bytes(dtype)
    attention = (
        2 * config.num_attention_heads * config.head_dim * 2
        + 2 * config.num_key_value_heads * config.head_dim
    ) // tp_size
    linear = 2 * (config.conv_dim + 2 * config.value_dim) // tp_size
    # fp32 chunk kernels keep one state per chunk and several copies of q, k and v.
    state = (
        config.linear_num_value_heads * config.linear_value_head_dim * config.linear_key_head_dim
    )
    chunk = (4 * state // CHUNK_TOKENS + 4 * (config.conv_dim + config.value_dim)) // tp_size
    if config.num_experts:
        mlp = config.num_experts_per_tok * (3 * config.moe_intermediate_size + config.hidden_size)
        mlp += 3 * config.shared_expert_intermediate_size
    else:
        mlp = 3 * config.intermediate_size
    widest = max(width * attention, width * linear + chunk, width * mlp // tp_size)
    return 3 * width * config.hidden_size + widest


def expert_slot_bytes(config: ModelConfig, rows: int, dtype: str, tp_size: int) -> int:
    """What FP8 experts of one layer keep by slot for ``rows`` rows: 0 unless they are FP8 in blocks of 128 x 128.

    Rows of x sorted by expert, what the up projection makes of them with a scale a group, and every pair's
    result. Each expert's last tile is padded, so this grows with the experts and not with the rows alone.
    """
    quantization = config.quantization
    if quantization is None or quantization.weight_block_size != (FP8_GROUP, FP8_GROUP):
        return 0
    pairs = rows * config.num_experts_per_tok
    tiles = pairs // SLOT_TILE_ROWS + min(pairs, config.num_experts)
    slots, shared = tiles * SLOT_TILE_ROWS, -(-rows // SLOT_TILE_ROWS) * SLOT_TILE_ROWS
    inner = config.moe_intermediate_size // tp_size
    made = inner + dtype_bytes("float32") * -(-inner // FP8_GROUP)
    results = (pairs + rows) * config.hidden_size * dtype_bytes(dtype)
    return slots * config.hidden_size + (slots + shared) * made + results


def peak_activation_bytes(config: ModelConfig, args: ServerArgs, rows: int) -> int:
    """Peak live activations of ``rows`` rows inside the widest layer of one rank."""
    peak = activation_bytes_per_token(config, args.dtype, args.tp_size) * rows
    if args.device == "cpu" or not config.num_experts or rows <= FEW_ROWS:
        return peak
    beside = 3 * dtype_bytes(args.dtype) * config.hidden_size * rows
    return max(peak, beside + expert_slot_bytes(config, rows, args.dtype, args.tp_size))


def runtime_reserves(
    config: ModelConfig,
    args: ServerArgs,
    *,
    max_running: int,
    draft_tokens: int | None,
    attention_shapes: Sequence[tuple[int, int]],
) -> tuple[ReserveLine, ...]:
    """Memory outside ``--mem-fraction-static``: activations, logits, split contexts, graphs, runtime.

    attention_shapes  (query heads of the rank, head dim) of each model that attends: target, drafter
    """
    rows = max_running * (draft_tokens or 1)
    chunk = args.chunked_prefill_size
    chunk_tokens = args.max_prefill_tokens if chunk < 0 else min(chunk, args.max_prefill_tokens)
    widest = max(chunk_tokens, rows)
    activations = int(ACTIVATION_SLACK * peak_activation_bytes(config, args, widest))
    logits = 2 * rows * config.vocab_size * dtype_bytes("float32")
    lines = [
        ReserveLine("activations", activations, f"{widest} rows, estimate"),
        ReserveLine("logits", logits, f"{rows} rows in fp32 and their probabilities"),
    ]
    if args.device == "cpu":
        return (*lines, ReserveLine("runtime", CPU_RUNTIME_BYTES, "interpreter and torch, guess"))
    kept, width = max(rows, SHORT_CHUNKS.max_rows), dtype_bytes("bfloat16")
    splits = sum(SPLITS.workspace_bytes(kept, *shape, width) for shape in attention_shapes)
    note = f"attention's partial results of {kept} rows, {len(attention_shapes)} models"
    lines.append(ReserveLine("split contexts", splits, note))
    if not args.disable_cuda_graph:
        graphs = reachable_graph_sizes(args.cuda_graph_bs or [], max_running)
        captured = peak_activation_bytes(config, args, max(graphs, default=0) * (draft_tokens or 1))
        nbytes = len(graphs) * BYTES_PER_GRAPH * (2 if draft_tokens else 1) + captured
        lines.append(ReserveLine("graph capture", nbytes, f"{len(graphs)} batch sizes, estimate"))
    return (*lines, ReserveLine("runtime", CUDA_RUNTIME_BYTES, "context and workspaces, guess"))
