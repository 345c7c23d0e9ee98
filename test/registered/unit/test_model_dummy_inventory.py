"""Published geometries built without memory: tensor names of their FP8 packs, and bytes against the plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.fp8_linear import FP8Linear
from sglang.srt.mem_cache.weight_sizes import mtp_weights, target_weights, weight_size
from sglang.srt.models.registry import build_draft_model, build_model
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="unit")

CONFIGS = Path(__file__).with_name("model_configs")
OPTIONS = {"device": torch.device("meta"), "dtype": torch.bfloat16, "attn_backend": None}


def built(name: str):
    """(config, target, MTP block) on the meta device, which has shapes and no data."""
    pytest.importorskip("triton", reason="Triton is not installed")
    config = ModelConfig.from_path(str(CONFIGS / name))
    target = build_model(config, **OPTIONS)
    return config, target, build_draft_model(config, target=target, **OPTIONS)


def nbytes(parameters) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def test_fp8_inventory_of_the_35b_pack():
    """One name too few or too many and the official pack does not load (models.md section 5)."""
    config, target, draft = built("Qwen3.6-35B-A3B-FP8.json")
    assert len(target.weight_slots().slots) == 3 + 30 * (1536 + 22) + 10 * (1536 + 20)
    assert len(draft.weight_slots().slots) == 1560
    slots = target.weight_slots().slots
    prefix = "model.layers.0."
    assert slots[f"{prefix}mlp.experts.0.gate_proj.weight"].shape == (512, 2048)
    assert slots[f"{prefix}mlp.experts.0.gate_proj.weight_scale_inv"].shape == (4, 16)
    assert slots[f"{prefix}linear_attn.in_proj_z.weight_scale_inv"].shape == (32, 16)
    for kept in ("mlp.gate", "mlp.shared_expert_gate", "linear_attn.in_proj_b"):
        slot = slots[f"{prefix}{kept}.weight"]
        assert slot.copies[0][0].dtype == torch.bfloat16
        assert f"{prefix}{kept}.weight_scale_inv" not in slots
    assert config.quantization is not None


@pytest.mark.parametrize(
    "name", ["Qwen3.6-35B-A3B-FP8.json", "Qwen3.8-27B-FP8.json", "Qwen3-Next-80B-A3B.json"]
)
def test_bytes_are_those_of_the_plan(name):
    """A map that is widened on a GPU, or that the plan takes for FP8 and the model does not."""
    config, target, draft = built(name)
    planned = weight_size(target_weights(config), dtype="bfloat16", config=config).nbytes
    assert nbytes(target.parameters()) == pytest.approx(planned, rel=0.003)
    shared = {id(p) for p in target.parameters()}
    own = [p for p in draft.parameters() if id(p) not in shared]
    planned = weight_size(mtp_weights(config), dtype="bfloat16", config=config).nbytes
    assert nbytes(own) == pytest.approx(planned, rel=0.003)
    has_fp8 = any(isinstance(module, FP8Linear) for module in target.modules())
    assert has_fp8 == (config.quantization is not None)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
