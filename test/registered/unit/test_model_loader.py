"""Checkpoint names, cuts and completeness (known faults F110 to F112)."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.kernels.ops.cpu import library
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_loader.checkpoint_files import SafetensorsFile, tensor_files
from sglang.srt.model_loader.fp8 import dequantize
from sglang.srt.model_loader.loader import load_weights, normalise_name
from sglang.test.checkpoints import TinyGeometry
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.make_checkpoint import make_checkpoint
from sglang.test.model_rig import ModelRig, random_tokens

register_cpu_ci(est_time=60, suite="unit")


@pytest.fixture(autouse=True)
def restore_kernels():
    yield
    library.select("auto")


def logits(path, *, kernels: str = "native") -> torch.Tensor:
    rig = ModelRig(str(path), kernels=kernels)
    return rig.run(ForwardMode.EXTEND, [random_tokens(rig.config, 12, seed=0)], [0]).logits


def edit(path, change) -> None:
    """Apply ``change(tensors)`` to a single-file checkpoint."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    out = tmp_path_factory.mktemp("dense") / "plain"
    return make_checkpoint(out, arch="qwen3_5", dtype="fp32", seed=2)


@pytest.mark.parametrize(
    "options",
    [{"wrapper": True}, {"shards": 3}, {"shards": 4, "wrapper": True}],
    ids=["wrapper", "shards", "both"],
)
def test_layout_of_the_files_does_not_matter(options, dense, tmp_path):
    """A prefix or shard that is read differently changes the logits."""
    other = make_checkpoint(tmp_path / "other", arch="qwen3_5", dtype="fp32", seed=2, **options)
    assert torch.equal(logits(dense), logits(other))


@pytest.mark.parametrize("arch", ["qwen3_5_moe", "qwen3_next"])
def test_both_expert_layouts_give_the_same_model(arch, tmp_path):
    outs = [
        logits(make_checkpoint(tmp_path / layout, arch=arch, dtype="fp32", moe_layout=layout))
        for layout in ("fused", "per-expert")
    ]
    assert torch.equal(*outs)


@pytest.mark.parametrize("scale_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("arch", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_fp8_equals_the_dequantised_checkpoint(arch, scale_dtype, tmp_path):
    """A scale on the wrong block, or a module taken for unquantised (F112)."""
    path = make_checkpoint(tmp_path / "fp8", arch=arch, dtype="fp8", scale_dtype=scale_dtype)
    plain = tmp_path / "plain"
    shutil.copytree(path, plain)

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.endswith("_scale_inv")]:
            scale = tensors.pop(name).float()
            weight = tensors[name.removesuffix("_scale_inv")]
            grid = scale.repeat_interleave(128, 0)[: weight.shape[0]]
            grid = grid.repeat_interleave(128, 1)[:, : weight.shape[1]]
            tensors[name.removesuffix("_scale_inv")] = weight.float() * grid

    edit(plain, widen)
    assert torch.equal(logits(path), logits(plain))


def test_quantization_is_read_from_the_tensors_not_from_the_list(tmp_path):
    """A pack without any ignore list, and one whose list claims too much, load alike (F112)."""
    path = make_checkpoint(tmp_path / "fp8", arch="qwen3_5", dtype="fp8")
    want = logits(path)
    config_file = path / "config.json"
    for listed in ([], ["mlp.gate", "self_attn.q_proj"]):
        config = json.loads(config_file.read_text())
        config["quantization_config"]["modules_to_not_convert"] = listed
        config_file.write_text(json.dumps(config))
        assert torch.equal(logits(path), want)


def test_fp8_without_scale_is_an_error(tmp_path):
    """A silent cast would give weights that are off by the scale."""
    path = make_checkpoint(tmp_path / "fp8", arch="qwen3_5", dtype="fp8")
    name = "model.layers.0.mlp.up_proj.weight"
    edit(path, lambda tensors: tensors.pop(name + "_scale_inv"))
    with pytest.raises(ValueError, match=r"up_proj.weight is float8 but .*_scale_inv is missing"):
        logits(path)


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_fill_the_same_model_and_report_what_fails(workers, tmp_path):
    """A handle shared by two workers, a slot filled twice, or an error that stays in its thread."""
    path = make_checkpoint(tmp_path / "m", arch="qwen3_5_moe", dtype="fp8", shards=5)
    rig = ModelRig(str(path), kernels="torch")
    want = {name: p.clone() for name, p in rig.model.named_parameters()}
    for parameter in rig.model.parameters():
        parameter.fill_(7)
    load_weights(rig.model, str(path), num_workers=workers)
    for name, parameter in rig.model.named_parameters():
        assert torch.equal(parameter, want[name]), name
    file = sorted(path.glob("*.safetensors"))[3]
    tensors = load_file(file)
    name = next(n for n in tensors if n.endswith("weight") and tensors[n].dim() == 2)
    save_file(tensors | {name: torch.zeros(3, 5)}, file)
    with pytest.raises(ValueError, match=r"has shape \(3, 5\)|has dtype|not float8"):
        load_weights(rig.model, str(path), num_workers=workers)


def test_scale_of_wrong_shape_is_an_error():
    weight = torch.zeros(256, 200).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"need \(2, 2\)"):
        dequantize(weight, torch.ones(2, 1), (128, 128), name="x.weight")


def test_missing_and_unknown_tensors_stop_the_load_by_name(dense, tmp_path):
    """F111: a checkpoint that does not fit must not run with whatever memory held."""
    path = tmp_path / "broken"
    shutil.copytree(dense, path)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.extra_proj.weight"] = torch.zeros(2)
        del tensors["model.layers.2.linear_attn.A_log"]

    edit(path, change)
    with pytest.raises(ValueError) as caught:
        logits(path)
    assert "model.layers.2.linear_attn.A_log" in str(caught.value)
    assert "model.layers.1.mlp.extra_proj.weight" in str(caught.value)


def test_written_list_of_unused_tensors_is_accepted(dense, tmp_path):
    path = tmp_path / "extras"
    shutil.copytree(dense, path)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.3.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
        tensors["model.layers.3.self_attn.k_proj.k_scale"] = torch.ones(1)
        tensors["model.visual.patch_embed.weight"] = torch.zeros(3)

    edit(path, change)
    assert torch.equal(logits(path), logits(dense))


def test_skipped_vision_tensors_are_logged(dense, tmp_path, caplog):
    path = tmp_path / "vision"
    shutil.copytree(dense, path)
    edit(path, lambda tensors: tensors.update({"visual.blocks.0.weight": torch.zeros(3)}))
    with caplog.at_level(logging.INFO):
        logits(path)
    assert "Skipped 1 vision tensors" in caplog.text


def test_partial_expert_set_names_the_missing_expert(tmp_path):
    """With one expert of the per-expert layout lost, the fused names are not asked for."""
    path = make_checkpoint(tmp_path / "moe", arch="qwen3_5_moe", moe_layout="per-expert")
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    edit(path, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError) as caught:
        logits(path)
    assert "1 missing tensors" in str(caught.value) and name in str(caught.value)


def test_wrong_shape_is_an_error(dense, tmp_path):
    path = tmp_path / "shape"
    shutil.copytree(dense, path)
    edit(path, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}))
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \(3,\)"):
        logits(path)


def test_tied_checkpoint_ignores_a_head_that_is_there(tmp_path):
    """models.md 3.1: a tied checkpoint may carry an lm_head all the same."""
    path = make_checkpoint(tmp_path / "tied", arch="qwen3_5", dtype="fp32", tie=True)
    want = logits(path)
    size = load_file(path / "model.safetensors")["model.embed_tokens.weight"].shape
    edit(path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(size)}))
    assert torch.equal(logits(path), want)


def test_qwen3_next_projections_are_cut_per_part(tmp_path):
    """F110: weights that encode their own row end up as q | k | v | z and b | a, head by head."""
    path = make_checkpoint(tmp_path / "next", arch="qwen3_next", dtype="fp32")

    def number_rows(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("in_proj_qkvz", "in_proj_ba"):
            weight = tensors[f"model.layers.0.linear_attn.{name}.weight"]
            weight[:] = torch.arange(weight.shape[0], dtype=weight.dtype)[:, None]

    edit(path, number_rows)
    mixer = ModelRig(str(path), kernels="torch").model.layers[0].mixer
    c = ModelRig(str(path), kernels="torch").config
    groups, k, v = c.linear_num_key_heads, c.linear_key_head_dim, c.linear_value_head_dim
    per_group = c.linear_num_value_heads // groups
    width = 2 * k + 2 * per_group * v
    starts = torch.arange(groups)[:, None] * width

    def rows(offset: int, count: int) -> torch.Tensor:
        return (starts + offset + torch.arange(count)).flatten()

    qkvz = [rows(0, k), rows(k, k), rows(2 * k, per_group * v)]
    qkvz.append(rows(2 * k + per_group * v, per_group * v))
    ba_starts = torch.arange(groups)[:, None] * 2 * per_group
    b = (ba_starts + torch.arange(per_group)).flatten()
    want = torch.cat([*qkvz, b, b + per_group]).float()
    assert torch.equal(mixer.in_proj.weight[:, 0], want)
    assert torch.equal(mixer.in_proj.weight[:, -1], want)


def test_dense_projections_are_cut_per_part(dense, tmp_path):
    """F110 for the separate layout: q, k, v of attention and gate, up of the MLP."""
    path = tmp_path / "numbered"
    shutil.copytree(dense, path)

    def number_parts(tensors: dict[str, torch.Tensor]) -> None:
        parts = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "in_proj_qkv", "in_proj_z")
        for i, part in enumerate((*parts, "in_proj_b", "in_proj_a")):
            for name in [n for n in tensors if n.endswith(f".{part}.weight")]:
                tensors[name].fill_(i)

    edit(path, number_parts)
    rig = ModelRig(str(path), kernels="torch")
    attention, gdn = rig.model.layers[3], rig.model.layers[0]

    def runs(weight: torch.Tensor) -> list[tuple[int, int]]:
        values, counts = torch.unique_consecutive(weight[:, 0].long(), return_counts=True)
        return list(zip(values.tolist(), counts.tolist()))

    c = rig.config
    kv_rows = c.num_key_value_heads * c.head_dim
    q_rows = 2 * c.num_attention_heads * c.head_dim
    assert runs(attention.mixer.qkv_proj.weight) == [(0, q_rows), (1, kv_rows), (2, kv_rows)]
    assert runs(gdn.mlp.gate_up.weight) == [(3, c.intermediate_size), (4, c.intermediate_size)]
    heads = c.linear_num_value_heads
    want = [(5, c.conv_dim), (6, c.value_dim), (7, heads), (8, heads)]
    assert runs(gdn.mixer.in_proj.weight) == want


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.norm.weight", "model.norm.weight"),
        ("mtp.fc.weight", "mtp.fc.weight"),
        ("visual.blocks.0.weight", "model.visual.blocks.0.weight"),
    ],
)
def test_normalise_name(name, want):
    assert normalise_name(name) == want


def test_reader_agrees_with_the_library(dense):
    """Own reader against safetensors, tensor by tensor."""
    want = load_file(dense / "model.safetensors")
    with SafetensorsFile(dense / "model.safetensors") as file:
        assert sorted(file.names) == sorted(want)
        for name in file.names:
            assert torch.equal(file.read(name), want[name])


def test_incomplete_files_are_errors(dense, tmp_path):
    sharded = make_checkpoint(tmp_path / "sharded", arch="qwen3_5", shards=2)
    sorted(sharded.glob("*.safetensors"))[0].unlink()
    with pytest.raises(FileNotFoundError, match="finish the download"):
        tensor_files(str(sharded))
    with pytest.raises(FileNotFoundError, match="pass a checkpoint directory"):
        tensor_files(str(tmp_path))
    cut = tmp_path / "cut"
    shutil.copytree(dense, cut)
    file = cut / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="download is incomplete"):
        logits(cut)


MEMORY_PROBE = """
import sys, torch
from pathlib import Path
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader import loader
from sglang.srt.models.hybrid_gdn import HybridGDNForCausalLM

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

class Unfinished(HybridGDNForCausalLM):
    def finish_loading(self):
        pass

config = ModelConfig.from_path(sys.argv[1])
model = Unfinished(config, device=torch.device("cpu"), dtype=torch.float32, attn_backend=None)
torch.ones(64, 64) @ torch.ones(64, 64)
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
loader.load_weights(model, sys.argv[1])
print(status("VmHWM") - before, sum(p.numel() * p.element_size() for p in model.parameters()))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux' /proc")
def test_peak_memory_of_a_load_is_the_weights_and_one_tensor(tmp_path):
    """A second copy of the weights, or mapped files that stay resident, would double the peak."""
    geometry = TinyGeometry(vocab_size=8192, hidden_size=512, num_hidden_layers=8)
    path = make_checkpoint(
        tmp_path / "m", arch="qwen3_5", dtype="fp32", mtp=False, geometry=geometry
    )
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_PROBE, str(path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    grown, weights = map(int, done.stdout.split())
    assert weights > 40e6
    assert grown < 1.25 * weights + 20e6, (grown, weights)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
