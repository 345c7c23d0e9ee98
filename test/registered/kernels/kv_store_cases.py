"""Checks of the kernels that write the paged pool; run by test_paged_attention.py."""

from __future__ import annotations

import pytest
import torch

from sglang.kernels import triton_support
from sglang.kernels.ops.attention.paged.store import (
    FEW_ROWS,
    STORE_FEW,
    STORE_MANY,
    NormRope,
    StoreLaunch,
    norm_rope_store,
    store_kv,
    store_launch,
)
from sglang.kernels.ops.fused.rows import norm_rope
from sglang.srt.mem_cache.pool.kv_pool import MHATokenToKVPool

DEVICE = torch.device("cpu" if triton_support.INTERPRETING else "cuda")
SLOTS = [5, -1, 2, 9, -1]


def projections(*, heads=4, kv_heads=2, dim=24, dtype=torch.float32, gate=False):
    """Strided q, k, v views of one projection of len(SLOTS) rows, as the layer hands them over."""
    generator = torch.Generator().manual_seed(0)
    q_cols = heads * dim * (2 if gate else 1)
    both = torch.randn(len(SLOTS), q_cols + 2 * kv_heads * dim, generator=generator)
    q, k, v = both.to(DEVICE, dtype).split((q_cols, kv_heads * dim, kv_heads * dim), dim=-1)
    q = q.view(len(SLOTS), heads, -1)[..., :dim]
    shape = (len(SLOTS), kv_heads, dim)
    return q, k.view(shape), v.view(shape)


def poisoned(dtype, kv_heads=2, dim=24):
    return torch.full((12, kv_heads, dim), float("nan"), device=DEVICE).to(dtype)


def as_fp8_holds(tensor):
    """In the interpreter, whose cast to fp8 loses the carry of a mantissa, what needs no rounding."""
    return tensor.to(torch.float8_e4m3fn).float() if triton_support.INTERPRETING else tensor


def bits(tensor):
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def test_rows_of_any_stride():
    """Expanded rows, whose last dim has stride 0, stored as if they were dense."""
    rows = torch.arange(1.0, len(SLOTS) + 1, device=DEVICE)[:, None, None].expand(-1, 2, 24)
    keys, values = poisoned(torch.float32), poisoned(torch.float32)
    slots = torch.tensor(SLOTS, device=DEVICE)
    store_kv(rows, -rows, slots, keys, values)
    live = slots >= 0
    assert torch.equal(keys[slots[live]], rows[live])
    assert torch.equal(values[slots[live]], -rows[live])


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
def test_rows_land_in_their_slots_and_nowhere_else(kv_dtype):
    """Catches a slot of -1 that is clamped into range, and strides of a contiguous tensor."""
    _, k, v = projections()
    if kv_dtype == torch.float8_e4m3fn:
        k, v = as_fp8_holds(k), as_fp8_holds(v)
    keys, values = poisoned(kv_dtype), poisoned(kv_dtype)
    slots = torch.tensor(SLOTS, device=DEVICE)
    store_kv(k, v, slots, keys, values)
    live = slots >= 0
    for rows, buffer in ((k, keys), (v, values)):
        got = buffer[slots[live]].float()
        if kv_dtype == torch.float32:
            assert torch.equal(got, rows[live])
        else:
            torch.testing.assert_close(got, rows[live], rtol=0.07, atol=2e-3)
        untouched = [i for i in range(len(buffer)) if i not in SLOTS]
        assert buffer[untouched].float().isnan().all()


def test_fp8_is_the_rounding_of_pytorch():
    """Exact, ties and subnormals included (catches a cast that truncates)."""
    _, k, v = projections(dtype=torch.bfloat16)
    k, v = as_fp8_holds(k), as_fp8_holds(v * 2e-2)
    keys, values = poisoned(torch.float8_e4m3fn), poisoned(torch.float8_e4m3fn)
    slots = torch.tensor([0, 1, 2, 3, 4], device=DEVICE)
    store_kv(k, v, slots, keys, values)
    assert torch.equal(bits(keys[:5]), bits(k.to(torch.float8_e4m3fn)))
    assert torch.equal(bits(values[:5]), bits(v.to(torch.float8_e4m3fn)))


@pytest.mark.parametrize("gate", [False, True], ids=["plain", "gated"])
def test_the_fused_form_equals_its_parts(gate):
    """Norm, rotation and store at once against the separate ops; catches a head that takes another's weight."""
    q, k, v = projections(gate=gate)
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(2, 24, generator=generator).to(DEVICE)
    angles = torch.rand(40, 8, generator=generator).to(DEVICE) * 6
    norm = NormRope(weights[0], weights[1], angles.cos(), angles.sin(), 1e-6, True)
    positions = torch.tensor([7, 0, 8, 30, 0], device=DEVICE)
    slots = torch.tensor(SLOTS, device=DEVICE)
    keys, values = poisoned(torch.float32), poisoned(torch.float32)
    got = norm_rope_store(
        q, k, v, norm, positions=positions, slots=slots, k_buffer=keys, v_buffer=values
    )
    live = slots >= 0
    parts = [
        norm_rope(x, weight, norm.cos, norm.sin, positions, norm.eps, unit_offset=True)
        for x, weight in ((q, weights[0]), (k, weights[1]))
    ]
    want_keys, want_values = poisoned(torch.float32), poisoned(torch.float32)
    store_kv(parts[1], v, slots, want_keys, want_values)
    close = {"rtol": 1e-6, "atol": 1e-6, "equal_nan": True}
    torch.testing.assert_close(got[live], parts[0][live], **close)
    torch.testing.assert_close(keys, want_keys, **close)
    assert torch.equal(values[slots[live]], want_values[slots[live]])


LAUNCHES = {
    "few rows": STORE_FEW,
    "many rows": STORE_MANY,
    "one": StoreLaunch(1),
    "four": StoreLaunch(4, 2),
}
KV_OF_16_BITS_OR_LESS = [torch.bfloat16, torch.float8_e4m3fn][
    : 1 if triton_support.INTERPRETING else 2
]  # its cast to fp8 loses the carry of a mantissa


@pytest.mark.parametrize("kv_dtype", KV_OF_16_BITS_OR_LESS)
@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
@pytest.mark.parametrize(("dim", "half"), [(240, 16), (256, 32)])
def test_heads_side_by_side_are_heads_alone(launch, dim, half, kv_dtype):
    """A partner of another head, a key head with a query's weight, -0 turned to 0 beyond the rotated dims."""
    q, k, v = projections(heads=9, dim=dim, dtype=torch.bfloat16, gate=True)
    q[0, 0, -4:] = -0.0
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(2, dim, generator=generator).to(DEVICE)
    angles = torch.rand(40, half, generator=generator).to(DEVICE) * 6
    norm = NormRope(weights[0], weights[1], angles.cos(), angles.sin(), 1e-6, True)
    positions = torch.tensor([7, 0, 8, 30, 0], device=DEVICE)
    slots = torch.tensor(SLOTS, device=DEVICE)
    results = []
    assert launch.serves(q, half) and not StoreLaunch(launch.heads, 16).serves(q, half)
    for each in (StoreLaunch(), launch):
        keys, values = (poisoned(kv_dtype, dim=dim) for _ in range(2))
        pools = {"k_buffer": keys, "v_buffer": values}
        out = norm_rope_store(q, k, v, norm, positions=positions, slots=slots, **pools, launch=each)
        results.append([out[slots >= 0], keys, values])
    for want, got in zip(*results, strict=True):
        if (
            triton_support.INTERPRETING
        ):  # it adds the squares of one head and of several differently
            torch.testing.assert_close(got, want, rtol=8e-3, atol=1e-6, equal_nan=True)
        else:
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
        assert not torch.equal(got.view(torch.uint8), want.view(torch.uint8).roll(1, 1))


def test_rows_choose_the_launch():
    """Few rows launched as many are 0.5 us slower a layer, many rows as few 49 us."""
    assert store_launch(1) == store_launch(FEW_ROWS) == STORE_FEW
    assert store_launch(FEW_ROWS + 1) == STORE_MANY != STORE_FEW


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
def test_the_pool_writes_with_the_kernel(kv_dtype):
    """Page 0 must stay as it was when a row has slot -1."""
    pool = MHATokenToKVPool(10, 2, kv_dtype, 2, 24, 1, DEVICE)
    _, k, v = projections()
    if kv_dtype == torch.float8_e4m3fn:
        k, v = as_fp8_holds(k), as_fp8_holds(v)
    pool.set_kv_buffer(0, torch.tensor(SLOTS, device=DEVICE), k, v)
    keys, values = pool.get_kv_buffer(0)
    assert not keys[:2].float().any() and not values[:2].float().any()
    torch.testing.assert_close(keys[9].float(), k[3].float(), rtol=0.07, atol=2e-3)
    torch.testing.assert_close(values[5].float(), v[0].float(), rtol=0.07, atol=2e-3)
