"""Checks of the fused row kernels; run by test_fused_kernels.py in the interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from sglang.kernels import triton_support
from sglang.kernels.ops.fused.argmax import argmax_rows
from sglang.kernels.ops.fused.narrow import NarrowTile, narrow_linear
from sglang.kernels.ops.fused.rows import (
    GATE_MUL,
    GATED_NORM,
    GateLaunch,
    add_rms_norm,
    gated_rms_norm,
    gated_rms_norm_quantized,
    norm_rope,
    norm_rows,
    rms_norm,
    sigmoid_mul,
    sigmoid_mul_quantized,
    silu_mul,
    silu_mul_quantized,
)
from sglang.kernels.ops.fused.sums import RoutedSum, SplitSum
from sglang.kernels.ops.quantization.fp8 import quantize
from sglang.kernels.ops.quantization.rows import QuantizedRows

DEVICE = torch.device("cpu" if triton_support.INTERPRETING else "cuda")
EPS = 1e-6
BOTH = {"unit_offset": True, "quantized": True}
NARROW = (NarrowTile(32, 16, 128, 4, 2), NarrowTile(16, 16, 32, 4, 2, lanes=4))
CLOSE = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2},  # one rounding against two or three
}
DTYPES = pytest.mark.parametrize("dtype", list(CLOSE), ids=["fp32", "bf16"])
DOT_DTYPES = list(CLOSE)[
    : 1 if triton_support.INTERPRETING else 2
]  # it multiplies bf16 as integers


def draw(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def norm_reference(x, weight, unit_offset):
    x32 = x.float()
    scale = weight + 1 if unit_offset else weight
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + EPS) * scale).to(x.dtype)


@DTYPES
@pytest.mark.parametrize("unit_offset", [True, False])
def test_rms_norm(dtype, unit_offset):
    """The other weight convention; a mean over the padded block."""
    x, weight = draw(5, 200, dtype=dtype)[:, :136], draw(136, seed=1)
    got = rms_norm(x, weight, EPS, unit_offset=unit_offset)
    torch.testing.assert_close(got, norm_reference(x, weight, unit_offset), **CLOSE[dtype])
    other = norm_reference(x, weight, not unit_offset)
    assert not torch.allclose(got, other, **CLOSE[dtype])


@DTYPES
def test_add_rms_norm_norms_the_rounded_sum(dtype):
    x, delta, weight = draw(4, 136, dtype=dtype), draw(4, 136, seed=2, dtype=dtype), draw(136)
    normed, total = add_rms_norm(x, delta, weight, EPS, unit_offset=True)
    if dtype is torch.float32 or not triton_support.INTERPRETING:  # its bf16 cast truncates
        assert torch.equal(total, x + delta)
    torch.testing.assert_close(total, x + delta, **CLOSE[dtype])
    assert torch.equal(normed, rms_norm(total, weight, EPS, unit_offset=True))


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gated_norm(dtype, activation):
    """Gate before the norm, or the other activation; z is a strided part of a projection."""
    o, weight = draw(3, 4, 40, dtype=dtype), draw(40, seed=1)
    z = draw(3, 7 + 160, seed=2, dtype=dtype)[:, 7:].view(3, 4, 40)
    gate = {"silu": F.silu, "sigmoid": torch.sigmoid}
    normed = norm_reference(o.float(), weight, False)
    got = gated_rms_norm(o, z, weight, EPS, activation=activation)
    torch.testing.assert_close(
        got, (normed * gate[activation](z.float())).to(dtype), **CLOSE[dtype]
    )


@DTYPES
def test_norm_rope(dtype):
    """Pairs (j, j + 1) instead of (j, j + r/2), positions of another row, dims beyond r turned."""
    x, weight = draw(3, 2, 96, dtype=dtype)[..., :48], draw(48, seed=1)
    positions = torch.tensor([0, 9, 3], device=DEVICE)
    angles = torch.arange(12.0, device=DEVICE)[:, None] * 0.7 ** torch.arange(8.0, device=DEVICE)
    cos, sin = angles.cos().contiguous(), angles.sin().contiguous()
    got = norm_rope(x, weight, cos, sin, positions, EPS, unit_offset=True)
    normed = norm_reference(x, weight, True).float()
    first, second = normed[..., :8], normed[..., 8:16]
    c, s = cos[positions][:, None], sin[positions][:, None]
    parts = (first * c - second * s, second * c + first * s, normed[..., 16:])
    torch.testing.assert_close(got, torch.cat(parts, -1).to(dtype), **CLOSE[dtype])


@DTYPES
def test_gates(dtype):
    both = draw(3, 2 * 72, dtype=dtype)
    want = F.silu(both[:, :72].float()) * both[:, 72:].float()
    torch.testing.assert_close(silu_mul(both), want.to(dtype), **CLOSE[dtype])
    q = draw(3, 2, 80, seed=4, dtype=dtype)
    x, gate = q[..., :40], q[..., 40:]
    want = (x.float() * torch.sigmoid(gate.float())).to(dtype)
    torch.testing.assert_close(sigmoid_mul(x, gate), want, **CLOSE[dtype])


def assert_same_rows(got: QuantizedRows, unfused: torch.Tensor) -> None:
    """``got`` has the bits of quantising ``unfused``, and not those of its neighbour's rows."""
    want = quantize(unfused.reshape(unfused.shape[0], -1))
    assert got.dtype == want.dtype and got.shape == want.shape
    assert torch.equal(got.values.view(torch.uint8), want.values.view(torch.uint8))
    assert torch.equal(got.scale, want.scale)
    assert not torch.equal(got.scale, want.scale.roll(1, 0))


@DTYPES
@pytest.mark.parametrize("size", [128, 200, 1100])
@pytest.mark.parametrize("with_delta", [True, False])
def test_norm_quantised_at_once_is_the_norm_quantised_later(dtype, size, with_delta):
    """fp32 rows quantised before they are rounded, a last group that counts what lies beyond it."""
    x, weight = draw(5, size + 24, dtype=dtype)[:, :size], draw(size, seed=1)
    delta = draw(5, size, seed=2, dtype=dtype) if with_delta else None
    unfused, total = rms_norm(x, weight, EPS, unit_offset=True), x
    if delta is not None:
        unfused, total = add_rms_norm(x, delta, weight, EPS, unit_offset=True)
    for plain in (True, False):
        rows, got = norm_rows(x, delta, weight, EPS, plain=plain, **BOTH)
        assert rows.quantized is not None
        assert_same_rows(rows.quantized, unfused)
        assert torch.equal(got, total)
        assert torch.equal(rows.as_plain(), unfused) if plain else rows.plain is None
        assert rows.best() is rows.quantized
    with pytest.raises(ValueError, match="lack PLAIN"):
        rows.as_plain()


def deltas(dtype, rows: int, size: int):
    """Results in parts, some of pairs that nobody computed."""
    chosen = torch.tensor([[0, 3, 1], [2, -1, 0], [-1, -1, -1]] * rows, dtype=torch.int32)[:rows]
    parts = draw(rows * 3, size, seed=5, dtype=dtype)
    parts[(chosen < 0).flatten().to(DEVICE)] = float("nan")
    weights = draw(rows, 3, seed=6, dtype=dtype)
    shared, gate = draw(rows, size, seed=7, dtype=dtype), draw(rows, 8, seed=8, dtype=dtype)[:, 3:4]
    chosen = chosen.to(DEVICE)
    return {
        "split": SplitSum(draw(3, rows, size, seed=4), dtype),
        "routed": RoutedSum(parts, weights, chosen, None, None),
        "shared": RoutedSum(parts, weights, chosen, shared, gate),
    }


@DTYPES
@pytest.mark.parametrize("kind", ["split", "routed", "shared"])
def test_norm_of_parts_is_the_norm_of_their_total(dtype, kind):
    """Parts of another row, parts added unrounded, a skipped pair that is read."""
    x, weight = draw(5, 200, dtype=dtype), draw(200, seed=1)
    delta = deltas(dtype, 5, 200)[kind]
    total = delta.total()
    want, want_sum = norm_rows(x, total, weight, EPS, plain=True, **BOTH)
    got, got_sum = norm_rows(x, delta, weight, EPS, plain=True, **BOTH)
    assert total.dtype == dtype and not total.isnan().any()
    assert torch.equal(got_sum, want_sum) and torch.equal(got.as_plain(), want.as_plain())
    assert got.quantized is not None
    assert_same_rows(got.quantized, want.as_plain())
    plain, _ = norm_rows(x, delta, weight, EPS, unit_offset=True, plain=True, quantized=False)
    assert torch.equal(plain.as_plain(), want.as_plain()) and plain.quantized is None
    if kind == "split":
        torch.testing.assert_close(total, delta.parts.sum(0).to(dtype), **CLOSE[dtype])
    elif kind == "shared":
        bare = deltas(dtype, 5, 200)["routed"].total().float()
        added = torch.sigmoid(delta.shared_gate.float()) * delta.shared.float()
        torch.testing.assert_close(total, (bare + added).to(dtype), **CLOSE[dtype])


@DTYPES
@pytest.mark.parametrize(("heads", "size"), [(3, 128), (2, 40), (5, 256)])
def test_gates_quantised_at_once_are_the_gates_quantised_later(dtype, heads, size):
    """A group across two heads, heads of another row, rounding after quantising."""
    o, weight = draw(7, heads, size, dtype=dtype), draw(size, seed=1)
    z = draw(7, 8 + heads * size, seed=2, dtype=dtype)[:, 8:].view(7, heads, size)
    got = gated_rms_norm_quantized(o, z, weight, EPS, activation="silu")
    assert_same_rows(got, gated_rms_norm(o, z, weight, EPS, activation="silu"))
    assert_same_rows(sigmoid_mul_quantized(o, z), sigmoid_mul(o, z))
    both = draw(7, 2 * heads * size, seed=3, dtype=dtype)
    assert_same_rows(silu_mul_quantized(both), silu_mul(both))


EXACT = GateLaunch(elements=4096, num_warps=8, pairs=False)


def hard_values(rows: int, heads: int, size: int, *, seed: int) -> torch.Tensor:
    """bf16 values with zeros of both signs, subnormal and huge ones, by whole heads and alone."""
    x = draw(rows, heads, size, seed=seed)
    x[0, 0] *= 2.0**-120
    x[1, 0] *= 2.0**-131
    x[2, 0] *= 2.0**100
    x[3, 0] = -0.0
    x[4, 0, ::3] *= 60.0
    x[5, 0, ::2] = -0.0
    return x.to(torch.bfloat16)


@pytest.mark.parametrize("launch", [GATED_NORM, GATE_MUL], ids=["gated norm's", "gates'"])
@pytest.mark.parametrize(
    ("heads", "size"), [(3, 128), (2, 40) if triton_support.INTERPRETING else (5, 256)]
)
def test_gates_in_pairs_keep_every_bit(launch, heads, size):
    """A flushed subnormal, a lost -0, a clamp of NaN or infinity, an item of another head."""
    o, z = hard_values(7, heads, size, seed=0), hard_values(7, heads, size + 16, seed=1)[..., 16:]
    z[5] *= 40.0
    o[6, 0, 1], o[6, 1, 2] = float("inf"), float("nan")
    weight, both = draw(size, seed=2), hard_values(7, 1, 2 * heads * size, seed=3)[:, 0]
    for activation in ("silu", "sigmoid"):
        given = {"activation": activation}
        want = gated_rms_norm(o, z, weight, EPS, **given, launch=EXACT)
        got = gated_rms_norm(o, z, weight, EPS, **given, launch=launch)
        assert_same_halves(got, want)
        want_rows = gated_rms_norm_quantized(o, z, weight, EPS, **given, launch=EXACT)
        got_rows = gated_rms_norm_quantized(o, z, weight, EPS, **given, launch=launch)
        assert_same_bits(got_rows, want_rows)
    for gated, given in ((sigmoid_mul, (o, z)), (silu_mul, (both,))):
        assert_same_halves(gated(*given, launch=launch), gated(*given, launch=EXACT))
    for gated, given in ((sigmoid_mul_quantized, (o, z)), (silu_mul_quantized, (both,))):
        assert_same_bits(gated(*given, launch=launch), gated(*given, launch=EXACT))
    with pytest.raises(AssertionError):
        assert_same_halves(sigmoid_mul(o, z), sigmoid_mul(o.abs(), z))
    with pytest.raises(AssertionError):
        assert_same_bits(sigmoid_mul_quantized(o, z), sigmoid_mul_quantized(o, z * 1.01))


@pytest.mark.parametrize("kind", ["none", "tensor", "split", "shared"])
@pytest.mark.parametrize("size", [128, 200, 2048])
def test_norms_in_pairs_keep_every_bit(kind, size):
    """A sum that is not rounded before the norm, a flushed subnormal, a last group cut short."""
    x, weight = hard_values(7, 1, size, seed=0)[:, 0], draw(size, seed=1)
    delta = hard_values(7, 1, size, seed=9)[:, 0].flip(0) if kind == "tensor" else None
    if kind in ("split", "shared"):
        delta = deltas(torch.bfloat16, 7, size)[kind]
    want, want_sum = norm_rows(x, delta, weight, EPS, plain=True, pairs=False, **BOTH)
    for pairs in (True, None):
        got, got_sum = norm_rows(x, delta, weight, EPS, plain=True, pairs=pairs, **BOTH)
        assert_same_halves(got.as_plain(), want.as_plain())
        assert_same_halves(got_sum, want_sum)
        assert got.quantized is not None and want.quantized is not None
        assert_same_bits(got.quantized, want.quantized)
    with pytest.raises(AssertionError):
        assert_same_halves(want_sum, want_sum.roll(1, 0))


def assert_same_halves(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


def assert_same_bits(got: QuantizedRows, want: QuantizedRows) -> None:
    assert torch.equal(got.values.view(torch.uint8), want.values.view(torch.uint8))
    assert torch.equal(got.scale.view(torch.int32), want.scale.view(torch.int32))


@pytest.mark.parametrize(
    "exponent", [0] if triton_support.INTERPRETING else [0, -60, -122, 62, 127]
)
def test_every_quotient_of_two_bf16_mantissas(exponent):
    """Rounded as the exact division rounds, from a reciprocal in two parts."""
    octaves = 2 if triton_support.INTERPRETING else 20
    mantissas = 1.0 + torch.arange(128, dtype=torch.float64) / 128
    x = mantissas.repeat(octaves, 128, 1)
    x *= 2.0 ** -torch.arange(octaves, dtype=torch.float64)[:, None, None]
    x[..., 0] = mantissas
    x = torch.minimum(x, x[..., :1]) * 2.0**exponent
    rows = x.view(-1, 1, 128).to(torch.bfloat16).to(DEVICE)
    gate = torch.full_like(rows, 100.0)
    want = sigmoid_mul_quantized(rows, gate, launch=EXACT)
    assert torch.equal(sigmoid_mul(rows, gate, launch=EXACT), rows)
    assert_same_bits(sigmoid_mul_quantized(rows, gate), want)
    with pytest.raises(AssertionError):
        assert_same_bits(sigmoid_mul_quantized(rows.roll(1, 0), gate), want)


def test_rows_that_hold_nan_leave_the_others_alone():
    """Padding of a captured step is whatever memory held."""
    x, weight = draw(4, 256, dtype=torch.bfloat16), draw(256, seed=1)
    clean, _ = norm_rows(x, x, weight, EPS, plain=True, **BOTH)
    x[2] = float("nan")
    dirty, _ = norm_rows(x, x, weight, EPS, plain=True, **BOTH)
    assert clean.quantized is not None and dirty.quantized is not None
    for row in (0, 1, 3):
        for name in ("values", "scale"):
            one, other = (getattr(r.quantized, name)[row] for r in (clean, dirty))
            assert torch.equal(one.float(), other.float())
    assert not torch.equal(clean.as_plain()[2], dirty.as_plain()[2])


@pytest.mark.parametrize("tile", NARROW, ids=["blocks in turn", "blocks side by side"])
@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 9, 64), (37, 40, 200), (20, 264, 256)])
def test_narrow_linear(tile, dtype, rows, columns, depth):
    """A lost remainder of M, N or K; rows of another stride; a row that depends on its batch."""
    x, weight = (
        draw(rows, depth + 8, dtype=dtype)[:, :depth],
        draw(columns, depth, seed=1, dtype=dtype),
    )
    got = narrow_linear(x, weight, tile=tile)
    want = (x.float() @ weight.float().t()).to(dtype)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=depth**0.5 * 2e-2)
    if dtype is torch.float32:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    alone = narrow_linear(x[-1:], weight, tile=tile)
    assert torch.equal(alone[0], got[-1])
    torch.testing.assert_close(narrow_linear(x, weight), got, rtol=2e-2, atol=depth**0.5 * 2e-2)
    assert not torch.allclose(got, want.roll(1, 1), rtol=2e-2, atol=depth**0.5 * 2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [5, 4099, 70_001])
def test_argmax_of_rows(dtype, columns):
    """A part's columns counted from its start, the later of two equal scores, NaN or -0 in the wrong place."""
    scores = draw(7, columns + 3, dtype=dtype)[:, :columns]
    scores[1] = scores[1].clamp(max=0.5)
    scores[2] = float("-inf")
    scores[3, columns // 2] = float("nan")
    scores[4] = -0.0
    scores[4, columns // 2 :] = 0.0
    scores[5] = -scores[5].abs() - 1
    got = argmax_rows(scores)
    assert got.dtype == torch.int64
    assert torch.equal(got, torch.argmax(scores, dim=-1))
    assert not torch.equal(got, torch.argmax(scores.flip(1), dim=-1))


def test_no_rows():
    empty = draw(0, 16)
    assert rms_norm(empty, draw(16), EPS, unit_offset=True).shape == (0, 16)
    assert silu_mul(empty).shape == (0, 8) and silu_mul_quantized(empty).shape == (0, 8)
