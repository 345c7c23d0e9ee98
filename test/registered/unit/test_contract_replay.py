"""`_reconstruct_ssm_from_tuples` as outside callers use it: positional, on CPU tensors."""

from __future__ import annotations

import inspect

import pytest
import torch

from sglang.kernels.exact_math import fma_f32
from sglang.srt.layers.attention.hybrid_linear_attn_backend import (
    _reconstruct_ssm_from_tuples as reconstruct,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="unit")

L, S, R, D, HV, V, K = 2, 8, 5, 4, 2, 8, 16


def ring(extra: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(0)
    lead = (L, R, D + extra, HV)
    u, k = torch.randn(*lead, V), torch.nn.functional.normalize(torch.randn(*lead, K), dim=-1)
    return [u, k, -torch.rand(*lead)]


def advance(start: torch.Tensor, u, k, g, row: int, step: int) -> torch.Tensor:
    """[L, HV, V, K] fp32: one rounded multiply and one fused multiply-add a step."""
    h = start.float()
    for t in range(step + 1):
        decayed = h * g[:, row, t].exp()[..., None, None]
        key = k[:, row, t][:, :, None, :].expand_as(h).contiguous()
        update = u[:, row, t][:, :, :, None].expand_as(h).contiguous()
        h = fma_f32(key, update, decayed)
    return h


def check(got: torch.Tensor, start: torch.Tensor, tuples, plan: dict[int, tuple[int, int, int]]):
    """plan: destination -> (slot, row, step). Everything else must keep its bits."""
    for dest in range(S):
        if dest in plan:
            slot, row, step = plan[dest]
            want = advance(start[:, slot], *tuples, row, step)
            tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[got.dtype]
            assert torch.allclose(got[:, dest].float(), want, rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(got[:, dest], start[:, dest])


def test_signature():
    parameters = inspect.signature(reconstruct).parameters
    assert list(parameters) == [
        *("ssm_states", "u_cache", "k_cache", "g_cache", "pool_indices", "cache_indices"),
        *("step_indices", "dest_indices", "use_ptx"),
    ]
    assert parameters["dest_indices"].default is parameters["use_ptx"].default is None


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
def test_seven_positional_arguments_in_place(state, dtype):
    """Catches: row and slot indices exchanged; a step not inclusive; an index dtype refused."""
    tuples = ring()
    start = torch.randn(L, S, HV, V, K).to(state)
    got = start.clone()
    index = [torch.tensor(x, dtype=dtype) for x in ([4, 0, 2], [1, 6, 0], [3, 0, 2])]
    assert reconstruct(got, *tuples, *index) is None
    check(got, start, tuples, {1: (1, 4, 3), 6: (6, 0, 0), 0: (0, 2, 2)})


def test_rows_that_are_skipped():
    """Catches: an index clamped or wrapped instead of skipped; step D looped to the end."""
    tuples = ring()
    start = torch.randn(L, S, HV, V, K)
    got = start.clone()
    #             ok  step<0 step=D slot<0 slot=S row<0 row=R dest<0 dest=S
    rows = torch.tensor([1, 0, 0, 0, 0, -1, R, 2, 2])
    slots = torch.tensor([2, 3, 3, -1, S, 3, 3, 3, 3])
    steps = torch.tensor([1, -1, D, 0, 0, 0, 0, 0, 0])
    dests = torch.tensor([7, 4, 4, 4, 4, 4, 4, -1, S])
    reconstruct(got, *tuples, rows, slots, steps, dests)
    check(got, start, tuples, {7: (2, 1, 1)})


def test_destination_leaves_the_source_alone():
    tuples = ring()
    start = torch.randn(L, S, HV, V, K)
    got = start.clone()
    one = [torch.tensor([x]) for x in (3, 5, 2, 6)]
    reconstruct(got, *tuples, *one)
    check(got, start, tuples, {6: (5, 3, 2)})


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
def test_strided_pool_equals_dense_pool(state):
    """Catches: a slot or layer stride computed from the shape; a write outside the entries."""
    tuples = ring()
    envelope = torch.randn(S, L, HV * V * K + 24).to(state)
    before = envelope.clone()
    pool = envelope[:, :, 8 : 8 + HV * V * K].unflatten(-1, (HV, V, K)).transpose(0, 1)
    assert not pool.is_contiguous() and pool.shape == (L, S, HV, V, K)
    dense = pool.clone()
    index = [torch.tensor(x) for x in ([0, 1], [7, 3], [3, 1])]
    reconstruct(pool, *tuples, *index)
    reconstruct(dense, *tuples, *index)
    assert torch.equal(pool, dense)
    assert torch.equal(envelope[:, :, :8], before[:, :, :8])
    assert torch.equal(envelope[:, :, 8 + HV * V * K :], before[:, :, 8 + HV * V * K :])


def test_strided_rings_equal_dense_rings():
    """Catches: a ring pitch taken from a shape: here rings are slices of longer ones."""
    wide = ring(extra=3)
    narrow = [t[:, :, :D] for t in wide]
    start = torch.randn(L, S, HV, V, K)
    got, want = start.clone(), start.clone()
    index = [torch.tensor(x) for x in ([2, 4], [1, 2], [3, 2])]
    reconstruct(got, *narrow, *index)
    reconstruct(want, *(t.contiguous() for t in narrow), *index)
    assert torch.equal(got, want) and not torch.equal(got, start)


def test_bf16_is_rounded_once_at_the_end():
    """Catches: a state narrowed between steps. The control with a cast a step must differ."""
    tuples = ring()
    start = torch.randn(L, S, HV, V, K).bfloat16()
    got, exact = start.clone(), start.float()
    index = [torch.tensor(x) for x in ([3], [2], [3])]
    reconstruct(exact, *tuples, *index)
    reconstruct(got, *tuples, *index)
    assert torch.equal(got[:, 2], exact[:, 2].bfloat16())
    stepwise = start[:, 2]
    for t in range(4):
        cell = [x[:, :, t : t + 1] for x in tuples]
        stepwise = advance(stepwise, *cell, 3, 0).bfloat16()
    assert not torch.equal(got[:, 2], stepwise)


def test_prefix_property_is_exact():
    """Replaying to step t and going on from there is replaying to the end (fp32): no hidden rounding."""
    tuples = ring()
    start = torch.randn(L, S, HV, V, K)
    whole, parts = start.clone(), start.clone()
    row, slot = torch.tensor([1]), torch.tensor([4])
    reconstruct(whole, *tuples, row, slot, torch.tensor([3]))
    reconstruct(parts, *tuples, row, slot, torch.tensor([1]))
    reconstruct(parts, *(t[:, :, 2:] for t in tuples), row, slot, torch.tensor([1]))
    assert torch.equal(whole, parts)


def test_nothing_is_read_past_the_step_or_from_other_rows():
    """Catches: a loop over the pitch with masked results; NaN elsewhere must not leak."""
    tuples = ring()
    poisoned = [torch.full_like(t, float("nan")) for t in tuples]
    for bad, good in zip(poisoned, tuples):
        bad[:, 3, :2] = good[:, 3, :2]
    start = torch.randn(L, S, HV, V, K)
    got, want = start.clone(), start.clone()
    index = [torch.tensor([x]) for x in (3, 5, 1)]
    reconstruct(got, *poisoned, *index)
    reconstruct(want, *tuples, *index)
    assert torch.equal(got, want)


def test_empty_batch_returns():
    start = torch.randn(L, S, HV, V, K)
    got = start.clone()
    empty = torch.empty(0, dtype=torch.int64)
    reconstruct(got, *ring(), empty, empty, empty)
    reconstruct(got, *ring(), empty, empty, empty, empty)
    assert torch.equal(got, start)


def test_order_matters():
    """The negative control: in place first, then the boundary state, gives another boundary state."""
    tuples = ring()
    start = torch.randn(L, S, HV, V, K)
    row, slot, dest = torch.tensor([1]), torch.tensor([4]), torch.tensor([6])
    step, track = torch.tensor([3]), torch.tensor([1])
    right, wrong = start.clone(), start.clone()
    reconstruct(right, *tuples, row, slot, track, dest)
    reconstruct(right, *tuples, row, slot, step)
    reconstruct(wrong, *tuples, row, slot, step)
    reconstruct(wrong, *tuples, row, slot, track, dest)
    check(right, start, tuples, {4: (4, 1, 3), 6: (4, 1, 1)})
    assert torch.equal(right[:, 4], wrong[:, 4]) and not torch.equal(right[:, 6], wrong[:, 6])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
