"""The least time each part of a step can take: bytes over the memory's rate, operations over the unit's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.weight_sizes import Weight, block_weights, weight_size

BYTES_PER_US = 4.3e6
"""An H200's measured streaming rate."""
FP8_FLOP_PER_US = 1.9e9
BF16_FLOP_PER_US = 7.9e8
KEPT_IN_BF16 = ("mlp.gate", "shared_expert_gate", "in_proj_a", "in_proj_b")


@dataclass(frozen=True)
class StepShape:
    """One step: requests, rows of each, and the tokens that stand before them.

    draft_steps  one-row steps of the draft layer that follow a verify; 0 for a prefill
    """

    requests: int
    rows: int
    context: int
    draft_steps: int = 0

    @property
    def tokens(self) -> int:
        return self.requests * self.rows


def distinct_experts(config: ModelConfig, tokens: int) -> float:
    """Experts that are read if every token chooses evenly and by itself."""
    share = config.num_experts_per_tok / config.num_experts
    return config.num_experts * (1 - (1 - share) ** tokens)


def floors(config: ModelConfig, shape: StepShape, *, kv_bytes: int = 2) -> dict[str, float]:
    """Family -> us, for the geometry of a mixture-of-experts model; the draft layer's calls included."""
    layers = config.num_hidden_layers
    weights = [w for i in range(layers) for w in block_weights(config, i)]
    experts = [w for w in weights if ".mlp.experts." in w.name]
    dense = [
        w
        for w in weights
        if w.linear
        and ".mlp.experts." not in w.name
        and not _is_small(w)
        and w.num_params > 1 << 16
    ]
    found = {
        "experts": _experts(config, experts, layers, shape),
        "dense": max(
            _bytes(config, dense) / BYTES_PER_US,
            2 * shape.tokens * sum(w.num_params for w in dense) / FP8_FLOP_PER_US,
        ),
        "attention": _attention(config, shape, kv_bytes),
        "GDN": _recurrence(config, shape),
        "head": config.vocab_size * config.hidden_size * 2 / BYTES_PER_US * (1 + shape.draft_steps),
    }
    return {family: us for family, us in found.items() if us > 0}


def prompts_floors(
    config: ModelConfig, prompts: int, tokens: int, chunk: int, *, num_steps: int
) -> dict[str, float]:
    """Family -> us a step, for whole prompts in chunks of at most ``chunk``, spread over the steps."""
    total: dict[str, float] = defaultdict(float)
    for start in range(0, tokens, chunk):
        shape = StepShape(1, min(chunk, tokens - start), start)
        for family, us in floors(config, shape).items():
            total[family] += prompts * us / num_steps
    return dict(total)


def _is_small(weight: Weight) -> bool:
    return weight.name.endswith(KEPT_IN_BF16)


def _bytes(config: ModelConfig, weights: Iterable[Weight]) -> int:
    return weight_size(iter(weights), dtype=config.dtype, config=config).nbytes


def _experts(config: ModelConfig, experts: list[Weight], layers: int, shape: StepShape) -> float:
    if not experts:
        return 0.0
    one = _bytes(config, experts) / layers / config.num_experts
    read = distinct_experts(config, shape.tokens) * one * layers
    read += shape.draft_steps * distinct_experts(config, shape.requests) * one
    params = sum(w.num_params for w in experts) / config.num_experts
    flop = 2 * shape.tokens * config.num_experts_per_tok * params
    return max(read / BYTES_PER_US, flop / FP8_FLOP_PER_US)


def _attention(config: ModelConfig, shape: StepShape, kv_bytes: int) -> float:
    layers = len(config.full_attention_layer_ids)
    one = 2 * config.num_key_value_heads * config.head_dim * kv_bytes
    read = shape.requests * (shape.context + shape.rows) * one * (layers + shape.draft_steps)
    seen = shape.context + shape.rows / 2
    flop = 4 * shape.tokens * seen * config.num_attention_heads * config.head_dim * layers
    return max(read / BYTES_PER_US, flop / BF16_FLOP_PER_US)


def _recurrence(config: ModelConfig, shape: StepShape) -> float:
    """A verify reads every state and the commit reads and writes it; a prefill reads and writes once,
    and moves q, k, v and the output of every row."""
    layers = len(config.linear_layer_ids)
    state = (
        config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    )
    moves = 3 if shape.draft_steps else 2
    row = (2 * config.key_dim + 2 * config.value_dim) * 2
    return layers * (shape.requests * moves * state * 4 + shape.tokens * row) / BYTES_PER_US
