"""Checks of the Hopper kernel of FP8 products on a GPU of compute capability 9.0; run by test_fp8_kernels.py.

What is asked: results within rounding of an fp64 product of the same FP8 operands, the same bits on every run,
a row whose bits depend on no other row nor on their number, and no byte read or written beside the operands.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sglang.kernels.ops.fused.rows import silu_mul_quantized
from sglang.kernels.ops.moe.experts import ExpertRows, grouped_gated, grouped_linear
from sglang.kernels.ops.moe.sort import order_by_expert
from sglang.kernels.ops.quantization import launch
from sglang.kernels.ops.quantization.fp8 import (
    block_scaled_gated,
    block_scaled_linear,
    hopper_tile,
    quantize,
)
from sglang.kernels.ops.quantization.hopper import GroupedRows, hopper_gemm
from sglang.kernels.ops.quantization.launch import HopperTile
from sglang.kernels.ops.quantization.rows import FP8_DTYPE, FP8_MAX, QuantizedRows

DEVICE = torch.device("cuda")
TILE = HopperTile()
ROWS = (1, 64, 65, 128, 129, 300, 1424, 4097)
SHAPES = ((256, 128), (768, 384), (5120, 2048))
SENTINEL = 12345.0


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, generator=generator)


def weight_of(*shape: int) -> tuple[Tensor, Tensor]:
    """Neighbouring blocks have different scales. Finite: some PyTorch casts make a NaN of what is beyond 448."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    weight = torch.randn(shape, device=DEVICE, generator=generator).mul(96)
    grid = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    scale = torch.rand(grid, device=DEVICE, generator=generator).exp2_()
    return weight.clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE), scale


def wide(scale: Tensor, axis: int) -> Tensor:
    return scale.double().repeat_interleave(128, axis)


def reference(x: QuantizedRows, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(x W^T, root of the sum of its squared terms: about sqrt(K) times one of them), fp64 [M, N]."""
    left = x.values.float().double() * wide(x.scale, 1)
    right = weight.float().double() * wide(wide(scale, 0), 1)
    return left @ right.t(), (left.square() @ right.square().t()).sqrt()


def agrees(got: Tensor, want: Tensor, size: Tensor) -> bool:
    """Each element within bf16's rounding and the tensor core's short sums; all together far closer."""
    error = (got.double() - want).abs()
    each = bool((error <= want.abs() / 256 + size / 64).all())
    return each and bool(error.norm() <= 3e-3 * want.norm())


def some_rows(x: QuantizedRows, rows: Tensor | slice) -> QuantizedRows:
    values = x.values.view(torch.uint8)[rows].view(FP8_DTYPE)
    return QuantizedRows(values, x.scale[rows], x.dtype)


def same_rows(one: QuantizedRows, other: QuantizedRows, rows: Tensor | slice) -> bool:
    values = torch.equal(one.values.view(torch.uint8)[rows], other.values.view(torch.uint8)[rows])
    return values and torch.equal(one.scale[rows], other.scale[rows])


@pytest.mark.parametrize("tile", [TILE, HopperTile(3, 2)], ids=["table", "other"])
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_product_is_right_within_rounding(tile, columns, depth):
    """A lost stage, a half in the other's place, the scale of another block, a row beyond the last."""
    weight, scale = weight_of(columns, depth)
    every = quantize(draw(max(ROWS), depth))
    want, size = reference(every, weight, scale)
    for rows in ROWS:
        got = block_scaled_linear(some_rows(every, slice(rows)), weight, scale, tile=tile)
        assert agrees(got, want[:rows], size[:rows]), f"{rows} rows"
        for wrong in (scale.roll(1, 0), scale.roll(1, 1)):
            if not torch.equal(wrong, scale):
                false = reference(every, weight, wrong)[0][:rows]
                assert not agrees(got, false, size[:rows]), f"{rows} rows, another block's scale"
        short = weight.clone()
        short.view(torch.uint8)[:, -32:] = 0
        assert not agrees(got, reference(every, short, scale)[0][:rows], size[:rows])


@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_a_row_does_not_depend_on_the_others(columns, depth):
    """Sums whose order hangs on the number of rows or on the place in a tile; a neighbour's scale."""
    weight = weight_of(columns, depth)
    x = draw(max(ROWS), depth)
    together = block_scaled_linear(x, *weight, tile=TILE)
    for rows in ROWS:
        assert torch.equal(block_scaled_linear(x[:rows], *weight, tile=TILE), together[:rows])
    for row in (1, 63, 64, 127, 128, 299, max(ROWS) - 1):
        alone = block_scaled_linear(x[row : row + 1], *weight, tile=TILE)
        assert torch.equal(alone[0], together[row])
        assert not torch.equal(alone[0], together[row - 1])
    moved = block_scaled_linear(x.roll(37, 0), *weight, tile=TILE)
    assert torch.equal(moved, together.roll(37, 0)) and not torch.equal(moved, together)
    poisoned = quantize(x)
    poisoned.values.view(torch.uint8)[::3] = 0x7F
    poisoned.scale[::3] = float("nan")
    kept = torch.arange(len(x), device=DEVICE) % 3 != 0
    got = block_scaled_linear(poisoned, *weight, tile=TILE)
    assert torch.equal(got[kept], together[kept]) and got[~kept].isnan().all()


@pytest.mark.parametrize("rows", [1, 130, 1000])
def test_gating_inside_the_product_gives_the_bits_of_three_launches(rows):
    """Gate and up exchanged, a scale of the other half, a product that is not rounded before the gate."""
    x, weight = draw(rows, 512) * 0.02, weight_of(2 * 384, 512)
    want = silu_mul_quantized(block_scaled_linear(x, *weight, tile=TILE))
    assert same_rows(block_scaled_gated(x, *weight, tile=TILE), want, slice(None))
    exchanged = [torch.cat(part.chunk(2)[::-1]) for part in (weight[0].float(), weight[1])]
    exchanged[0] = exchanged[0].to(FP8_DTYPE)
    assert not same_rows(block_scaled_gated(x, *exchanged, tile=TILE), want, slice(None))


def framed(inside: Tensor, fill: float) -> tuple[Tensor, Tensor]:
    """(a copy of ``inside`` between 64 rows of ``fill`` on either side, all of it)."""
    shape = (len(inside) + 128, *inside.shape[1:])
    whole = torch.full(shape, fill, device=DEVICE).to(inside.dtype)
    whole[64:-64].copy_(inside)
    return whole[64:-64], whole


@pytest.mark.parametrize("rows", ROWS)
def test_nothing_beside_the_operands_is_read_or_written(rows):
    """A tile's rows beyond the last: their values and scales are NaN here, and their results are looked at."""
    nan = float("nan")
    x, (weight, scale) = quantize(draw(rows, 384)), weight_of(768, 384)
    out, whole = framed(torch.empty(rows, 768, device=DEVICE, dtype=torch.bfloat16), SENTINEL)
    frame = whole[:64].clone()
    operands = (framed(each, nan)[0] for each in (x.values, x.scale, weight, scale))
    hopper_gemm(*operands, out, None, TILE, dtype=torch.bfloat16)
    assert torch.equal(out, block_scaled_linear(x, weight, scale, tile=TILE))
    assert not out.isnan().any()
    assert torch.equal(whole[:64], frame) and torch.equal(whole[-64:], frame)


def uneven(rows: int, experts: int, top_k: int) -> Tensor:
    """Most pairs to expert 0, some experts with none, every fifth row without its second expert."""
    generator = torch.Generator(DEVICE).manual_seed(5)
    score = torch.rand(rows, experts, device=DEVICE, generator=generator)
    score[:, 0] += 0.9
    score[:, 3:7] = -1.0
    chosen = score.topk(top_k).indices.int()
    chosen[::5, 1] = -1
    return chosen


def order(chosen: Tensor, experts: int, shared: bool) -> ExpertRows:
    rows, top_k = chosen.shape
    made = order_by_expert(chosen, experts, TILE.block_m)
    return ExpertRows(made, rows * top_k, top_k, rows if shared else 0)


def pairs_of(chosen: Tensor, experts: int, shared: bool) -> tuple[Tensor, Tensor]:
    """(expert, row of x) of every result, expert -1 where there is none."""
    rows, top_k = chosen.shape
    each = torch.arange(rows, device=DEVICE)
    expert, source = chosen.flatten().long(), each.repeat_interleave(top_k)
    if shared:
        expert = torch.cat([expert, torch.full((rows,), experts, device=DEVICE)])
        source = torch.cat([source, each])
    return expert, source


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("rows", [1, 40, 300, 1424])
def test_experts_are_right_within_rounding(rows, shared):
    """Rows gathered for another pair, another expert's weight, a half of padding that is not let go."""
    experts, size, inner = 24, 512, 256
    chosen = uneven(rows, experts, 3)
    own = order(chosen, experts, shared)
    expert, source = pairs_of(chosen, experts, shared)
    live = expert >= 0
    gate_up = weight_of(experts + shared, 2 * inner, size)
    x = quantize(draw(rows, size) * 0.02)
    both = grouped_linear(x, *gate_up, own, TILE, x_by_pair=False)
    gated = grouped_gated(x, *gate_up, own, TILE)
    assert same_rows(gated, silu_mul_quantized(both), live)
    down = weight_of(experts + shared, size, inner)
    by_pair = quantize(draw(own.num_results, inner, seed=3))
    made = grouped_linear(by_pair, *down, own, TILE, x_by_pair=True)
    every = torch.arange(own.num_results, device=DEVICE)
    for got, left, weight, at in ((both, x, gate_up, source), (made, by_pair, down, every)):
        for one in expert[live].unique().tolist():
            mine = expert == one
            taken = some_rows(left, at[mine])
            assert agrees(got[mine], *reference(taken, weight[0][one], weight[1][one]))
            other = (one + 1) % experts
            assert not agrees(got[mine], *reference(taken, weight[0][other], weight[1][other]))
            alone = block_scaled_linear(taken, weight[0][one], weight[1][one], tile=TILE)
            assert torch.equal(got[mine], alone)  # nor does a row depend on the other experts' rows


@pytest.mark.parametrize("x_by_pair", [True, False])
def test_pairs_left_out_are_neither_read_nor_written(x_by_pair):
    """A pair of -1 taken for the last row, padding of a tile stored, rows behind the last result."""
    rows, experts, depth, columns, nan = 300, 24, 256, 512, float("nan")
    chosen = uneven(rows, experts, 3)
    chosen[7:11] = -1
    own = order(chosen, experts, True)
    expert, _ = pairs_of(chosen, experts, True)
    left_out = expert < 0
    x = quantize(draw(own.num_results if x_by_pair else rows, depth))
    weight, scale = weight_of(experts + 1, columns, depth)
    want = grouped_linear(x, weight, scale, own, TILE, x_by_pair=x_by_pair)
    values, scales = x.values.clone(), x.scale.clone()
    if x_by_pair:
        values.view(torch.uint8)[left_out] = 0x7F
        scales[left_out] = nan
    blank = torch.full((own.num_results, columns), SENTINEL, device=DEVICE, dtype=torch.bfloat16)
    out, whole = framed(blank, SENTINEL)
    grouped = GroupedRows(
        own.order.pairs,
        own.order.tile_experts,
        own.num_tiles,
        own.num_pairs,
        own.top_k,
        own.shared_rows,
        x_by_pair,
    )
    operands = (framed(each, nan)[0] for each in (values, scales, weight, scale))
    hopper_gemm(*operands, out, None, TILE, dtype=torch.bfloat16, grouped=grouped)
    assert torch.equal(out[~left_out], want[~left_out]) and not out.isnan().any()
    assert torch.equal(out[left_out], blank[left_out]) and left_out.any()
    assert torch.equal(whole[:64], blank[:64]) and torch.equal(whole[-64:], blank[:64])


def test_results_repeat():
    """A stage that is read before it is full, or filled before it was read."""
    x, weight = quantize(draw(8192, 2048)), weight_of(2048, 2048)
    own = order(uneven(2000, 24, 3), 24, True)
    rows, gate_up = quantize(draw(2000, 512) * 0.02), weight_of(25, 512, 512)
    live = pairs_of(uneven(2000, 24, 3), 24, True)[0] >= 0
    want = block_scaled_linear(x, *weight, tile=TILE)
    wanted = grouped_gated(rows, *gate_up, own, TILE)
    for _ in range(20):
        assert torch.equal(block_scaled_linear(x, *weight, tile=TILE), want)
        assert same_rows(grouped_gated(rows, *gate_up, own, TILE), wanted, live)


def test_the_table_takes_it_for_prompts_alone():
    """Decode and verify rows on tiles of 128 rows, or prompts left on the slower kernel."""
    weight, _ = weight_of(256, 128)
    for rows, tile in ((launch.SMALL_ROWS, None), (launch.SMALL_ROWS + 1, launch.MANY_ON_HOPPER)):
        assert hopper_tile(rows, 256, weight, gated=False) == tile
    for rows in (1, launch.SMALL_ROWS + 1):
        assert hopper_tile(rows, 192, weight, gated=False) is None


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
