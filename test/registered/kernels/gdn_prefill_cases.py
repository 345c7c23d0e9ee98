"""Checks of the chunked prefill and its convolution; run by test_gdn_prefill.py, interpreted or on a GPU.

The interpreter multiplies no bf16, so the 16-bit path is checked there with fp16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from sglang.kernels import triton_support
from sglang.kernels.ops.attention.fla.gdn_prefill import chunked_rule_torch, gdn_prefill
from sglang.kernels.ops.attention.fla.prefill_launch import HALF, PrefillTiles
from sglang.kernels.ops.attention.fla.prefill_plan import (
    PrefillPlan,
    PrefillTokens,
    plan_prefill,
)
from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn, causal_conv1d_update
from sglang.test.gdn_reference import GdnInputs, GdnTrace, gdn_reference

DEVICE = torch.device("cpu" if triton_support.INTERPRETING else "cuda")
ON_GPU = DEVICE.type == "cuda"
DTYPES = [torch.float32, torch.bfloat16 if ON_GPU else torch.float16]
GEOMETRIES = [(16, 32, 128), (16, 48, 128), (2, 4, 64)] if ON_GPU else [(1, 2, 64), (2, 2, 16)]
LENGTHS = [1, 63, 64, 65, 130, 200]
CUTS = [-1, 63, -1, 17, 128, 70]
SLOTS, DESTS, NUM_SLOTS = [3, 9, -1, 5, 0, 7], [-1, 1, -1, 2, 4, 6], 11
BOUND = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 3e-3}
NAN = float("nan")
COPIES = replace(HALF, state=replace(HALF.state, in_order=False))
POINTERS = replace(HALF, state=replace(COPIES.state, copy_engine=False))
DEEP = replace(HALF, state=replace(COPIES.state, num_stages=3))
WIDE = replace(HALF, state=replace(COPIES.state, block_v=128, num_warps=8))
OTHER_INVERSE = replace(HALF, chunk=replace(HALF.chunk, solve_precision="tf32"))


@dataclass
class Case:
    """Packed rows between NaN rows, in a wider tensor, and a pool whose other slots are NaN."""

    heads: tuple[int, int, int]
    lengths: list[int]
    mixed: torch.Tensor
    gates: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    pool: torch.Tensor
    tiles: PrefillTiles | None = None

    @property
    def scale(self) -> float:
        return self.heads[2] ** -0.5

    def tokens(self) -> PrefillTokens:
        h, hv, dim = self.heads
        total = sum(self.lengths)
        q, k, v, _ = self.mixed[1 : 1 + total].split((h * dim, h * dim, hv * dim, 16), dim=-1)
        a, b = self.gates[:total].split((hv, hv), dim=-1)
        parts = (t.unflatten(-1, (-1, dim)) for t in (q, k, v))
        return PrefillTokens(*parts, a, b, self.a_log, self.dt_bias)

    def span(self, i: int) -> slice:
        return slice(sum(self.lengths[:i]), sum(self.lengths[: i + 1]))


def make_case(
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    state: torch.dtype = torch.float32,
) -> Case:
    h, hv, dim = heads
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    total = sum(LENGTHS)
    mixed = torch.full((total + 2, (2 * h + hv) * dim + 16), NAN)
    mixed[1:-1, :-16] = draw(total, (2 * h + hv) * dim)
    pool = torch.full((NUM_SLOTS, hv, dim, dim), NAN)
    for slot in SLOTS:
        if slot >= 0:
            pool[slot] = draw(hv, dim, dim) * 0.2
    return Case(
        heads,
        list(LENGTHS),
        mixed.to(DEVICE, dtype),
        draw(total, 2 * hv).to(DEVICE, dtype),
        (draw(hv) * 0.5).to(DEVICE),
        (draw(hv) * 0.5).to(DEVICE),
        pool.to(DEVICE, state),
    )


def run(
    case: Case, cuts: list[int] | None = CUTS, plan: PrefillPlan | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    pool = case.pool.clone()
    slots = torch.tensor(SLOTS, device=DEVICE, dtype=torch.int32)
    dests = None if cuts is None else torch.tensor(DESTS, device=DEVICE)
    plan = plan or plan_prefill(case.lengths, cuts, DEVICE)
    out = gdn_prefill(
        case.tokens(),
        pool,
        slots,
        plan,
        scale=case.scale,
        track_dests=dests,
        tiles=case.tiles,
    )
    return out, pool


def run_alone(case: Case, i: int, cut: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Request i by itself."""
    span, pool = case.span(i), case.pool.clone()
    x = case.tokens().rows(span.start, span.stop)
    slots, dests = (torch.tensor([values[i]], device=DEVICE) for values in (SLOTS, DESTS))
    plan = plan_prefill([case.lengths[i]], [cut], DEVICE)
    out = gdn_prefill(x, pool, slots, plan, scale=case.scale, track_dests=dests, tiles=case.tiles)
    return out, pool


def reference(case: Case, i: int) -> GdnTrace:
    x, slot = case.tokens().rows(case.span(i).start, case.span(i).stop), SLOTS[i]
    start = case.pool[slot] if slot >= 0 else torch.zeros_like(case.pool[0])
    rows = (t[None] for t in (x.q, x.k, x.v, x.a, x.b))
    return gdn_reference(GdnInputs(*rows, case.a_log, case.dt_bias, start[None].float()))


def gap(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative distance; NaN counts as far."""
    distance = (got.double() - want.double()).norm() / want.double().norm()
    return float(distance.nan_to_num(nan=1e9))


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", list(BOUND) if ON_GPU else DTYPES, ids=str)
@pytest.mark.parametrize("heads", GEOMETRIES, ids=str)
def test_agrees_with_the_recurrence(heads, dtype):
    """A chunk bound off by one, a wrong decay, a lost start state, a head group mixed up, a boundary state of
    other rows, a write outside the destinations, a read outside the prompts (all NaN)."""
    case, bound = make_case(heads, dtype), BOUND[dtype]
    out, pool = run(case)
    untouched = [i for i in range(NUM_SLOTS) if i not in SLOTS + DESTS]
    assert untouched and same_bits(pool[untouched], case.pool[untouched])
    for i, cut in enumerate(CUTS):
        want = reference(case, i)
        assert gap(out[case.span(i)], want.out[0]) < bound
        if SLOTS[i] >= 0:
            assert gap(pool[SLOTS[i]], want.final[0]) < bound
        if cut > 0:
            assert gap(pool[DESTS[i]], want.snapshots[0, cut - 1]) < bound
            if cut > 1:
                assert gap(pool[DESTS[i]], want.snapshots[0, cut - 2]) > 5 * bound


def test_agrees_with_the_portable_form_and_is_not_blind():
    """The control: another decay, another beta, another key must be seen."""
    case = make_case(GEOMETRIES[-1], torch.float32)
    x, (out, _) = case.tokens(), run(case)
    starts = case.pool[[s if s >= 0 else 0 for s in SLOTS]].clone()
    starts[2] = 0
    want, _ = chunked_rule_torch(x, starts, LENGTHS, case.scale)
    assert gap(out, want) < 1e-4
    for wrong in (
        replace(x, A_log=x.A_log + 0.01),
        replace(x, b=x.b + 0.01),
        replace(x, k=x.k.roll(1, 0)),
    ):
        other, _ = chunked_rule_torch(wrong, starts, LENGTHS, case.scale)
        assert gap(out, other) > 3e-4


@pytest.mark.parametrize("heads", GEOMETRIES if ON_GPU else GEOMETRIES[1:], ids=str)
def test_bits_do_not_depend_on_the_batch(heads):
    """A tile chosen by the batch that changes bits, a sum over a neighbour's rows (its NaN would show), a whole
    chunk fetched where one row is all there is, a state kept for a request without a slot."""
    case = make_case(heads, DTYPES[1])
    out, pool = run(case)
    for i in (0, 2, 3, 5) if ON_GPU else (3,):
        alone, own = run_alone(case, i, CUTS[i])
        assert same_bits(alone, out[case.span(i)])
        for slot in (SLOTS[i], DESTS[i]):
            assert same_bits(own[slot], pool[slot])
        noisy = replace(case, mixed=torch.full_like(case.mixed, NAN))
        rows = slice(1 + case.span(i).start, 1 + case.span(i).stop)
        noisy.mixed[rows] = case.mixed[rows]
        again, states = run(noisy)
        assert same_bits(again[case.span(i)], alone) and same_bits(states[SLOTS[i]], own[SLOTS[i]])
    changed = replace(case, mixed=case.mixed.clone())
    changed.mixed[1 + case.span(5).start] *= 2
    assert not same_bits(run(changed)[0], out)


def test_bits_up_to_the_boundary_do_not_depend_on_it():
    """A cut that changes rows before it, or a boundary state unlike that of a prompt that ends there."""
    case = make_case(GEOMETRIES[-1], DTYPES[1])
    out, pool = run(case)
    plain, states = run(case, None)
    for i, cut in enumerate(CUTS):
        rows = case.span(i)
        shared = slice(rows.start, rows.start + cut if cut > 0 else rows.stop)
        assert same_bits(out[shared], plain[shared])
        if cut % 64 == 0:
            assert same_bits(out[rows], plain[rows])
            assert same_bits(pool[SLOTS[i]], states[SLOTS[i]])
    short = replace(case, lengths=[CUTS[5]], mixed=case.mixed[case.span(5).start :])
    short.gates = case.gates[case.span(5).start :]
    ended = case.pool.clone()
    plan = plan_prefill(short.lengths, None, DEVICE)
    slots = torch.tensor([SLOTS[5]], device=DEVICE)
    gdn_prefill(short.tokens(), ended, slots, plan, scale=case.scale, tiles=case.tiles)
    assert same_bits(ended[SLOTS[5]], pool[DESTS[5]])
    assert not same_bits(out[case.span(5)], plain[case.span(5)])


def test_narrow_states_and_repeats():
    """A state narrowed before its last row; a race (every run of one input must give the same bits)."""
    case = make_case(GEOMETRIES[0 if ON_GPU else -1], DTYPES[1], DTYPES[1])
    wide = replace(case, pool=case.pool.float())
    out, pool = run(case)
    exact_out, exact = run(wide)
    assert same_bits(out, exact_out)
    assert same_bits(pool[5], exact[5].to(DTYPES[1])) and same_bits(pool[6], exact[6].to(DTYPES[1]))
    for _ in range(20 if ON_GPU else 1):
        again, states = run(case)
        assert same_bits(again, out) and same_bits(states, pool)


@pytest.mark.parametrize("heads", GEOMETRIES if ON_GPU else GEOMETRIES[-1:], ids=str)
def test_bits_do_not_depend_on_the_tile_of_the_state(heads):
    """Copies from elsewhere or used before they are there; rows that cannot be copied; sums cut by the tile; on
    Hopper, a walk in order that multiplies or rounds otherwise than the form it falls back to."""
    case = make_case(heads, DTYPES[1])
    variants = [(CUTS, POINTERS), (CUTS, WIDE)]
    if ON_GPU:
        variants += [(CUTS, COPIES), (CUTS, DEEP), (None, COPIES)]
    for cuts, tiles in variants:
        out, pool = run(case, cuts)
        again, states = run(replace(case, tiles=tiles), cuts)
        assert same_bits(again, out) and same_bits(states, pool)
    out, pool = run(case)
    shifted = torch.full((case.mixed.shape[0], case.mixed.shape[1] + 1), NAN).to(case.mixed)
    shifted[:, 1:] = case.mixed
    odd = replace(case, mixed=shifted[:, 1:])
    again, states = run(odd)
    assert same_bits(again, out) and same_bits(states, pool)
    assert not same_bits(run(replace(case, tiles=OTHER_INVERSE))[0], out)


@pytest.mark.parametrize("tiles", [HALF, COPIES] if ON_GPU else [HALF])
@pytest.mark.parametrize("heads", GEOMETRIES if ON_GPU else GEOMETRIES[-1:], ids=str)
def test_long_prompts_repeat(heads, tiles):
    """A stage of the ring overwritten while it is read, a wait for the turn before: every run must give the same
    bits, and those of the form without a ring."""
    case = replace(make_case(heads, DTYPES[1]), tiles=tiles)
    case.lengths = [1500, 640, 1] if ON_GPU else [130, 64, 1]
    cuts = [70, case.lengths[1], -1]
    total = sum(case.lengths)
    case.mixed = torch.randn(total + 2, case.mixed.shape[1], device=DEVICE).to(DTYPES[1])
    case.gates = torch.randn(total, case.gates.shape[1], device=DEVICE).to(DTYPES[1])
    plan = plan_prefill(case.lengths, cuts, DEVICE)
    slots = torch.tensor(SLOTS[3:], device=DEVICE, dtype=torch.int32)
    dests = torch.tensor(DESTS[3:], device=DEVICE)

    def once(tiles: PrefillTiles) -> tuple[torch.Tensor, torch.Tensor]:
        states = case.pool.clone()
        out = gdn_prefill(
            case.tokens(), states, slots, plan, scale=case.scale, track_dests=dests, tiles=tiles
        )
        return out, states

    out, states = once(POINTERS)
    assert bool(out.isfinite().all()) and not same_bits(once(OTHER_INVERSE)[0], out)
    for _ in range(20 if ON_GPU else 1):
        again, ended = once(tiles)
        assert same_bits(again, out) and same_bits(ended, states)


def test_keys_that_nearly_repeat():
    """An inverse that loses its digits where the matrix is far from one: all keys alike, no decay, beta near 1."""
    case = make_case(GEOMETRIES[-1], DTYPES[1])
    h, hv, dim = case.heads
    columns = slice(h * dim, 2 * h * dim)
    rows = case.mixed[1:-1, columns]
    rows.copy_(0.05 * rows + case.mixed[1, columns])
    case.gates[:, :hv] = -9
    case.gates[:, hv:] = 9
    out, pool = run(case)
    for i in (4, 5):
        want = reference(case, i)
        assert gap(out[case.span(i)], want.out[0]) < 4 * BOUND[DTYPES[1]]
        assert gap(pool[SLOTS[i]], want.final[0]) < 4 * BOUND[DTYPES[1]]


def test_nothing_to_do_and_bad_input():
    """An empty call that launches; errors that do not name the value."""
    case = make_case(GEOMETRIES[-1], torch.float32)
    case.lengths = []
    x, slots = case.tokens(), torch.empty(0, dtype=torch.int32, device=DEVICE)
    plan = plan_prefill([], None, DEVICE)
    assert gdn_prefill(x, case.pool, slots, plan, scale=1.0).shape[0] == 0
    with pytest.raises(ValueError, match="-3"):
        plan_prefill([4, -3], None, DEVICE)
    with pytest.raises(ValueError, match="1 entries for 2 prompts"):
        plan_prefill([4, 3], [1], DEVICE)
    with pytest.raises(ValueError, match="covers 7 rows"):
        gdn_prefill(x, case.pool, slots, plan_prefill([7], None, DEVICE), scale=1.0)


@pytest.mark.parametrize("width", [2, 4])
def test_convolution_of_a_prompt_equals_its_tokens_one_by_one(width):
    """Another order of taps or sums than in decode, a window off by one at a program's edge, a lost old window."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, DTYPES[1])

    dim, lengths, cut = 1040, [1, 3, 37, 33], [-1, 2, 34, 33]
    x, weight, state = draw(sum(lengths), dim), draw(dim, width), draw(9, dim, width - 1)
    slots = torch.tensor([4, -1, 2, 7], device=DEVICE)
    dests = torch.tensor([-1, 8, 1, 3], device=DEVICE)
    loc = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    whole, stepped = state.clone(), state.clone()
    rows = torch.tensor(cut, device=DEVICE)
    out = causal_conv1d_fn(
        x.t(), weight, None, whole, loc, lengths, slots, track_dests=dests, track_rows=rows
    ).t()
    for t in range(max(lengths)):
        live = [i for i, length in enumerate(lengths) if t < length]
        at = loc[live].long() + t
        want = causal_conv1d_update(
            x[at], stepped, weight, None, "silu", conv_state_indices=slots[live]
        )
        assert torch.equal(out[at], want)
        for i in live:
            if t + 1 == cut[i] and slots[i] >= 0:
                assert torch.equal(whole[dests[i]], stepped[slots[i]])
    kept = [0, 2, 4, 5, 6, 7, 8]
    assert torch.equal(whole[kept], stepped[kept])
    assert not torch.equal(whole[2], state[2])
