"""Checks of the MoE kernels; run by test_moe_kernels.py in Triton's interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang.kernels import triton_support
from sglang.kernels.ops.fused.rows import silu_mul_quantized
from sglang.kernels.ops.fused.sums import RoutedSum
from sglang.kernels.ops.moe import launch
from sglang.kernels.ops.moe.by_slot import sort_rows
from sglang.kernels.ops.moe.experts import (
    ExpertRows,
    grouped_gated,
    grouped_linear,
    run_experts,
)
from sglang.kernels.ops.moe.route import route
from sglang.kernels.ops.moe.sort import order_by_expert
from sglang.test.checkpoints.quantize import dequantize_blockwise, quantize_blockwise
from sglang.test.fp8_reference import experts_reference

DEVICE = torch.device("cpu" if triton_support.INTERPRETING else "cuda")
TILES = {
    "weights_first": launch.ExpertTile(16, 64, 32, 4, 2, weights_first=True),
    "rows_first": launch.ExpertTile(16, 32, 32, 4, 2, weights_first=False, scales_ahead=True),
    "parts": launch.ExpertTile(16, 64, 32, 4, 2, weights_first=False, parts=2, descriptors=True),
}
TILES = {name: launch.ExpertTiles(tile, tile) for name, tile in TILES.items()}
GATED = {
    "few": launch.ExpertTile(16, 256, 128, 4, 2, weights_first=True, parts=2),
    "many": launch.ExpertTile(16, 256, 128, 4, 2, weights_first=False, parts=2, descriptors=True),
}
EVERY_TILE = pytest.mark.parametrize("tiles", list(TILES.values()), ids=list(TILES))


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (10, 3), (256, 8)])
@pytest.mark.parametrize("renormalise", [True, False])
def test_route_agrees_with_torch(experts, top_k, renormalise):
    """A softmax over the chosen ones only, or padding columns that win."""
    logits = draw(7, experts) * 3
    weights, chosen = route(logits.to(DEVICE), top_k, renormalise=renormalise)
    want, ids = torch.softmax(logits, -1).topk(top_k)
    if renormalise:
        want = want / want.sum(-1, keepdim=True)
    assert torch.equal(chosen.cpu().long(), ids)
    torch.testing.assert_close(weights.cpu(), want, rtol=1e-5, atol=1e-7)


def test_route_takes_the_lower_id_at_a_tie():
    weights, chosen = route(torch.zeros(2, 12, device=DEVICE), 3, renormalise=True)
    assert chosen.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights.cpu(), torch.full((2, 3), 1 / 3))


def test_route_of_a_row_that_holds_nan_chooses_nobody():
    """An id out of range is a read out of range. The other rows keep their bits."""
    logits = draw(4, 10, seed=7)
    clean = route(logits.to(DEVICE), 3, renormalise=True)
    logits[1, 4], logits[2, 0] = float("nan"), float("inf")
    dirty = route(logits.to(DEVICE), 3, renormalise=True)
    assert dirty[1][1:3].tolist() == [[-1] * 3] * 2
    for one, other in zip(clean, dirty, strict=True):
        assert torch.equal(one[[0, 3]], other[[0, 3]]) and not torch.equal(one[1], other[1])


@pytest.mark.parametrize("block_m", [4, 16])
@pytest.mark.parametrize(
    ("rows", "top_k", "experts"),
    [(1, 2, 8), (5, 2, 3), (64, 8, 256), (130, 8, 5), (700, 3, 40)],
)
def test_order_is_stable_padded_and_complete(rows, top_k, experts, block_m):
    """A lost or doubled pair, an order by arrival, a tile of two experts, too few tiles."""
    generator = torch.Generator().manual_seed(rows)
    chosen = torch.randint(-1, experts, (rows, top_k), generator=generator).int()
    order = order_by_expert(chosen.to(DEVICE), experts, block_m)
    flat, pairs = chosen.flatten().tolist(), order.pairs.cpu().view(-1, block_m).tolist()
    found: dict[int, list[int]] = {e: [] for e in range(experts)}
    tile_experts = order.tile_experts.tolist()
    for expert, tile in zip(tile_experts, pairs, strict=True):
        if expert >= 0:
            assert tile[0] >= 0
            found[expert] += [p for p in tile if p != -1]
    want = {e: [p for p, c in enumerate(flat) if c == e] for e in range(experts)}
    assert found == want
    used = [e for e in tile_experts if e >= 0]
    assert used == sorted(used) and tile_experts[len(used) :] == [-1] * (len(pairs) - len(used))


@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (300, 2064)])
def test_rows_are_copied_to_the_slots_of_their_pairs(rows, columns):
    """A row that goes to another pair's slot, a last word left out, padding or nobody's tile that is written."""
    generator = torch.Generator().manual_seed(rows)
    chosen = torch.randint(-1, 7, (rows, 3), generator=generator).int().to(DEVICE)
    values = torch.randint(0, 256, (rows, columns), generator=generator).byte().to(DEVICE)
    order = order_by_expert(chosen, 7, 128)
    made = sort_rows(values, order, 3)
    used = (order.tile_experts.repeat_interleave(128) >= 0) & (order.pairs >= 0)
    pairs = order.pairs[used].long()
    assert len(pairs) == int((chosen >= 0).sum())
    assert torch.equal(made[used], values[pairs // 3])
    assert not torch.equal(made[used], values[pairs // 3].roll(1, 1))
    with pytest.raises(ValueError, match="vectors of 16 bytes"):
        sort_rows(values[:, 1:], order, 3)


def expert_case(rows: int, *, experts=4, size=64, inner=32, top_k=2):
    gate_up = draw(experts, 2 * inner, size, seed=1) / size**0.5
    down = draw(experts, size, inner, seed=2) / inner**0.5
    weights = torch.softmax(draw(rows, top_k, seed=3), -1)
    scores = draw(rows, experts, seed=4)
    return draw(rows, size), weights, scores.topk(top_k).indices.int(), gate_up, down


def run(x, weights, chosen, gate_up, down, **more):
    options = {"tiles": TILES["weights_first"]} | more
    tensors = (t.to(DEVICE) for t in (x, weights, chosen, gate_up, down))
    return run_experts(*tensors, **options).total().cpu()


@EVERY_TILE
@pytest.mark.parametrize("rows", [1, 21])
def test_experts_agree_with_the_reference(rows, tiles):
    """Rows that go to another expert, gate and up exchanged, a pair that returns to another row."""
    case = expert_case(rows)
    bound = 1e-5 if triton_support.INTERPRETING else 1e-4
    want = experts_reference(*case)
    assert ((run(*case, tiles=tiles) - want).norm() / want.norm()) < bound
    x, weights, chosen, gate_up, down = case
    other = experts_reference(x, weights, chosen.flip(1), gate_up, down)
    assert ((other - want).norm() / want.norm()) > 0.1


def test_skipped_pairs_add_nothing_and_need_no_memory():
    """A padded row must neither read an expert nor bring NaN from memory nobody wrote."""
    x, weights, chosen, gate_up, down = expert_case(6)
    chosen[2] = -1
    chosen[4, 1] = -1
    want = experts_reference(x, weights, chosen, gate_up, down)
    got = run(x, weights, chosen, gate_up, down)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert not got[2].any()
    parts = torch.full((2, 8), float("nan"), device=DEVICE)
    parts[0] = 1.0
    alive = torch.tensor([[0, -1]], dtype=torch.int32, device=DEVICE)
    some = RoutedSum(parts, torch.ones(1, 2, device=DEVICE), alive, None, None)
    assert torch.equal(some.total().cpu(), torch.ones(1, 8))


@EVERY_TILE
def test_a_row_does_not_depend_on_its_batch(tiles):
    case = expert_case(21)
    x, weights, chosen, gate_up, down = (t.to(DEVICE) for t in case)
    x, gate_up, down = x.bfloat16(), gate_up.bfloat16(), down.bfloat16()
    together = run_experts(x, weights, chosen, gate_up, down, tiles=tiles).total()
    for row in (0, 13, 20):
        cut = slice(row, row + 1)
        alone = run_experts(x[cut], weights[cut], chosen[cut], gate_up, down, tiles=tiles)
        assert torch.equal(alone.total()[0], together[row])


@EVERY_TILE
def test_last_expert_may_be_the_shared_one(tiles):
    """Its rows shifted by a pair, its part added without the gate, a routed pair that reaches it."""
    x, weights, chosen, gate_up, down = expert_case(21, experts=5)
    chosen = chosen % 4
    gate = draw(21, 3, seed=9)[:, 1:2]
    got = run(
        x, weights, chosen, gate_up, down, shared_gate=gate.to(DEVICE), last_is_shared=True, tiles=tiles
    )  # fmt: skip
    routed = experts_reference(x, weights, chosen, gate_up[:4], down[:4])
    everyone = torch.full((21, 1), 4)
    shared = experts_reference(x, torch.ones(21, 1), everyone, gate_up, down)
    want = routed + torch.sigmoid(gate) * shared
    bound = 1e-5 if triton_support.INTERPRETING else 1e-4
    assert ((got - want).norm() / want.norm()) < bound
    assert ((routed + shared - want).norm() / want.norm()) > 0.05


@EVERY_TILE
def test_fp8_experts_agree_with_the_dequantised_ones(tiles):
    """Scales of another expert or block; activations that were not scaled back."""
    x, weights, chosen, gate_up, down = expert_case(9, size=256, inner=128)
    gate_up[1] *= 20
    quantised = {}
    for name, weight in (("gate_up", gate_up), ("down", down)):
        parts = [quantize_blockwise(one, torch.float32) for one in weight]
        quantised[name] = tuple(torch.stack(side).to(DEVICE) for side in zip(*parts, strict=True))
        weight.copy_(torch.stack([dequantize_blockwise(*part) for part in parts]))
    got = (
        run_experts(
            *(t.to(DEVICE) for t in (x, weights, chosen)),
            quantised["gate_up"][0],
            quantised["down"][0],
            gate_up_scale=quantised["gate_up"][1],
            down_scale=quantised["down"][1],
            tiles=tiles,
        )
        .total()
        .cpu()
    )
    want = experts_reference(x, weights, chosen, gate_up, down)
    bound = 0.06  # two roundings of activations to 3 bits of mantissa
    assert ((got - want).norm() / want.norm()) < bound
    mixed = experts_reference(x, weights, chosen.flip(1), gate_up, down)
    assert ((mixed - want).norm() / want.norm()) > 2 * bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile", list(GATED.values()), ids=list(GATED))
def test_gating_inside_the_product_gives_the_bits_of_three_launches(tile, dtype):
    """Gate and up exchanged, a scale of the other half, a product that is not rounded before the gate."""
    x, weights, chosen, gate_up, _ = expert_case(9, experts=5, size=256, inner=256)
    chosen = chosen % 4
    parts = [quantize_blockwise(one, torch.float32) for one in gate_up]
    weight, scale = (torch.stack(side).to(DEVICE) for side in zip(*parts, strict=True))
    x = x.to(DEVICE, dtype)
    rows = ExpertRows(order_by_expert(chosen.to(DEVICE), 4, 16), 18, 2, 9)
    got = grouped_gated(x, weight, scale, rows, tile)
    want = silu_mul_quantized(grouped_linear(x, weight, scale, rows, tile, x_by_pair=False))
    assert torch.equal(got.values.view(torch.uint8), want.values.view(torch.uint8))
    assert torch.equal(got.scale, want.scale) and got.dtype == dtype
    turned = torch.cat([weight[:, 256:], weight[:, :256]], 1)
    other = grouped_gated(x, turned, scale, rows, tile)
    assert not torch.equal(other.scale, want.scale)


def test_tiles_that_cannot_work_together_are_refused():
    few = GATED["few"]
    with pytest.raises(ValueError, match="tiles of 16 and 32 rows"):
        launch.ExpertTiles(few, replace(few, block_m=32))
    with pytest.raises(ValueError, match="2 parts of 128 columns, not 1 parts of 256"):
        launch.ExpertTiles(replace(few, parts=1), few, gated=True)


def test_shared_expert_is_gated_and_added():
    x, weights, chosen, gate_up, down = expert_case(5)
    shared, gate = draw(5, 64, seed=8), draw(5, 1, seed=9)
    got = run(
        x, weights, chosen, gate_up, down, shared=shared.to(DEVICE), shared_gate=gate.to(DEVICE)
    )
    want = experts_reference(x, weights, chosen, gate_up, down) + torch.sigmoid(gate) * shared
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
