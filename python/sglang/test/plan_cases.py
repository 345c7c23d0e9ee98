"""Arguments and models for memory-plan tests."""

from __future__ import annotations

from sglang.srt.configs.draft_config import DraftConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.plan_types import MemoryPlan
from sglang.srt.mem_cache.planner import make_plan
from sglang.srt.server_args import ServerArgs
from sglang.test.repo import ROOT

CONFIGS = ROOT / "test" / "registered" / "unit" / "model_configs"
GIB = 1 << 30


def model(name: str) -> ModelConfig:
    """A published target model."""
    return ModelConfig.from_path(str(CONFIGS / f"{name}.json"))


def draft(name: str) -> DraftConfig:
    """A published draft model."""
    return DraftConfig.from_path(str(CONFIGS / f"{name}.json"))


def server_args(**changes: object) -> ServerArgs:
    """Resolved arguments of a GPU server with MTP speculation, four verify rows."""
    values: dict[str, object] = {
        "model_path": "none",
        "device": "cuda",
        "dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16",
        "page_size": 64,
        "context_length": 262144,
        "chunked_prefill_size": 8192,
        "max_running_requests": 48,
        "speculative_algorithm": "NEXTN",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
        "mamba_radix_cache_strategy": "extra_buffer",
        "mamba_full_memory_ratio": 0.9,
        "cuda_graph_bs": [1, 2, 4, 8],
    }
    values.update(changes)
    return ServerArgs(**values)


def tiny_config(**changes: object) -> ModelConfig:
    """A small hybrid model: four layers, one of them full attention."""
    raw: dict[str, object] = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "max_position_embeddings": 2048,
        "mtp_num_hidden_layers": 1,
    }
    raw.update(changes)
    return ModelConfig.from_dict(raw)


def plan(config: ModelConfig, memory_gib: float = 80, **changes: object) -> MemoryPlan:
    """A plan of ``config`` on a device of ``memory_gib``."""
    draft_config = changes.pop("draft_config", None)
    return make_plan(
        config,
        server_args(**changes),
        device_memory_bytes=int(memory_gib * GIB),
        draft_config=draft_config,
    )
