"""ModelConfig and DraftConfig from published and hand-made configs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang.srt.configs.draft_config import DraftConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.quantization import QuantizationConfig
from sglang.srt.configs.rope_config import RopeConfig
from sglang.srt.layers.rotary_embedding import (
    RotaryEmbedding,
    attention_scaling,
    inverse_frequencies,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="unit")

PUBLISHED = Path(__file__).parent / "model_configs"

BASE = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("Qwen3-Next-80B-A3B", ("qwen3_next", 48, 12, 8192, 512, 1)),
        ("Qwen3.5-0.8B", ("qwen3_5", 24, 6, 6144, 0, 1)),
        ("Qwen3.5-35B-A3B", ("qwen3_5_moe", 40, 10, 8192, 256, 1)),
        ("Qwen3.8-27B", ("qwen3_5", 64, 16, 10240, 0, 1)),
    ],
)
def test_published_geometry(name, want):
    """The table of models.md section 1."""
    c = ModelConfig.from_path(str(PUBLISHED / f"{name}.json"))
    full = len(c.full_attention_layer_ids)
    got = (c.family, c.num_hidden_layers, full, c.conv_dim, c.num_experts, c.mtp_num_hidden_layers)
    assert got == want
    assert c.rope == RopeConfig(
        theta=1e7, rotary_dim=64, original_max_position_embeddings=c.max_position_embeddings
    )
    assert len(c.linear_layer_ids) + full == c.num_hidden_layers


def test_draft_block_of_a_config_leaves_the_target_alone():
    """F113: the MTP's single full-attention layer must not become the target's."""
    config = ModelConfig.from_dict(BASE)
    draft = config.mtp_config()
    assert draft.layer_types == ("full_attention",) and draft.num_hidden_layers == 1
    assert config.num_hidden_layers == 4 and len(config.layer_types) == 4


def test_text_config_inherits_from_the_root():
    """tie and quantization in the root only; text values win where both exist."""
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    root = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "tie_word_embeddings": True,
        "quantization_config": quantization,
        "torch_dtype": "float32",
        "text_config": {k: v for k, v in BASE.items() if k != "architectures"},
    }
    config = ModelConfig.from_dict(root)
    assert config.tie_word_embeddings and config.dtype == "float32"
    assert config.quantization == QuantizationConfig("fp8", (128, 128), ())
    root["text_config"]["tie_word_embeddings"] = False
    assert not ModelConfig.from_dict(root).tie_word_embeddings


def test_eos_ids_are_a_union():
    config = ModelConfig.from_dict(BASE | {"eos_token_id": 5}, generation={"eos_token_id": [7, 5]})
    assert config.eos_token_ids == {5, 7}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM.*supported are"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"output_gate_type": "tanh"}, "output_gate_type='tanh'.*swish"),
        ({"mamba_ssm_dtype": "float8"}, "mamba_ssm_dtype='float8'"),
        ({"layer_types": ["full_attention"]}, "layer_types must name 4 layers"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads=3"),
        ({"intermediate_size": 0}, "intermediate_size is missing"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type='longrope'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "needs rope_parameters.factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method='gptq'"),
    ],
)
def test_bad_values_name_the_key(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(BASE | change)


def test_generic_list_entries_match_on_dots_only():
    """`mlp.gate` must not take `mlp.gate_proj` with it; prefixes differ between packs."""
    config = QuantizationConfig("fp8", (128, 128), ("mlp.gate", "model.layers.1", "lm_head"))
    assert config.is_ignored("model.layers.0.mlp.gate")
    assert config.is_ignored("model.language_model.layers.1.self_attn.q_proj")
    assert config.is_ignored("lm_head")
    assert not config.is_ignored("model.layers.0.mlp.gate_proj")
    assert not config.is_ignored("model.layers.10.self_attn.q_proj")


def test_draft_configs():
    """Both generations of keys: nested and top level; YaRN; a drafter rotates its whole head."""
    flash = DraftConfig.from_path(str(PUBLISHED / "Qwen3.8-27B-DFlash2.json"))
    assert (flash.algorithm, flash.block_size, flash.selector_rank) == ("DFLASH", 8, 256)
    assert flash.resolved_target_layer_ids(64) == (5, 19, 33, 47, 61)
    spark = DraftConfig.from_path(str(PUBLISHED / "Qwen3.8-27B-DSpark.json"))
    assert (spark.algorithm, spark.markov_rank, spark.rope.rope_type) == ("DSPARK", 256, "yarn")
    assert spark.rope.rotary_dim == spark.head_dim == 128
    with pytest.raises(ValueError, match="stay below 15"):
        flash.resolved_target_layer_ids(16)


def test_yarn_keeps_fast_and_stretches_slow_frequencies():
    """A ramp the wrong way round swaps the two ends; scaling is 1 + 0.1 ln(factor)."""
    rope = RopeConfig(1e7, 128, "yarn", 32.0, 8192, 32.0, 1.0)
    plain = inverse_frequencies(RopeConfig(1e7, 128))
    stretched = inverse_frequencies(rope)
    assert torch.equal(stretched[:10], plain[:10])
    torch.testing.assert_close(stretched[-10:], plain[-10:] / 32)
    assert attention_scaling(rope) == pytest.approx(1.3465735903)
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        head_dim=128,
        max_position_embeddings=262144,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e7,
            "factor": 32.0,
            "original_max_position_embeddings": 8192,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    )
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    want, scaling = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    torch.testing.assert_close(stretched, want)
    assert scaling == pytest.approx(attention_scaling(rope))


def test_rotary_table_grows_without_changing_old_positions():
    rotary = RotaryEmbedding(RopeConfig(1e4, 32), device=torch.device("cpu"))
    rotary.reserve(10)
    before = rotary.cos.clone()
    rotary.reserve(5000)
    assert rotary.cos.shape[0] >= 5000
    assert torch.equal(rotary.cos[: before.shape[0]], before)


def test_configs_do_not_import_torch():
    """The front end reads configs and never loads torch."""
    code = (
        "import sys, sglang.srt.configs.model_config, sglang.srt.configs.draft_config;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
