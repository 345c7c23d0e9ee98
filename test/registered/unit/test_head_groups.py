"""F109: every part of a GDN layer falls into key-head groups that know nothing of each other.

Tensor parallelism stands on that. This build serves one device (``--tp-size`` above 1 is refused), so ranks
are played here by models of half the heads, whose checkpoints are cut from the whole one as a rank would cut
it: their outputs must add up, and their states be the whole state's parts.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang.kernels.ops.cpu import library
from sglang.kernels.ops.quantization.rows import NormedRows
from sglang.srt.configs.mamba_utils import mamba_cache_params
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.weight_sizes import block_weights
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.make_checkpoint import make_checkpoint
from sglang.test.model_rig import ModelRig

register_cpu_ci(est_time=8, suite="unit")

RANKS = 2
ARCHITECTURES = pytest.mark.parametrize("arch", ["qwen3_5", "qwen3_next"])
TOLERANCE = 2e-5


@pytest.fixture(autouse=True)
def restore_kernels():
    yield
    library.select("auto")


def part(tensor: Tensor, rank: int, dim: int = 0) -> Tensor:
    return tensor.chunk(RANKS, dim)[rank]


def parts_of(tensor: Tensor, config: ModelConfig, rank: int) -> Tensor:
    """Of rows q | k | v, the rank's rows of each."""
    rows = (config.key_dim, config.key_dim, config.value_dim)
    return torch.cat([part(own, rank) for own in tensor.split(rows)])


def cut(name: str, tensor: Tensor, config: ModelConfig, rank: int) -> Tensor:
    """A rank's share of one tensor of a GDN layer; key-head groups and their value heads are contiguous."""
    leaf = name.partition("linear_attn.")[2]
    if leaf in ("in_proj_qkv.weight", "conv1d.weight"):
        return parts_of(tensor, config, rank)
    if leaf == "out_proj.weight":
        return part(tensor, rank, 1)
    return tensor if leaf == "norm.weight" else part(tensor, rank)


def write_rank(whole: Path, out: Path, rank: int, cut_tensor=cut) -> str:
    config = ModelConfig.from_path(str(whole))
    shutil.copytree(whole, out)
    raw = json.loads((out / "config.json").read_text())
    for key in ("linear_num_key_heads", "linear_num_value_heads"):
        raw[key] //= RANKS
    (out / "config.json").write_text(json.dumps(raw))
    tensors = load_file(out / "model.safetensors")
    for name in [name for name in tensors if ".linear_attn." in name]:
        tensors[name] = cut_tensor(name, tensors[name], config, rank).contiguous()
    save_file(tensors, out / "model.safetensors")
    return str(out)


def run_layer(path: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """Outputs of layer 0's mixer over prompts, decode, a verify and what it leaves; then its states."""
    rig = ModelRig(path, kernels="torch", num_requests=2, num_draft=3, lossless=True)
    mixer = rig.model.layers[0].mixer
    generator = torch.Generator().manual_seed(5)
    outputs: list[Tensor] = []

    def call(mode: ForwardMode, lengths: list[int], prefix: list[int]) -> None:
        fb = rig.batch(mode, [[1] * length for length in lengths], prefix)
        rig.backend.init_forward_metadata(fb)
        x = torch.randn(sum(lengths), rig.config.hidden_size, generator=generator)
        outputs.append(mixer(NormedRows(x, None), fb, rig.backend))

    call(ForwardMode.EXTEND, [13, 70], [0, 0])
    call(ForwardMode.EXTEND, [2, 5], [13, 70])
    call(ForwardMode.DECODE, [1, 1], [15, 75])
    call(ForwardMode.TARGET_VERIFY, [3, 3], [16, 76])
    rig.commit([2, 0])
    call(ForwardMode.DECODE, [1, 1], [19, 77])
    cache = rig.req_pool.mamba_pool.mamba_cache
    return outputs, cache.conv[0][0, 1:3].clone(), cache.temporal[0, 1:3].clone()


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


@ARCHITECTURES
def test_ranks_add_up_and_hold_the_states_parts(arch, tmp_path):
    """A projection, window, gate or norm that reaches over a group; a cut through the middle of one."""
    whole = make_checkpoint(tmp_path / "whole", arch=arch, dtype="fp32", seed=2)
    config = ModelConfig.from_path(str(whole))
    outputs, conv, temporal = run_layer(str(whole))
    ranks = [run_layer(write_rank(whole, tmp_path / f"rank{r}", r)) for r in range(RANKS)]
    for call, want in enumerate(outputs):
        assert relative_error(sum(rank[0][call] for rank in ranks), want) < TOLERANCE, call
    for rank, (_, own_conv, own_temporal) in enumerate(ranks):
        want_conv = torch.stack([parts_of(window, config, rank) for window in conv])
        assert relative_error(own_conv, want_conv) < TOLERANCE
        assert relative_error(own_temporal, part(temporal, rank, 1)) < TOLERANCE


@ARCHITECTURES
def test_a_cut_through_the_parts_is_seen(arch, tmp_path):
    """The control: windows cut in halves, as if q, k and v were one part."""

    def straight(name: str, tensor: Tensor, config: ModelConfig, rank: int) -> Tensor:
        return part(tensor, rank) if "conv1d" in name else cut(name, tensor, config, rank)

    whole = make_checkpoint(tmp_path / "whole", arch=arch, dtype="fp32", seed=2)
    want = run_layer(str(whole))[0][0]
    paths = [write_rank(whole, tmp_path / f"rank{r}", r, straight) for r in range(RANKS)]
    assert relative_error(sum(run_layer(path)[0][0] for path in paths), want) > 0.05


@ARCHITECTURES
def test_planned_shapes_of_a_rank_are_those_of_its_layers(arch, tmp_path):
    """State and weights that a plan for two ranks counts must be what a rank's layer has."""
    whole = make_checkpoint(tmp_path / "whole", arch=arch, dtype="fp32", seed=2)
    config = ModelConfig.from_path(str(whole))
    rank = ModelConfig.from_path(write_rank(whole, tmp_path / "rank0", 0))
    planned, own = mamba_cache_params(config, tp_size=RANKS).shape, mamba_cache_params(rank).shape
    assert (planned.conv, planned.temporal) == (own.conv, own.temporal)
    assert planned.num_k_heads_per_tp == own.num_k_heads_per_tp
    assert planned.temporal != mamba_cache_params(config).shape.temporal

    def gdn_shapes(config: ModelConfig, tp_size: int) -> dict[str, tuple[int, ...]]:
        weights = block_weights(config, 0, tp_size=tp_size)
        return {w.name: tuple(w.shape) for w in weights if ".linear_attn." in w.name}

    assert gdn_shapes(config, RANKS) == gdn_shapes(rank, 1) != gdn_shapes(config, 1)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
