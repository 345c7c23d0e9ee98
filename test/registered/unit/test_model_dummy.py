"""Random weights in place of a checkpoint: ``--load-format dummy``."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

from sglang.bundled import resolve_model_path
from sglang.kernels.ops.cpu import library
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.fp8_linear import FP8Linear
from sglang.srt.model_loader.dummy import load_dummy_weights
from sglang.srt.models.registry import build_draft_model, build_model
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.engine_harness import InProcessEngine
from sglang.test.make_checkpoint import make_checkpoint

register_cpu_ci(est_time=15, suite="unit")

CPU = torch.device("cpu")
OPTIONS = {"device": CPU, "dtype": torch.float32, "attn_backend": None}


@pytest.fixture(autouse=True)
def restore_kernels():
    yield
    library.select("auto")


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """A directory with config.json alone, by kind of checkpoint."""
    found = {}
    for arch, dtype in (("qwen3_5", "bf16"), ("qwen3_5_moe", "bf16"), ("qwen3_next", "fp8")):
        path = make_checkpoint(tmp_path_factory.mktemp(arch) / "m", arch=arch, dtype=dtype)
        for file in [f for f in path.iterdir() if f.name != "config.json"]:
            file.unlink()
        found[arch] = str(path)
    return found


def drawn(path: str, *, seed: int = 0) -> nn.Module:
    library.select("torch")
    model = build_model(ModelConfig.from_path(path), **OPTIONS)
    load_dummy_weights(model, seed=seed)
    return model


@pytest.mark.parametrize("arch", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_every_parameter_is_drawn_and_repeats_by_seed(arch, configs):
    """A parameter left as allocated, two that share one pattern, a draw that depends on the order."""
    first, again, other = (drawn(configs[arch], seed=seed) for seed in (0, 0, 1))
    seen = set()
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name
        assert not torch.equal(parameter, other.get_parameter(name)), name
        assert parameter.float().std() > 0 and parameter.isfinite().all(), name
        start = (parameter.shape, tuple(parameter.flatten()[:4].tolist()))
        assert start not in seen, name
        seen.add(start)


def test_many_experts_are_read(configs):
    """Weights that leave the router flat or certain would flatter a measurement."""
    moe = drawn(configs["qwen3_5_moe"]).layers[0].mlp
    x = torch.randn(64, moe.gate.in_features, generator=torch.Generator().manual_seed(0))
    logits = moe.gate(x)
    assert 0.5 < logits.std() < 2
    chosen = logits.topk(moe.top_k).indices
    assert chosen.unique().numel() == moe.gate.out_features
    assert chosen.flatten().bincount().max() < chosen.numel() / 3


def test_fp8_values_do_not_vanish():
    """Drawn too small they round to zero and cost nothing to multiply; too large they saturate."""
    holder = nn.ModuleDict({"map": FP8Linear(512, 640, device=CPU)})
    load_dummy_weights(holder)
    linear = holder["map"]
    values = linear.weight.float()
    assert (values == 0).float().mean() < 1e-3
    assert (values.abs() == 448).float().mean() < 1e-3
    assert values.unique().numel() > 150
    assert linear.weight_scale.unique().numel() > 15
    grid = linear.weight_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert (values * grid).std() * 512**0.5 == pytest.approx(1.0, rel=0.1)


def test_a_draft_leaves_the_target_as_it_is(configs):
    """Embedding and head are the target's; drawn again under the draft's names they would change."""
    target = drawn(configs["qwen3_5"])
    before = {name: p.clone() for name, p in target.named_parameters()}
    draft = build_draft_model(target.config, target=target, **OPTIONS)
    load_dummy_weights(draft, seed=1, shared_with=target)
    for name, parameter in target.named_parameters():
        assert torch.equal(parameter, before[name]), name
    assert draft.fc.weight.std() > 0
    load_dummy_weights(draft, seed=1)
    assert not torch.equal(target.lm_head.weight, before["lm_head.weight"])


def generate(path: str, **options) -> list[list[int]]:
    engine = InProcessEngine(path, load_format="dummy", skip_tokenizer_init=True, **options)
    prompts = [[(7 * i + r) % 4000 for i in range(40 + r)] for r in range(3)]
    return engine.generate(prompts, max_new_tokens=24, ignore_eos=True)


def test_engine_serves_from_config_alone(configs):
    """Something on the way still opens a weight file, or the draft's weights differ from run to run."""
    ids = generate(configs["qwen3_5"])
    assert all(len(set(answer)) > 4 for answer in ids)
    assert generate(configs["qwen3_5"]) == ids
    speculative = {"speculative_algorithm": "NEXTN", "enable_linear_lossless_verify": True}
    assert generate(configs["qwen3_5"], **speculative) == ids


@pytest.mark.parametrize("algorithm", ["DFLASH", "DSPARK"])
def test_block_drafters_need_no_files_either(algorithm, tmp_path):
    for name in ("demo", f"demo-{algorithm.lower()}"):
        (tmp_path / name).mkdir()
        shutil.copy(f"{resolve_model_path(name)}/config.json", tmp_path / name)
    draft = str(tmp_path / f"demo-{algorithm.lower()}")
    options = {"speculative_algorithm": algorithm, "speculative_draft_model_path": draft}
    assert generate(str(tmp_path / "demo"), **options) == generate(str(tmp_path / "demo"))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
