"""Configurations on disk for tests of arguments: a config.json and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang.srt.server_args import ServerArgs

MAX_POSITIONS = 4096


def write_model_config(folder: Path, **changes: Any) -> str:
    """Write a small dense Qwen3.5 config with a draft layer; return the folder as a path.

    `changes` replace keys of the text config.
    """
    text = {
        "model_type": "qwen3_5_text",
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
        "mtp_num_hidden_layers": 1,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "eos_token_id": 1,
    }
    text.update(changes)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def cpu_args(model_path: str = "dummy", **values: Any) -> ServerArgs:
    """Arguments for the CPU, not resolved."""
    return ServerArgs(model_path=model_path, **{"device": "cpu", **values})
