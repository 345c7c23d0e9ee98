"""The CPU's gated delta rule: one step routine in decode, prompts, verify and replay.

Exact means torch.equal; every equality has a control that must differ. Both implementations, the
compiled kernels and their PyTorch twin, run the same cases (known faults A, F116 to F118).
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from sglang.kernels.ops.cpu import gdn, gdn_torch, library
from sglang.kernels.ops.cpu.replay import replay_tuples
from sglang.kernels.ops.cpu.structs import GdnShapeArgs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=40, suite="kernels")

HK, HV, K, V, W = 2, 4, 64, 48, 4
CONV_DIM = 2 * HK * K + HV * V
SLOTS, ROWS, STEPS = 7, 5, 4


@pytest.fixture(autouse=True)
def native():
    library.select("native")
    yield
    library.select("auto")


@dataclass
class Case:
    """Pools of one layer with random contents, weights, and rows to run."""

    conv: torch.Tensor
    ssm: torch.Tensor
    conv_weights: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor

    def rows(self, num_rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        widths = (CONV_DIM, HV, HV)
        return tuple(torch.randn(num_rows, w, generator=generator) for w in widths)

    def call(self, lens, slots, *, mode=gdn.MODE_ADVANCE, scratch=None, track=None) -> gdn.GdnCall:
        starts = torch.zeros(len(lens) + 1, dtype=torch.int32)
        starts[1:] = torch.tensor(lens).cumsum(0)
        return gdn.GdnCall(
            shape=GdnShapeArgs(HK=HK, HV=HV, K=K, V=V, W=W),
            state=gdn.state_args(self.conv, self.ssm, scratch),
            conv_weights=self.conv_weights.t().contiguous(),
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            mode=mode,
            starts=starts,
            slots=torch.tensor(slots, dtype=torch.int32),
            scratch_rows=torch.arange(len(lens), dtype=torch.int32),
            track_slots=None if track is None else torch.tensor(track[0]),
            track_rows=None if track is None else torch.tensor(track[1]),
        )


def make_case(state_dtype=torch.float32, conv_dtype=torch.float32) -> Case:
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return Case(
        conv=rand(SLOTS, CONV_DIM, W - 1).to(conv_dtype),
        ssm=(rand(SLOTS, HV, V, K) * 0.3).to(state_dtype),
        conv_weights=rand(CONV_DIM, W) * 0.5,
        A_log=rand(HV) * 0.5,
        dt_bias=rand(HV),
    )


def make_scratch(case: Case, kind: str, *, shared_columns: bool = False) -> gdn.VerifyScratch:
    """Verify scratch poisoned with NaN."""
    if shared_columns:
        physical = torch.full((ROWS, CONV_DIM, STEPS + W - 2), torch.nan, dtype=case.conv.dtype)
        strides = (physical.stride(0), 1, physical.stride(1), 1)
        window = physical.as_strided((ROWS, STEPS, CONV_DIM, W - 1), strides)
    else:
        window = torch.full((ROWS, STEPS, CONV_DIM, W - 1), torch.nan, dtype=case.conv.dtype)
    if kind == "snapshots":
        snapshot = torch.full((ROWS, STEPS, HV, V, K), torch.nan, dtype=case.ssm.dtype)
        return gdn.VerifyScratch(window, snapshot, None, None, None)
    shapes = ((HV, V), (HV, K), (HV,))
    parts = [torch.full((ROWS, STEPS, *shape), torch.nan) for shape in shapes]
    return gdn.VerifyScratch(window, None, *parts)


def run_replay(case: Case, scratch: gdn.VerifyScratch, rows, slots, steps, dests) -> None:
    index = [torch.tensor(x) for x in (rows, slots, steps, dests)]
    tuples = (scratch.u[None], scratch.k[None], scratch.g[None])
    replay_tuples(case.ssm[None], *tuples, *index)


def fp64_reference(case: Case, x, a, b, slot) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence of models.md 4.4 written straight down in float64."""
    inputs = torch.cat([case.conv[slot].double(), x.double().t()], dim=1)
    state = case.ssm[slot].double().clone()
    outs = []
    for t in range(x.shape[0]):
        mixed = (inputs[:, t : t + W] * case.conv_weights.double()).sum(1)
        mixed = mixed * torch.sigmoid(mixed)
        q = mixed[: HK * K].view(HK, K)
        k = mixed[HK * K : 2 * HK * K].view(HK, K)
        v = mixed[2 * HK * K :].view(HV, V)
        q = q / torch.sqrt(q.square().sum(-1, keepdim=True) + 1e-6) / K**0.5
        k = k / torch.sqrt(k.square().sum(-1, keepdim=True) + 1e-6)
        out = torch.zeros(HV, V, dtype=torch.float64)
        for h in range(HV):
            key, query = k[h // (HV // HK)], q[h // (HV // HK)]
            gate = torch.nn.functional.softplus(a[t, h].double() + case.dt_bias[h].double())
            decayed = state[h] * torch.exp(-torch.exp(case.A_log[h].double()) * gate)
            u = torch.sigmoid(b[t, h].double()) * (v[h] - decayed @ key)
            state[h] = decayed + u[:, None] * key[None, :]
            out[h] = state[h] @ query
        outs.append(out)
    return torch.stack(outs), state


def test_matches_the_formula_with_initial_state():
    """Wrong head mapping, gate, norm or window order shows against float64."""
    case = make_case()
    want, want_state = fp64_reference(case, *case.rows(9, 1), 3)
    x, a, b = case.rows(9, 1)
    out = gdn.forward(x, a, b, case.call([9], [3]))
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(case.ssm[3].double(), want_state, rtol=1e-4, atol=2e-5)
    assert torch.equal(case.conv[3], x[-3:].t())


def test_error_does_not_grow_with_length():
    """F115: a recurrence that is not in fp32, or a state rounded between tokens, drifts away."""
    case, rounded = make_case(), make_case(torch.bfloat16)
    rows = case.rows(400, 5)
    want, _ = fp64_reference(case, *rows, 3)
    error = (gdn.forward(*rows, case.call([400], [3])).double() - want).abs().amax(dim=(1, 2))
    assert error[200:].max() < 2 * error[:200].max() < 1e-5
    steps = [
        gdn.forward(*(part[t : t + 1] for part in rows), rounded.call([1], [3])) for t in range(40)
    ]
    assert (torch.cat(steps).double() - want[:40]).abs().max() > 1e-5, "the measure sees bf16"


def test_softplus_tail_and_strong_decay():
    """exp overflow in softplus, or a positive exponent, would give inf or NaN."""
    case = make_case()
    x, a, b = case.rows(3, 1)
    a = torch.tensor([[90.0], [-90.0], [25.0]]).expand(3, HV).contiguous()
    want, _ = fp64_reference(case, x, a, b, 3)
    out = gdn.forward(x, a, b, case.call([3], [3]))
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("conv_dtype", gdn.STATE_DTYPES, ids=["conv32", "conv16"])
def test_rows_of_prompt_decode_and_verify_are_equal(conv_dtype):
    """A verify row, a prompt row and a decode row of the same token have the same bits."""
    x, a, b = make_case().rows(STEPS, 2)
    prompt, decode = make_case(conv_dtype=conv_dtype), make_case(conv_dtype=conv_dtype)
    verify = make_case(conv_dtype=conv_dtype)
    out_prompt = gdn.forward(x, a, b, prompt.call([STEPS], [2]))
    rows = [
        gdn.forward(x[t : t + 1], a[t : t + 1], b[t : t + 1], decode.call([1], [2]))
        for t in range(STEPS)
    ]
    scratch = make_scratch(verify, "snapshots")
    before = (verify.ssm.clone(), verify.conv.clone())
    out_verify = gdn.forward(
        x, a, b, verify.call([STEPS], [2], mode=gdn.MODE_VERIFY, scratch=scratch)
    )
    assert torch.equal(torch.cat(rows), out_prompt)
    assert torch.equal(out_verify, out_prompt)
    assert torch.equal(prompt.ssm, decode.ssm) and torch.equal(prompt.conv, decode.conv)
    assert torch.equal(scratch.snapshot[0, STEPS - 1], prompt.ssm[2])
    assert torch.equal(scratch.window[0, STEPS - 1], prompt.conv[2])
    assert torch.equal(verify.ssm, before[0]) and torch.equal(verify.conv, before[1])


@pytest.mark.parametrize("shared_columns", [False, True], ids=["dense", "shared"])
@pytest.mark.parametrize("state_dtype", gdn.STATE_DTYPES, ids=["fp32", "bf16"])
def test_replay_equals_snapshot_at_every_length(state_dtype, shared_columns):
    """Request i accepts i + 1 steps; the replayed slot has the snapshot's bits."""
    lens, slots = [STEPS] * 4, [5, 1, 6, 2]
    snap, tuples = make_case(state_dtype), make_case(state_dtype)
    x, a, b = snap.rows(sum(lens), 3)
    scratch = {}
    outs = {}
    for kind, case in (("snapshots", snap), ("tuples", tuples)):
        scratch[kind] = make_scratch(case, kind, shared_columns=shared_columns)
        call = case.call(lens, slots, mode=gdn.MODE_VERIFY, scratch=scratch[kind])
        outs[kind] = gdn.forward(x, a, b, call)
    assert torch.equal(outs["snapshots"], outs["tuples"])
    assert torch.equal(scratch["snapshots"].window[:4], scratch["tuples"].window[:4])
    steps = [0, 1, 2, 3]
    run_replay(tuples, scratch["tuples"], [0, 1, 2, 3], slots, steps, slots)
    for row, (slot, step) in enumerate(zip(slots, steps)):
        assert torch.equal(tuples.ssm[slot], scratch["snapshots"].snapshot[row, step])
    for untouched in (0, 3, 4):
        assert torch.equal(tuples.ssm[untouched], snap.ssm[untouched])


def verified(state_dtype=torch.float32) -> tuple[Case, gdn.VerifyScratch, torch.Tensor]:
    """A verify of one request in slot 1 with tuples, and its snapshot after all steps."""
    case, snap = make_case(state_dtype), make_case(state_dtype)
    x, a, b = case.rows(STEPS, 4)
    scratch, other = make_scratch(case, "tuples"), make_scratch(snap, "snapshots")
    gdn.forward(x, a, b, case.call([STEPS], [1], mode=gdn.MODE_VERIFY, scratch=scratch))
    gdn.forward(x, a, b, snap.call([STEPS], [1], mode=gdn.MODE_VERIFY, scratch=other))
    return case, scratch, other.snapshot[0, STEPS - 1]


def test_control_unfused_replay_differs():
    """Control: rounding the product before the sum is a different state."""
    case, scratch, want = verified()
    state = case.ssm[1].clone()
    for t in range(STEPS):
        decay = torch.exp(scratch.g[0, t])[:, None, None]
        state = state * decay + scratch.u[0, t][:, :, None] * scratch.k[0, t][:, None, :]
    torch.testing.assert_close(state, want, rtol=1e-5, atol=1e-5)
    assert not torch.equal(state, want)


def test_control_rounding_between_steps_differs():
    """Control: a bf16 state rounded after every step is not the snapshot."""
    case, scratch, want = verified(torch.bfloat16)
    for step in range(STEPS):
        one = gdn.VerifyScratch(
            scratch.window,
            None,
            *(x[:, step : step + 1].contiguous() for x in (scratch.u, scratch.k, scratch.g)),
        )
        run_replay(case, one, [0], [1], [0], [1])
    assert not torch.equal(case.ssm[1], want)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("mode", ["native", "torch"])
def test_replay_skip_rules(mode, index_dtype):
    """Out-of-range steps, slots, rows and destinations write nothing; neighbours are served."""
    case, scratch, want = verified()
    library.select(mode)
    before = case.ssm.clone()
    cases = [
        (0, 1, -1, 2),
        (0, 1, STEPS, 2),
        (-1, 1, 0, 2),
        (ROWS, 1, 0, 2),
        (0, -1, 0, 2),
        (0, SLOTS, 0, 2),
        (0, 1, 0, -1),
        (0, 1, 0, SLOTS),
        (0, 1, STEPS - 1, 6),
    ]
    index = [torch.tensor(x, dtype=index_dtype) for x in zip(*cases)]
    replay_tuples(case.ssm[None], scratch.u[None], scratch.k[None], scratch.g[None], *index)
    assert torch.equal(case.ssm[:6], before[:6])
    torch.testing.assert_close(case.ssm[6], want, rtol=1e-6, atol=1e-6)
    if mode == "native":
        assert torch.equal(case.ssm[6], want)


def test_replay_reads_strided_pools():
    """Layer and slot strides of a pool that is a view of something larger."""
    case, scratch, want = verified()
    wide = torch.zeros(3, SLOTS, 2, HV, V, K)
    wide[1, :, 1] = case.ssm
    u, k, g = (
        torch.stack([x, x])[1:].expand(1, *x.shape) for x in (scratch.u, scratch.k, scratch.g)
    )
    index = [torch.tensor([x]) for x in (0, 1, STEPS - 1, 3)]
    replay_tuples(wide[1:2, :, 1], u, k, g, *index)
    assert torch.equal(wide[1, 3, 1], want)
    assert not wide[0].any() and not wide[2].any() and not wide[:, :, 0].any()


def test_packed_requests_do_not_influence_each_other_and_skipped_rows_are_zero():
    """Conv windows or states that leak between packed prompts (F116), and slot -1."""
    lens, slots = [5, 1, 7], [4, -1, 2]
    together = make_case()
    x, a, b = together.rows(sum(lens), 5)
    out = gdn.forward(x, a, b, together.call(lens, slots))
    assert not out[5:6].any()
    alone = make_case()
    for start, length, slot in ((0, 5, 4), (6, 7, 2)):
        rows = slice(start, start + length)
        part = gdn.forward(x[rows], a[rows], b[rows], alone.call([length], [slot]))
        assert torch.equal(part, out[rows])
    assert torch.equal(together.ssm, alone.ssm) and torch.equal(together.conv, alone.conv)


@pytest.mark.parametrize("boundary", [1, 2, 6, 9])
def test_track_stores_the_state_at_the_boundary(boundary):
    """A boundary state off by one row, or taken from the end of the chunk."""
    case, short = make_case(), make_case()
    x, a, b = case.rows(9, 6)
    gdn.forward(x, a, b, case.call([9], [1], track=([5], [boundary])))
    rows = slice(0, boundary)
    gdn.forward(x[rows], a[rows], b[rows], short.call([boundary], [1]))
    assert torch.equal(case.ssm[5], short.ssm[1])
    assert torch.equal(case.conv[5], short.conv[1])


def test_two_threads_give_the_same_bits():
    lens = [40] * 4
    one, two = make_case(), make_case()
    x, a, b = one.rows(sum(lens), 7)
    from_one = gdn.forward(x, a, b, one.call(lens, [1, 2, 3, 4]))
    set_threads(2)
    try:
        from_two = gdn.forward(x, a, b, two.call(lens, [1, 2, 3, 4]))
    finally:
        set_threads(1)
    assert torch.equal(from_one, from_two) and torch.equal(one.ssm, two.ssm)


def set_threads(count: int) -> None:
    library.library().sgl_set_threads(count)


def test_twin_step_matches_and_chunks_agree():
    """The PyTorch twin against the kernel; its chunked form against its step."""
    case = make_case()
    x, a, b = case.rows(150, 8)
    start = case.ssm[1].clone()
    conv_out, _ = gdn_torch.conv_rows(x, case.conv[1], case.conv_weights)
    q, k, v = gdn_torch.split_heads(
        conv_out, num_k_heads=HK, head_k_dim=K, num_v_heads=HV, head_v_dim=V
    )
    parts = gdn_torch.GDNInputs(q, k, v, *gdn_torch.gates(a, b, case.A_log, case.dt_bias))
    state, outs = start, []
    for t in range(150):
        state, _, out = gdn_torch.step(state, parts, t)
        outs.append(out)
    chunk_state, chunk_out = gdn_torch.chunked(start, parts)
    native = gdn.forward(x, a, b, case.call([150], [1]))
    for got, want in ((native, torch.stack(outs)), (case.ssm[1], state)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(chunk_out, torch.stack(outs), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(chunk_state, state, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
