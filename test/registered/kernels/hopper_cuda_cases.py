"""Checks of the CUDA kernel of FP8 products on a GPU of compute capability 9.0; run by test_hopper_cuda.py.

What is asked: the bits of the Gluon kernel, whose own checks are in hopper_gemm_cases.py, whatever two
multiprocessors share; the same bits on every run; and no byte written beside the results.
"""

from __future__ import annotations

import pytest
import torch
from hopper_gemm_cases import (
    DEVICE,
    ROWS,
    SENTINEL,
    SHAPES,
    draw,
    framed,
    order,
    pairs_of,
    same_rows,
    uneven,
    weight_of,
)
from torch import Tensor

from sglang.kernels.ops.moe.by_slot import down_by_slot, up_by_slot
from sglang.kernels.ops.moe.experts import ExpertRows, grouped_gated, grouped_linear
from sglang.kernels.ops.quantization.fp8 import block_scaled_gated, block_scaled_linear, quantize
from sglang.kernels.ops.quantization.hopper_cuda import (
    SHARE_NOTHING,
    SHARE_ROWS,
    SHARE_WEIGHTS,
    CudaTile,
    hopper_product,
)
from sglang.kernels.ops.quantization.launch import HopperTile
from sglang.kernels.ops.quantization.rows import QuantizedRows

OTHER = HopperTile()
TILES = [
    CudaTile(share, turns, group_m, watch=True)
    for share, turns, group_m in (
        (SHARE_NOTHING, False, 16),
        (SHARE_NOTHING, True, 2),
        (SHARE_WEIGHTS, False, 8),
        (SHARE_WEIGHTS, True, 2),
        (SHARE_ROWS, False, 8),
        (SHARE_ROWS, True, 2),
    )
]
EVERY_TILE = pytest.mark.parametrize("tile", TILES, ids=str)
EXPERT_TILES = pytest.mark.parametrize(
    "tile", [tile for tile in TILES if tile.share != SHARE_WEIGHTS], ids=str
)


def product(x: QuantizedRows, weight: Tensor, scale: Tensor, tile: CudaTile) -> Tensor:
    """Into rows between others, which must stay."""
    blank = torch.full((len(x.values), len(weight)), SENTINEL, device=DEVICE, dtype=torch.bfloat16)
    out, whole = framed(blank, SENTINEL)
    hopper_product(x, weight, scale, out, None, tile)
    assert (whole[:64] == whole[0, 0]).all() and (whole[-64:] == whole[0, 0]).all()
    return out


@EVERY_TILE
@pytest.mark.parametrize(("columns", "depth"), [(512, 128), *SHAPES[2:], (1024, 1536)])
def test_product_has_the_bits_of_the_other_kernel(tile, columns, depth):
    """A stage overwritten while the neighbour reads it, a half in the other's place, a scale of another block."""
    weight, scale = weight_of(columns, depth)
    for rows in ROWS:
        x = quantize(draw(rows, depth))
        want = block_scaled_linear(x, weight, scale, tile=OTHER)
        got = product(x, weight, scale, tile)
        assert torch.equal(got, want), f"{rows} rows"
        if rows == 300:
            assert not torch.equal(product(x, weight, scale.roll(1, 0), tile), want)


@EVERY_TILE
@pytest.mark.parametrize("rows", [1, 130, 1000])
def test_gated_product_has_the_bits_of_the_other_kernel(tile, rows):
    """Rows of all sizes, one of zeros, and some so small or large that a reciprocal would leave the range."""
    x, weight = draw(rows, 512) * 0.02, weight_of(2 * 512, 512)
    x[: rows // 2 : 7] *= 1e-15
    x[1 : rows // 2 : 7] *= 1e15
    x[2::7] = 0
    rows_of_x = quantize(x)
    want = block_scaled_gated(rows_of_x, *weight, tile=OTHER)
    out = QuantizedRows.empty(rows, 512, dtype=x.dtype, device=DEVICE)
    hopper_product(rows_of_x, *weight, out.values, out.scale, tile)
    assert same_rows(out, want, slice(None))
    if rows > 1:
        moved = QuantizedRows(out.values.roll(1, 0), out.scale, out.dtype)
        assert not same_rows(moved, want, slice(None))


def slots_of(rows: ExpertRows) -> tuple[Tensor, Tensor]:
    """(results that exist, their slots)."""
    pairs = rows.order.pairs
    used = (rows.order.tile_experts.repeat_interleave(128) >= 0) & (pairs >= 0)
    shared = torch.arange(rows.shared_rows, device=DEVICE)
    results = torch.cat([pairs[used].long(), rows.num_pairs + shared])
    return results, torch.cat([used.nonzero().flatten(), len(pairs) + shared])


@EXPERT_TILES
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("rows", [1, 40, 300, 1424])
def test_experts_have_the_bits_of_the_other_kernel(tile, rows, shared):
    """Another expert's weight, rows of padding that reach others, an empty tile that only one neighbour skips."""
    experts, size, inner = 24, 512, 256
    chosen = uneven(rows, experts, 3)
    chosen[7:11] = -1
    own = order(chosen, experts, shared)
    live = pairs_of(chosen, experts, shared)[0] >= 0
    results, slots = slots_of(own)
    gate_up, down = (
        weight_of(experts + shared, 2 * inner, size),
        weight_of(experts + shared, size, inner),
    )
    x = quantize(draw(rows, size) * 0.02)
    want = grouped_gated(x, *gate_up, own, OTHER)
    made = up_by_slot(x, *gate_up, own, tile)
    by_pair = QuantizedRows(made.values.clone(), made.scale.clone(), made.dtype)
    by_pair.values.view(torch.uint8)[results] = made.values.view(torch.uint8)[slots]
    by_pair.scale[results] = made.scale[slots]
    assert same_rows(by_pair, want, results)
    last = grouped_linear(want, *down, own, OTHER, x_by_pair=True)
    got = down_by_slot(made, *down, own, tile)
    assert torch.equal(got[live], last[live])
    other = grouped_linear(want, down[0].roll(1, 0), down[1].roll(1, 0), own, OTHER, x_by_pair=True)
    assert not torch.equal(got[live], other[live])


@EVERY_TILE
def test_results_repeat(tile):
    """A stage that is read before it is full, or filled before it was read."""
    x, weight = quantize(draw(8192, 2048)), weight_of(2048, 2048)
    want = block_scaled_linear(x, *weight, tile=OTHER)
    for _ in range(20):
        assert torch.equal(product(x, *weight, tile), want)


def test_products_that_do_not_fit_are_refused():
    x, weight = quantize(draw(4, 256)), weight_of(256, 256)
    out = torch.empty(4, 256, device=DEVICE, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="pairs of tiles"):
        hopper_product(x, *weight, out, None, CudaTile(SHARE_ROWS))
    with pytest.raises(ValueError, match="only bf16"):
        hopper_product(x, *weight, out.float(), None, CudaTile())
    with pytest.raises(ValueError, match="whole tiles"):
        hopper_product(x, *weight, out[:, :128], None, CudaTile())


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
