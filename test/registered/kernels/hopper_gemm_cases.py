"""Checks of the Hopper kernel of FP8 products on a GPU of compute capability 9.0; run by test_fp8_kernels.py."""

from __future__ import annotations

import pytest
import torch

from sglang.kernels.ops.moe import launch as expert_launch
from sglang.kernels.ops.moe.experts import ExpertRows, grouped_gated, grouped_linear
from sglang.kernels.ops.moe.sort import order_by_expert
from sglang.kernels.ops.quantization.fp8 import (
    block_scaled_gated,
    block_scaled_linear,
    quantize,
)
from sglang.kernels.ops.quantization.launch import GemmTile, HopperTile
from sglang.kernels.ops.quantization.rows import FP8_DTYPE, QuantizedRows

DEVICE = torch.device("cuda")
HOPPER = pytest.mark.parametrize("tile", [HopperTile(), HopperTile(3, 2)], ids=["table", "other"])
OTHER = GemmTile(64, 256, 8, 3, parts=2)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, generator=generator)


def weight_of(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of very different scale."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    weight = torch.randn(shape, device=DEVICE, generator=generator).mul(96).to(FP8_DTYPE)
    grid = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    return weight, torch.rand(grid, device=DEVICE, generator=generator).exp2_()


def same_rows(one: QuantizedRows, other: QuantizedRows, rows: torch.Tensor) -> bool:
    values = torch.equal(one.values.view(torch.uint8)[rows], other.values.view(torch.uint8)[rows])
    return values and torch.equal(one.scale[rows], other.scale[rows])


@HOPPER
@pytest.mark.parametrize("rows", [1, 64, 65, 128, 300, 4097])
@pytest.mark.parametrize(("columns", "depth"), [(256, 128), (768, 384), (5120, 2048)])
def test_product_has_the_bits_of_the_other_kernel(tile, rows, columns, depth):
    """A lost stage, a half in the other's place, the scale of another block, a row beyond the last."""
    x, weight = draw(rows, depth), weight_of(columns, depth)
    want = block_scaled_linear(x, *weight, tile=OTHER)
    got = block_scaled_linear(x, *weight, tile=tile)
    assert torch.equal(got, want)
    assert not torch.equal(block_scaled_linear(x.flip(1), *weight, tile=tile), want)


@HOPPER
@pytest.mark.parametrize("rows", [1, 130, 1000])
def test_gated_product_has_the_bits_of_the_other_kernel(tile, rows):
    x, weight = draw(rows, 512) * 0.02, weight_of(2 * 384, 512)
    want = block_scaled_gated(x, *weight, tile=OTHER)
    assert same_rows(block_scaled_gated(x, *weight, tile=tile), want, torch.arange(rows))


def order(chosen: torch.Tensor, block_m: int, experts: int, shared: bool) -> ExpertRows:
    rows, top_k = chosen.shape
    made = order_by_expert(chosen, experts, block_m)
    return ExpertRows(made, rows * top_k, top_k, rows if shared else 0)


@HOPPER
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("rows", [1, 40, 200, 2000])
def test_experts_have_the_bits_of_the_other_kernel(tile, rows, shared):
    """Rows gathered for another pair, an expert's rows past its own, a half of padding that is not let go."""
    experts, top_k, size, inner = 24, 3, 512, 256
    chosen = torch.rand(rows, experts, device=DEVICE).topk(top_k).indices.int()
    chosen[::5, 1] = -1
    gate_up, down = (
        weight_of(experts + shared, *shape) for shape in ((2 * inner, size), (size, inner))
    )
    x = quantize(draw(rows, size) * 0.02)
    own = order(chosen, tile.block_m, experts, shared)
    other = order(chosen, 64, experts, shared)
    live = torch.cat([(chosen >= 0).flatten(), torch.ones(rows * shared, device=DEVICE).bool()])
    up = expert_launch.ExpertTile(64, 256, 128, 8, 3, False, parts=2)
    want = grouped_gated(x, *gate_up, other, up)
    assert same_rows(grouped_gated(x, *gate_up, own, tile), want, live)
    two = expert_launch.ExpertTile(64, 128, 128, 4, 3, False)
    inner_rows = quantize(draw(own.num_results, inner, seed=3))
    want = grouped_linear(inner_rows, *down, other, two, x_by_pair=True)
    got = grouped_linear(inner_rows, *down, own, tile, x_by_pair=True)
    assert torch.equal(got[live], want[live])


def test_results_repeat():
    """A stage that is read before it is full, or filled before it was read."""
    x, weight = quantize(draw(8192, 2048)), weight_of(2048, 2048)
    want = block_scaled_linear(x, *weight, tile=HopperTile())
    for _ in range(20):
        assert torch.equal(block_scaled_linear(x, *weight, tile=HopperTile()), want)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
