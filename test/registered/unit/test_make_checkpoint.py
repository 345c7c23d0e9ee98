"""Tiny random checkpoints: real names and shapes, agreeing layouts, errors that say what to do."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from sglang.test.checkpoints.quantize import dequantize_blockwise, quantize_blockwise
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.make_checkpoint import (
    CheckpointError,
    default_geometry,
    main,
    make_checkpoint,
)

register_cpu_ci(est_time=20, suite="unit")

TEXT_CLASSES = {
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    index_path = directory / "model.safetensors.index.json"
    if not index_path.exists():
        return load_file(directory / "model.safetensors")
    weight_map = json.loads(index_path.read_text())["weight_map"]
    merged: dict[str, torch.Tensor] = {}
    for file_name in sorted(set(weight_map.values())):
        part = load_file(directory / file_name)
        assert {weight_map[name] for name in part} == {file_name}
        merged |= part
    assert set(merged) == set(weight_map)
    return merged


@pytest.mark.parametrize("arch", TEXT_CLASSES)
def test_transformers_loads_bf16(arch: str, tmp_path: Path) -> None:
    """Catches a misspelt tensor name or a shape that the family's reference classes reject."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    path = make_checkpoint(tmp_path / "m", arch=arch, seed=1)
    model, info = getattr(transformers, TEXT_CLASSES[arch]).from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"], info["missing_keys"]
    assert not info["mismatched_keys"]
    unexpected = {key for key in info["unexpected_keys"] if not key.startswith("mtp.")}
    assert not unexpected
    with torch.no_grad():
        logits = model(torch.arange(1, 9)[None]).logits
    assert logits.shape == (1, 8, 4096)
    assert torch.isfinite(logits).all()
    assert logits.std() > 0.1  # weights of a degenerate scale would make every test vacuous


@pytest.mark.parametrize("arch", ["qwen3_5_moe", "qwen3_next"])
def test_expert_layouts_hold_the_same_weights(arch: str, tmp_path: Path) -> None:
    """Catches gate and up swapped, or an expert axis cut in the wrong place."""
    fused = _tensors(make_checkpoint(tmp_path / "f", arch=arch, seed=3, moe_layout="fused"))
    split = _tensors(make_checkpoint(tmp_path / "s", arch=arch, seed=3, moe_layout="per-expert"))
    stem = "model.layers.1.mlp.experts"
    for expert in range(8):
        gate = split[f"{stem}.{expert}.gate_proj.weight"]
        up = split[f"{stem}.{expert}.up_proj.weight"]
        assert torch.equal(torch.cat([gate, up]), fused[f"{stem}.gate_up_proj"][expert])
        assert not torch.equal(torch.cat([up, gate]), fused[f"{stem}.gate_up_proj"][expert])
        down = split[f"{stem}.{expert}.down_proj.weight"]
        assert torch.equal(down, fused[f"{stem}.down_proj"][expert])
    shared = set(fused) & set(split)
    assert all(torch.equal(fused[name], split[name]) for name in shared)


def test_shards_and_wrapper_change_the_files_only(tmp_path: Path) -> None:
    """Catches an index that misses a tensor, an empty shard, and values that depend on naming."""
    plain = _tensors(make_checkpoint(tmp_path / "p", seed=5))
    sharded_path = make_checkpoint(tmp_path / "s", seed=5, shards=5)
    assert len(list(sharded_path.glob("*.safetensors"))) == 5
    sharded = _tensors(sharded_path)
    assert plain.keys() == sharded.keys()
    assert all(torch.equal(plain[name], sharded[name]) for name in plain)
    wrapped_path = make_checkpoint(tmp_path / "w", seed=5, wrapper=True)
    wrapped = {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in _tensors(wrapped_path).items()
        if not name.startswith("model.visual.")
    }
    assert plain.keys() == wrapped.keys()
    assert all(torch.equal(plain[name], wrapped[name]) for name in plain)
    config = json.loads((wrapped_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert config["text_config"]["model_type"] == "qwen3_5_text"
    other = _tensors(make_checkpoint(tmp_path / "o", seed=6))
    assert not torch.equal(plain["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize("arch", TEXT_CLASSES)
def test_fp8_scales_have_the_block_shape(arch: str, tmp_path: Path) -> None:
    """Catches an FP8 matrix without scale, a scale of the wrong shape, and a quantised router."""
    tensors = _tensors(make_checkpoint(tmp_path / "q", arch=arch, dtype="fp8", seed=2))
    exact = _tensors(
        make_checkpoint(
            tmp_path / "e", arch=arch, dtype="fp32", seed=2, moe_layout="per-expert",
            geometry=default_geometry("fp8"),
        )
    )  # fmt: skip
    quantised = [name for name, value in tensors.items() if value.dtype == torch.float8_e4m3fn]
    assert any("mtp.layers.0" in name for name in quantised)
    assert not any(
        part in name
        for name in quantised
        for part in ("mlp.gate.", "shared_expert_gate", "in_proj_b", "in_proj_a", "mtp.fc", "embed")
    )
    for name in quantised:
        weight = tensors[name]
        scale = tensors[name.removesuffix("weight") + "weight_scale_inv"]
        assert scale.dtype == torch.bfloat16
        assert scale.shape == tuple(-(-size // 128) for size in weight.shape)
        restored = dequantize_blockwise(weight, scale)
        error = (restored - exact[name]).norm() / exact[name].norm()
        assert error < 0.04, (name, error)
    assert {n for n in tensors if not n.endswith("weight_scale_inv")} == set(exact)


def test_quantize_uses_one_scale_per_block() -> None:
    """Catches transposed block indices: one large block must not coarsen its neighbours."""
    weight = torch.full((130, 260), 0.01)
    weight[:128, 128:256] *= 1000
    quantised, scale = quantize_blockwise(weight, torch.float32)
    assert scale.shape == (2, 3)
    assert scale.argmax() == 1
    assert torch.allclose(dequantize_blockwise(quantised, scale), weight, rtol=1e-6)


def test_bytes_do_not_depend_on_the_run(tmp_path: Path) -> None:
    """Catches a seed that is ignored."""
    first = make_checkpoint(tmp_path / "a", arch="qwen3_next", seed=9)
    second = make_checkpoint(tmp_path / "b", arch="qwen3_next", seed=9)
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes(), file.name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"arch": "llama"}, "arch must be one of"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"arch": "qwen3_next", "wrapper": True}, "wrapper does not exist for qwen3_next"),
        ({"arch": "qwen3_5_moe", "dtype": "fp8", "moe_layout": "fused"}, "use per-expert"),
        ({"shards": 0}, "shards must be at least 1"),
        ({"shards": 5000}, "there are only"),
    ],
)
def test_impossible_requests_name_the_field(options: dict, words: str, tmp_path: Path) -> None:
    """Catches a half-written directory after an error, and an error without the way out."""
    with pytest.raises(CheckpointError, match=words):
        make_checkpoint(tmp_path / "m", **options)
    assert not list(tmp_path.iterdir())


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches flags that never reach the writer, and an existing directory that is overwritten."""
    out = tmp_path / "m"
    arguments = ["--arch", "qwen3_5", "--fp8", "--no-mtp", "--tie", "--seed", "4", str(out)]
    assert main(arguments) == 0
    with safe_open(out / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert not any(name.startswith(("mtp.", "lm_head")) for name in names)
    config = json.loads((out / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["mtp_num_hidden_layers"] == 0
    capsys.readouterr()
    assert main(arguments) == 2
    assert "exists" in capsys.readouterr().err
    assert main([*arguments, "--overwrite"]) == 0


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_overwrite_replaces_checkpoints_only(kind: str, tmp_path: Path) -> None:
    """Catches somebody's folder that a mistyped path deletes."""
    target = tmp_path / "papers"
    file = target if kind == "file" else target / "thesis.txt"
    file.parent.mkdir(exist_ok=True)
    file.write_text("years of work")
    with pytest.raises(CheckpointError, match="is not a checkpoint and is kept"):
        make_checkpoint(target, overwrite=True)
    assert file.read_text() == "years of work"
    assert list(tmp_path.iterdir()) == [target]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
