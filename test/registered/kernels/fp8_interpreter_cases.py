"""Checks of the FP8 kernels; run by test_fp8_kernels.py in Triton's interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang.kernels import triton_support
from sglang.kernels.ops.fused.rows import silu_mul_quantized
from sglang.kernels.ops.quantization import launch
from sglang.kernels.ops.quantization.fp8 import (
    block_scaled_gated,
    block_scaled_linear,
    block_scaled_split,
    quantize,
    quantize_activations,
)
from sglang.kernels.ops.quantization.rows import num_groups
from sglang.test.checkpoints.quantize import dequantize_blockwise, quantize_blockwise
from sglang.test.fp8_reference import (
    dequantize_activations,
    quantize_activations_reference,
)

DEVICE = torch.device("cpu" if triton_support.INTERPRETING else "cuda")
TILES = {
    "plain": launch.GemmTile(block_m=16, block_n=32, num_warps=4, num_stages=2),
    "weights first": launch.GemmTile(16, 64, 4, 2, weights_first=True, scales_ahead=True),
    "parts": launch.GemmTile(64, 256, 4, 2, parts=2, group_m=1),
    "descriptors": launch.GemmTile(64, 128, 4, 2, parts=2, group_m=2, descriptors=True),
}
EVERY_TILE = pytest.mark.parametrize("tile", list(TILES.values()), ids=list(TILES))


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def product_reference(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """From the kernel's own quantised rows, which another test compares with the reference's."""
    rounded = dequantize_activations(*(t.cpu() for t in quantize_activations(x.to(DEVICE))))
    return rounded @ dequantize_blockwise(weight, scale).t()


def weight_of(rows: int, columns: int):
    weight = draw(rows, columns, seed=1)
    weight[:, : columns // 2] *= 30  # blocks of very different size show a scale of the wrong block
    return quantize_blockwise(weight, torch.float32)


@pytest.mark.parametrize("columns", [128, 200, 1100])
def test_quantised_rows_agree_with_the_reference(columns):
    """Wrong group, wrong stride, or a scale that is not max / 448."""
    wide = draw(5, columns + 24)
    wide[2, :128] = 0.0
    wide[3] *= 1e4
    x = wide[:, :columns].to(DEVICE)
    q, scale = quantize_activations(x)
    want_q, want_scale = quantize_activations_reference(wide[:, :columns])
    assert torch.equal(scale.cpu(), want_scale)
    assert torch.equal(q.cpu().float(), want_q.float())
    assert scale[2, 0] == 1.0 and not q[2, :128].float().any()
    error = (dequantize_activations(want_q, want_scale) - wide[:, :columns]).abs()
    assert (error <= wide[:, :columns].abs() / 16 + want_scale.amax(1, keepdim=True) / 512).all()


@pytest.mark.parametrize(
    ("rows", "columns", "depth"), [(3, 64, 256), (70, 270, 384), (2, 130, 200)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@EVERY_TILE
def test_product_agrees_with_the_reference(rows, columns, depth, dtype, tile):
    """Scale of a neighbouring block or part, a lost remainder of M, N or K, a tile in another's place."""
    weight, scale = weight_of(columns, depth)
    x = draw(rows, depth).to(dtype)
    got = block_scaled_linear(x.to(DEVICE), weight.to(DEVICE), scale.to(DEVICE), tile=tile).cpu()
    want = product_reference(x, weight, scale)
    assert got.dtype == dtype
    bound = 1e-5 if dtype == torch.float32 and triton_support.INTERPRETING else 8e-3
    assert ((got.float() - want).norm() / want.norm()) < bound
    shifted = product_reference(x, weight, scale.roll(1, 1))
    assert ((shifted - want).norm() / want.norm()) > 0.05


@EVERY_TILE
def test_a_row_does_not_depend_on_its_batch(tile):
    """Split sums, or a tile chosen by the number of rows within one table."""
    weight, scale = (t.to(DEVICE) for t in weight_of(64, 256))
    x = draw(19, 256).to(DEVICE, torch.bfloat16)
    together = block_scaled_linear(x, weight, scale, tile=tile)
    for row in (0, 7, 18):
        assert torch.equal(
            block_scaled_linear(x[row : row + 1], weight, scale, tile=tile)[0], together[row]
        )
    poisoned = x.clone()
    poisoned[7] = float("nan")
    got = block_scaled_linear(poisoned, weight, scale, tile=tile)
    kept = [row for row in range(19) if row != 7]
    assert torch.equal(got[kept], together[kept]) and not torch.equal(got[7], together[7])


@EVERY_TILE
def test_rows_quantised_before_give_the_same_product(tile):
    weight, scale = (t.to(DEVICE) for t in weight_of(64, 256))
    x = draw(5, 256).to(DEVICE, torch.bfloat16)
    want = block_scaled_linear(x, weight, scale, tile=tile)
    assert torch.equal(block_scaled_linear(quantize(x), weight, scale, tile=tile), want)
    assert not torch.equal(block_scaled_linear(quantize(x.flip(0)), weight, scale, tile=tile), want)


@EVERY_TILE
@pytest.mark.parametrize(("splits", "depth"), [(2, 384), (3, 200)])
def test_split_sums_add_up_to_the_product(tile, splits, depth):
    """A block of K in two ranges or in none, a range that is empty, a part in another's place."""
    weight, scale = weight_of(140, depth)
    x = draw(20, depth)
    tile = replace(tile, splits=splits)
    parts = block_scaled_split(x.to(DEVICE), weight.to(DEVICE), scale.to(DEVICE), tile=tile).cpu()
    want = product_reference(x, weight, scale)
    bound = 1e-5 if triton_support.INTERPRETING else 8e-3
    assert parts.shape == (splits, 20, 140)
    assert ((parts.sum(0) - want).norm() / want.norm()) < bound
    share = -(-num_groups(depth) // splits) * 128
    first = product_reference(x[:, :share], weight[:, :share], scale[:, : share // 128])
    assert ((parts[0] - first).norm() / first.norm()) < bound
    assert ((parts[1] - first).norm() / first.norm()) > 0.05
    with pytest.raises(ValueError, match="cannot fill a result"):
        block_scaled_linear(x.to(DEVICE), weight.to(DEVICE), scale.to(DEVICE), tile=tile)


def test_a_part_wider_than_its_scale_is_refused():
    """Columns 128 and on scaled as columns 0 to 127: wrong by a quarter, and no error."""
    weight, scale = weight_of(256, 128)
    tile = replace(launch.dense_tile(1, 128), block_n=256, parts=1)
    with pytest.raises(ValueError, match="must divide a scale block"):
        block_scaled_linear(draw(4, 128).to(DEVICE), weight.to(DEVICE), scale.to(DEVICE), tile=tile)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["parts", "descriptors"])
def test_gating_inside_the_product_gives_the_bits_of_three_launches(name, dtype):
    """Gate and up exchanged, a scale of the other half, a product that is not rounded before the gate."""
    tile = replace(TILES[name], block_n=256)
    weight, scale = (t.to(DEVICE) for t in weight_of(768, 256))
    x = draw(70, 256).to(DEVICE, dtype)
    got = block_scaled_gated(x, weight, scale, tile=tile)
    want = silu_mul_quantized(block_scaled_linear(x, weight, scale, tile=tile))
    assert torch.equal(got.values.view(torch.uint8), want.values.view(torch.uint8))
    assert torch.equal(got.scale, want.scale) and got.dtype == dtype
    turned = torch.cat([weight[384:], weight[:384]])
    assert not torch.equal(block_scaled_gated(x, turned, scale, tile=tile).scale, want.scale)
    with pytest.raises(ValueError, match="halves of 192 rows share a scale block"):
        block_scaled_gated(x, weight[:384], scale[:3], tile=tile)


def test_no_rows_and_wrong_scales():
    weight, scale = (t.to(DEVICE) for t in weight_of(64, 256))
    assert block_scaled_linear(draw(0, 256).to(DEVICE), weight, scale).shape == (0, 64)
    with pytest.raises(ValueError, match=r"needs block scales \(1, 2\)"):
        block_scaled_linear(draw(1, 256).to(DEVICE), weight, scale[:, :1])
