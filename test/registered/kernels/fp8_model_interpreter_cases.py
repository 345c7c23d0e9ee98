"""Whole tiny models through the GPU module path in Triton's interpreter; run by test_fp8_model.py."""

from __future__ import annotations

import pytest
import torch

from sglang.kernels import triton_support
from sglang.kernels.ops.quantization import launch
from sglang.srt.layers.fp8_linear import FP8Linear, PartlyFP8Linear
from sglang.srt.layers.gpu_experts import GpuExperts
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.make_checkpoint import make_checkpoint
from sglang.test.model_rig import ModelRig, random_tokens

ARCHITECTURES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
# FP8 rounds activations to 3 bits of mantissa at every linear map.
RELATIVE_ERROR = {"fp32": 1e-4, "fp8": 0.12}


@pytest.fixture(autouse=True)
def split_sums(monkeypatch):
    """Short sums in parts too, as the served models' long ones."""
    monkeypatch.setattr(launch, "LONG_DEPTH", 128)


def run(path: str) -> tuple[torch.Tensor, ModelRig]:
    rig = ModelRig(path, kernels="torch")
    tokens = random_tokens(rig.config, 5, seed=0)
    prompt = rig.run(ForwardMode.EXTEND, [tokens], [0]).logits
    step = rig.run(ForwardMode.DECODE, [[5]], [5]).logits
    return torch.cat([prompt, step]), rig


@pytest.mark.parametrize("dtype", ["fp32", "fp8"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_gpu_path_agrees_with_the_cpu_path(arch, dtype, tmp_path, monkeypatch):
    """A part of a fused map, a scale or an expert in the wrong place; a fused op with other semantics."""
    path = str(make_checkpoint(tmp_path / "m", arch=arch, dtype=dtype, seed=1))
    got, rig = run(path)
    monkeypatch.setattr(triton_support, "INTERPRETING", False)
    want, plain = run(path)
    error = (got - want).norm() / want.norm()
    print(f"{arch} {dtype}: relative error {error:.2e}")
    assert error < RELATIVE_ERROR[dtype]
    kinds = {type(module) for module in rig.model.modules()}
    assert ({FP8Linear, PartlyFP8Linear} <= kinds) == (dtype == "fp8")
    assert (GpuExperts in kinds) == (arch != "qwen3_5")
    assert not {FP8Linear, GpuExperts} & {type(module) for module in plain.model.modules()}
    if dtype == "fp8":
        check_bytes(rig)


def check_bytes(rig: ModelRig) -> None:
    """What is stored is what was loaded: each block's largest value is near the top of e4m3's range."""
    for name, module in rig.model.named_modules():
        if isinstance(module, FP8Linear):
            assert module.weight.dtype == torch.float8_e4m3fn, name
            assert module.weight.float().abs().max() >= 416, name
            assert (module.weight_scale < 0.1).all(), name


def test_unquantised_tensor_of_an_fp8_module_is_an_error(tmp_path):
    from safetensors.torch import load_file, save_file

    path = make_checkpoint(tmp_path / "m", arch="qwen3_5", dtype="fp8")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.bfloat16)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(
        ValueError, match="up_proj.weight is torch.bfloat16, but this kind of module"
    ):
        ModelRig(str(path), kernels="torch")
    tensors = load_file(path / "model.safetensors")
    del tensors[name]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match="missing tensors: model.layers.0.mlp.up_proj.weight"):
        ModelRig(str(path), kernels="torch")
