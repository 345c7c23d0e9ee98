"""Checks of the CUDA kernel of FP8 products on a GPU of compute capability 9.0; run by test_hopper_cuda.py.

What is asked: results within rounding of an fp64 product of the same FP8 operands and with the bits of the Triton
tiles, the same bits on every run, a row whose bits depend on no other row nor on their number, and no byte read
or written beside the operands.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sglang.kernels.ops.moe.by_slot import down_by_slot, slot_tile, sort_rows, up_by_slot
from sglang.kernels.ops.moe.experts import grouped_gated, grouped_linear, run_experts
from sglang.kernels.ops.moe.launch import expert_tiles
from sglang.kernels.ops.moe.sort import ExpertRows, order_by_expert
from sglang.kernels.ops.quantization import hopper_cuda, launch
from sglang.kernels.ops.quantization.fp8 import block_scaled_gated, block_scaled_linear, quantize
from sglang.kernels.ops.quantization.hopper_cuda import SlotRows, hopper_product, hopper_tile
from sglang.kernels.ops.quantization.launch import HopperTile, gemm_tiles
from sglang.kernels.ops.quantization.rows import FP8_DTYPE, FP8_MAX, QuantizedRows

DEVICE = torch.device("cuda")
TILE = HopperTile(watch=True)
TILES = pytest.mark.parametrize("tile", [TILE, HopperTile(2, watch=True)], ids=["table", "bands"])
OTHER = gemm_tiles(amd=False)
OTHER_EXPERTS = expert_tiles(8192, 2, fp8=True)
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


def same_rows(one: QuantizedRows, other: QuantizedRows) -> bool:
    values = torch.equal(one.values.view(torch.uint8), other.values.view(torch.uint8))
    return values and torch.equal(one.scale, other.scale)


@TILES
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_product_is_right_and_has_the_bits_of_the_triton_tile(tile, columns, depth):
    """A lost stage, a half in the other's place, the scale of another block, a row beyond the last."""
    weight, scale = weight_of(columns, depth)
    every = quantize(draw(max(ROWS), depth))
    want, size = reference(every, weight, scale)
    for rows in ROWS:
        x = some_rows(every, slice(rows))
        got = block_scaled_linear(x, weight, scale, tile=tile)
        assert agrees(got, want[:rows], size[:rows]), f"{rows} rows"
        assert torch.equal(got, block_scaled_linear(x, weight, scale, tile=OTHER.many))
        for wrong in (scale.roll(1, 0), scale.roll(1, 1)):
            if not torch.equal(wrong, scale):
                false = reference(every, weight, wrong)[0][:rows]
                assert not agrees(got, false, size[:rows]), f"{rows} rows, another block's scale"
                other = block_scaled_linear(x, weight, wrong, tile=OTHER.many)
                assert not torch.equal(got, other)
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


@pytest.mark.parametrize("rows", [1, 129, 1000])
def test_gated_product_has_the_bits_of_the_triton_tile(rows):
    """Gate and up exchanged, a product that is not rounded before the gate; rows of zeros, and some so small or
    large that a reciprocal would leave the range."""
    x, weight = draw(rows, 512) * 0.02, weight_of(2 * 384, 512)
    x[: rows // 2 : 7] *= 1e-15
    x[1 : rows // 2 : 7] *= 1e15
    x[2::7] = 0
    want = block_scaled_gated(x, *weight, tile=OTHER.gated_many)
    assert same_rows(block_scaled_gated(x, *weight, tile=TILE), want)
    exchanged = [torch.cat(part.chunk(2)[::-1]) for part in (weight[0].float(), weight[1])]
    exchanged[0] = exchanged[0].to(FP8_DTYPE)
    assert not same_rows(block_scaled_gated(x, *exchanged, tile=TILE), want)


def framed(inside: Tensor, fill: float) -> tuple[Tensor, Tensor]:
    """(a copy of ``inside`` between 64 rows of ``fill`` on either side, all of it)."""
    shape = (len(inside) + 128, *inside.shape[1:])
    whole = torch.full(shape, fill, device=DEVICE).to(inside.dtype)
    whole[64:-64].copy_(inside)
    return whole[64:-64], whole


def frame_stays(whole: Tensor, fill: float) -> bool:
    """Compared as bytes."""
    frame = torch.full_like(whole[:64].float(), fill).to(whole.dtype).view(torch.uint8)
    ends = (whole[:64].view(torch.uint8), whole[-64:].view(torch.uint8))
    return all(torch.equal(end, frame) for end in ends)


@pytest.mark.parametrize("rows", ROWS)
def test_nothing_beside_the_operands_is_read_or_written(rows):
    """A tile's rows beyond the last: their values and scales are NaN here, and their results are looked at."""
    nan = float("nan")
    x, (weight, scale) = quantize(draw(rows, 384)), weight_of(768, 384)
    out, whole = framed(torch.empty(rows, 768, device=DEVICE, dtype=torch.bfloat16), SENTINEL)
    own, own_scale, *others = (framed(each, nan)[0] for each in (x.values, x.scale, weight, scale))
    hopper_product(QuantizedRows(own, own_scale, x.dtype), *others, out, None, TILE)
    assert torch.equal(out, block_scaled_linear(x, weight, scale, tile=OTHER.many))
    assert not out.isnan().any() and frame_stays(whole, SENTINEL)


def uneven(rows: int, experts: int, top_k: int) -> Tensor:
    """Most pairs to expert 0, some experts with none, every fifth row without its second expert, four with none."""
    generator = torch.Generator(DEVICE).manual_seed(5)
    score = torch.rand(rows, experts, device=DEVICE, generator=generator)
    score[:, 0] += 0.9
    score[:, 3:7] = -1.0
    chosen = score.topk(top_k).indices.int()
    chosen[::5, 1] = -1
    chosen[7:11] = -1
    return chosen


class Case:
    """24 experts and perhaps a shared one: operands, the order by slot, and where each result lies."""

    def __init__(self, rows: int, *, shared: bool) -> None:
        self.hidden, self.inner = 512, 256
        self.chosen, self.shared = uneven(rows, 24, 3), shared
        self.order = self.order_of(TILE.block_m)
        self.gate_up = weight_of(24 + shared, 2 * self.inner, self.hidden)
        self.down = weight_of(24 + shared, self.hidden, self.inner)
        self.x = quantize(draw(rows, self.hidden) * 0.02)
        order = self.order.order
        used = (order.tile_experts.repeat_interleave(128) >= 0) & (order.pairs >= 0)
        row = torch.arange(self.order.shared_rows, device=DEVICE)
        self.results = torch.cat([order.pairs[used].long(), self.order.num_pairs + row])
        self.slots = torch.cat([used.nonzero().flatten(), len(order.pairs) + row])

    def order_of(self, block_m: int) -> ExpertRows:
        rows, top_k = self.chosen.shape
        made = order_by_expert(self.chosen, 24, block_m)
        return ExpertRows(made, rows * top_k, top_k, rows if self.shared else 0)

    def up(self) -> QuantizedRows:
        """The Triton tile's, by pair."""
        order = self.order_of(OTHER_EXPERTS.block_m)
        return grouped_gated(self.x, *self.gate_up, order, OTHER_EXPERTS.up)

    def last(self, inner: QuantizedRows) -> Tensor:
        order = self.order_of(OTHER_EXPERTS.block_m)
        return grouped_linear(inner, *self.down, order, OTHER_EXPERTS.down, x_by_pair=True)

    def by_slot(self, sorted_values: Tensor | None) -> SlotRows:
        own = self.order
        order = (own.order.pairs, own.order.tile_experts)
        return SlotRows(*order, own.num_pairs, own.top_k, own.shared_rows, sorted_values)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("rows", [1, 40, 129, 300, 1424])
def test_experts_have_the_bits_of_the_triton_tiles(rows, shared):
    """Another expert's weight, rows of padding that reach others, an empty tile that only one group skips."""
    case = Case(rows, shared=shared)
    want, at = case.up(), case.results
    made = up_by_slot(case.x, *case.gate_up, case.order, TILE)
    assert same_rows(some_rows(made, case.slots), some_rows(want, at))
    got, wanted = down_by_slot(made, *case.down, case.order, TILE), case.last(want)
    assert torch.equal(got[at], wanted[at])
    weight, scale = case.down
    case.down = (weight.view(torch.uint8).roll(1, 0).view(FP8_DTYPE), scale.roll(1, 0))
    assert not torch.equal(got[at], case.last(want)[at])


@pytest.mark.parametrize("shared", [True, False])
def test_an_expert_is_right_within_rounding(shared):
    """Both kernels wrong alike; and a row that depends on other experts' rows."""
    case = Case(300, shared=shared)
    values = torch.zeros(128 * case.order.num_tiles, case.inner, device=DEVICE, dtype=torch.uint8)
    scale = torch.ones(len(values), case.inner // 128, device=DEVICE)
    by_pair = quantize(draw(case.order.num_results, case.inner, seed=3))
    values[case.slots] = by_pair.values.view(torch.uint8)[case.results]
    scale[case.slots] = by_pair.scale[case.results]
    inner = QuantizedRows(values.view(FP8_DTYPE), scale, torch.bfloat16)
    got = down_by_slot(inner, *case.down, case.order, TILE)
    expert = case.chosen.flatten().long()
    if shared:
        expert = torch.cat([expert, torch.full((300,), 24, device=DEVICE)])
    weight, scale = case.down
    for one in expert[expert >= 0].unique().tolist():
        mine, other = some_rows(by_pair, expert == one), (one + 1) % 24
        assert agrees(got[expert == one], *reference(mine, weight[one], scale[one]))
        assert not agrees(got[expert == one], *reference(mine, weight[other], scale[other]))
        alone = block_scaled_linear(mine, weight[one].clone(), scale[one], tile=TILE)
        assert torch.equal(got[expert == one], alone)


@pytest.mark.parametrize("shared", [True, False])
def test_slots_and_pairs_left_out_are_neither_read_nor_written(shared):
    """Padding of a tile that is stored, a pair of -1 taken for the last row, rows behind the last result."""
    case, nan = Case(300, shared=shared), float("nan")
    want = up_by_slot(case.x, *case.gate_up, case.order, TILE)
    wanted = down_by_slot(want, *case.down, case.order, TILE)
    unused = torch.ones(len(want.values), dtype=torch.bool, device=DEVICE)
    unused[case.slots] = False
    x = QuantizedRows(case.x.values.clone(), case.x.scale.clone(), case.x.dtype)
    if not shared:
        x.values.view(torch.uint8)[7:11], x.scale[7:11] = 0x7F, nan
    rows = sort_rows(x.values, case.order.order, case.order.top_k)
    rows.view(torch.uint8)[unused[: len(rows)]] = 0x7F
    out, whole = framed(torch.full_like(want.values.float(), 7.0).to(FP8_DTYPE), 7.0)
    scale, whole_scale = framed(torch.full_like(want.scale, SENTINEL), SENTINEL)
    x = QuantizedRows(framed(x.values, nan)[0], framed(x.scale, nan)[0], x.dtype)
    weight = [framed(each, nan)[0] for each in case.gate_up]
    slots = case.by_slot(framed(rows, nan)[0])
    hopper_product(x, *weight, out, scale, TILE, slots=slots)
    made = QuantizedRows(out, scale, x.dtype)
    assert same_rows(some_rows(made, case.slots), some_rows(want, case.slots))
    seven = whole.view(torch.uint8)[0, 0]
    assert (out.view(torch.uint8)[unused] == seven).all() and (scale[unused] == SENTINEL).all()
    assert frame_stays(whole, 7.0) and frame_stays(whole_scale, SENTINEL) and unused.any()

    inner = QuantizedRows(want.values.clone(), want.scale.clone(), x.dtype)
    inner.values.view(torch.uint8)[unused], inner.scale[unused] = 0x7F, nan
    inner = QuantizedRows(framed(inner.values, nan)[0], framed(inner.scale, nan)[0], x.dtype)
    last, whole = framed(torch.full_like(wanted, SENTINEL), SENTINEL)
    weight = [framed(each, nan)[0] for each in case.down]
    hopper_product(inner, *weight, last, None, TILE, slots=case.by_slot(None))
    left_out = torch.ones(len(wanted), dtype=torch.bool, device=DEVICE)
    left_out[case.results] = False
    assert torch.equal(last[case.results], wanted[case.results]) and left_out.any()
    assert (last[left_out] == whole[0, 0]).all() and frame_stays(whole, SENTINEL)


@pytest.mark.parametrize("shared", [True, False])
def test_a_layer_of_experts_chooses_it_and_keeps_its_bits(shared):
    """A call that takes other tiles than were asked for, or mixes up the two projections' scales."""
    case = Case(300, shared=shared)
    weights = torch.rand(300, 3, device=DEVICE, dtype=torch.bfloat16)
    (gate_up, gate_up_scale), (down, down_scale) = case.gate_up, case.down

    def parts(tiles, down_scale=down_scale):
        scales = {"gate_up_scale": gate_up_scale, "down_scale": down_scale}
        operands = (case.x, weights, case.chosen, gate_up, down)
        made = run_experts(*operands, **scales, last_is_shared=shared, tiles=tiles)
        return made.parts[case.results]

    assert slot_tile(300, gate_up, down, torch.bfloat16) == launch.MANY_ON_HOPPER
    chosen = parts(None)
    assert torch.equal(chosen, parts(TILE)) and torch.equal(chosen, parts(OTHER_EXPERTS))
    assert not torch.equal(chosen, parts(TILE, down_scale.roll(1, 0)))


def test_results_repeat():
    """A stage that is read before it is full, or filled before it was read."""
    x, weight = quantize(draw(8192, 2048)), weight_of(2048, 2048)
    want = block_scaled_linear(x, *weight, tile=OTHER.many)
    case = Case(2000, shared=True)
    up = some_rows(up_by_slot(case.x, *case.gate_up, case.order, TILE), case.slots)
    for _ in range(20):
        assert torch.equal(block_scaled_linear(x, *weight, tile=TILE), want)
        again = up_by_slot(case.x, *case.gate_up, case.order, TILE)
        assert same_rows(some_rows(again, case.slots), up)


def test_the_table_takes_it_for_prompts_alone():
    """Decode and verify rows on tiles of 128 rows, prompts left on slower tiles, results that it does not make."""
    weight, bf16 = weight_of(256, 128)[0], torch.bfloat16
    for rows, tile in ((launch.SMALL_ROWS, None), (launch.SMALL_ROWS + 1, launch.MANY_ON_HOPPER)):
        assert hopper_tile(rows, weight, bf16, gated=False) == tile
        assert hopper_tile(rows, weight, bf16, gated=True) == tile
    for wrong in (weight[:192], weight[:, :64]):
        assert hopper_tile(4096, wrong, bf16, gated=False) is None
    for other in (torch.float16, torch.float32):
        assert hopper_tile(4096, weight, other, gated=False) is None


def test_what_does_not_compile_is_left_to_triton_with_one_line(monkeypatch, caplog):
    """A server that ends, or complains with every product, where the compiler fails."""
    x, (weight, scale) = quantize(draw(300, 128)), weight_of(256, 128)
    want = block_scaled_linear(x, weight, scale, tile=OTHER.many)

    def fails(*args, **kwargs):
        raise RuntimeError("the compiler is ill")

    caches = (hopper_cuda._function, hopper_cuda._is_ready, hopper_cuda._say_once)
    monkeypatch.setattr(hopper_cuda, "compile_source", fails)
    for cache in caches:
        cache.cache_clear()
    for _ in range(3):
        assert torch.equal(block_scaled_linear(x, weight, scale), want)
        assert hopper_tile(300, weight, torch.bfloat16, gated=True) is None
    assert sum("the compiler is ill" in line for line in caplog.messages) == 1
    for cache in caches:
        cache.cache_clear()


def test_products_that_do_not_fit_are_refused():
    x, weight = quantize(draw(4, 256)), weight_of(256, 256)
    out = torch.empty(4, 256, device=DEVICE, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="only bf16"):
        hopper_product(x, *weight, out.float(), None, TILE)
    with pytest.raises(ValueError, match="whole tiles"):
        hopper_product(x, *weight, out[:, :128], None, TILE)
    case = Case(40, shared=True)
    with pytest.raises(ValueError, match="tiles of 64 rows"):
        up_by_slot(case.x, *case.gate_up, case.order_of(64), TILE)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
