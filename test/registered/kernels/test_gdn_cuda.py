"""Exactness of the GDN kernels on a GPU: both implementations, both scratch kinds, every commit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from sglang.kernels.ops.attention.fla.fused_sigmoid_gating_recurrent import (
    fused_sigmoid_gating_delta_rule_update,
)
from sglang.kernels.ops.gdn_cuda.deferred import DeferredCommit
from sglang.kernels.ops.gdn_cuda.launch_table import TABLE_TILES, VerifyTile
from sglang.kernels.ops.gdn_cuda.module import unavailable_reason
from sglang.kernels.ops.gdn_cuda.verify import VerifyInputs, run_verify
from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn, causal_conv1d_update
from sglang.kernels.ops.mamba.mamba_state_scatter_triton import fused_mamba_state_scatter_with_mask
from sglang.kernels.ops.mamba.tuple_replay import commit_tuples, replay_tuples
from sglang.test.ci.ci_register import register_amd_ci, register_cuda_ci
from sglang.test.gdn_reference import (
    GdnInputs,
    conv_reference,
    gdn_reference,
    unfused_step_state,
)

register_cuda_ci(est_time=90, stage="base-b", runner_config="1-gpu-large")
register_amd_ci(est_time=90, suite="stage-b-test-1-gpu-large-amd")
register_amd_ci(est_time=90, suite="stage-b-test-1-gpu-small-amd-mi35x")

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA or ROCm device", allow_module_level=True)

DIM = 128
DEVICE = torch.device("cuda")
HEADS = [(16, 32), (4, 16), (16, 48)]
STATES = [torch.float32, torch.bfloat16]
IMPLEMENTATIONS = ["triton", "cuda"]


def need(implementation: str) -> None:
    if implementation == "cuda" and (reason := unavailable_reason()) is not None:
        pytest.skip(f"CUDA C++ kernel: {reason}")


@dataclass
class Case:
    """N requests x D tokens of one layer. Slots and scratch rows are scattered, R > N, S > N."""

    n: int
    d: int
    h: int
    hv: int
    dtype: torch.dtype
    seed: int = 0

    def __post_init__(self) -> None:
        gen = torch.Generator(DEVICE).manual_seed(self.seed + self.n * 31 + self.d)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=DEVICE, generator=gen)

        tokens = self.n * self.d
        self.width = (2 * self.h + self.hv) * DIM
        self.mixed = randn(tokens, self.width).bfloat16()
        self.gates = randn(tokens, 2 * self.hv).bfloat16()
        self.A_log = randn(self.hv) * 0.5
        self.dt_bias = randn(self.hv) * 0.5
        self.num_slots, self.num_rows = self.n + 3, self.n + 2
        self.pool = (randn(self.num_slots, self.hv, DIM, DIM) * 0.2).to(self.dtype)
        order = torch.randperm(self.num_slots, device=DEVICE, generator=gen)
        self.slots = order[: self.n].int()
        rows = torch.randperm(self.num_rows, device=DEVICE, generator=gen)
        self.rows = rows[: self.n].int()

    def qkv(self) -> list[torch.Tensor]:
        parts = self.mixed.split((self.h * DIM, self.h * DIM, self.hv * DIM), dim=-1)
        return [part.unflatten(-1, (-1, DIM)) for part in parts]

    def ring(self, pitch: int) -> list[torch.Tensor]:
        nan = float("nan")
        shapes = ((self.hv, DIM), (self.hv, DIM), (self.hv,))
        return [torch.full((self.num_rows, pitch, *s), nan, device=DEVICE) for s in shapes]

    def snapshots(self, pitch: int) -> torch.Tensor:
        shape = (self.num_rows, pitch, self.hv, DIM, DIM)
        return torch.full(shape, float("nan"), device=DEVICE, dtype=self.dtype)

    def run(self, implementation: str, *, contiguous: bool = False, **record) -> torch.Tensor:
        """[N*D, HV, 128]; record: snapshots=..., tuples=[u, k, g]."""
        q, k, v = self.qkv()
        a, b = self.gates.chunk(2, dim=-1)
        if contiguous:
            q, k, v, a, b = (t.contiguous() for t in (q, k, v, a, b))
        tuples = record.get("tuples")
        if implementation == "cuda":
            x = VerifyInputs(
                q, k, v, a, b, self.A_log, self.dt_bias, self.pool, self.slots, self.rows
            )
            tuples = None if tuples is None else tuple(tuples)
            return run_verify(x, scale=DIM**-0.5, snapshots=record.get("snapshots"), tuples=tuples)
        u, kk, g = tuples if tuples is not None else (None, None, None)
        out = fused_sigmoid_gating_delta_rule_update(
            A_log=self.A_log,
            a=a,
            dt_bias=self.dt_bias,
            softplus_beta=1.0,
            softplus_threshold=20.0,
            q=q[None],
            k=k[None],
            v=v[None],
            b=b,
            initial_state_source=self.pool,
            initial_state_indices=self.slots,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=torch.arange(0, self.n * self.d + 1, self.d, device=DEVICE).int(),
            disable_state_update=True,
            intermediate_states_buffer=record.get("snapshots"),
            intermediate_state_indices=self.rows,
            cache_steps=self.d,
            u_states_buffer=u,
            k_states_buffer=kk,
            g_states_buffer=g,
        )
        return out[0]

    def reference(self):
        def shaped(t: torch.Tensor) -> torch.Tensor:
            return t.reshape(self.n, self.d, *t.shape[1:])

        q, k, v = (shaped(t) for t in self.qkv())
        a, b = (shaped(t) for t in self.gates.chunk(2, dim=-1))
        start = torch.zeros(self.n, self.hv, DIM, DIM, device=DEVICE, dtype=self.dtype)
        for i, slot in enumerate(self.slots.tolist()):
            if 0 <= slot < self.num_slots:
                start[i] = self.pool[slot]
        return gdn_reference(GdnInputs(q, k, v, a, b, self.A_log, self.dt_bias, start))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", STATES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("heads", HEADS, ids=lambda h: f"{h[0]}x{h[1]}")
@pytest.mark.parametrize("d", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("n", [1, 7])
def test_tuples_equal_snapshots_at_every_step(n, d, heads, dtype, implementation):
    """Catches: any difference of arithmetic between the modes or in the replay, pitch taken from the width."""
    need(implementation)
    case = Case(n, d, *heads, dtype)
    before = case.pool.clone()
    pitch = d + 1
    snaps, ring = case.snapshots(pitch), case.ring(pitch)
    out = case.run(implementation, snapshots=snaps)
    assert torch.equal(out, case.run(implementation, tuples=ring))
    assert torch.equal(case.pool, before)
    rows, slots = case.rows.long(), case.slots.long()
    unused = [r for r in range(case.num_rows) if r not in rows.tolist()]
    for t in (snaps, *ring):
        assert t[:, d:].isnan().all() and t[unused].isnan().all()
        assert not t[rows, :d].isnan().any()
    want = case.reference()
    assert torch.allclose(
        out.float().view(n, d, heads[1], DIM), want.out.float(), atol=3e-2, rtol=2e-2
    )
    layered = [t[None] for t in ring]
    for step in range(d):
        pool = case.pool.clone()[None]
        steps = torch.full((n,), step, device=DEVICE)
        replay_tuples(pool, *layered, case.rows, case.slots, steps)
        assert torch.equal(pool[0, slots], snaps[rows, step])
        idle = [s for s in range(case.num_slots) if s not in slots.tolist()]
        assert torch.equal(pool[0, idle], before[idle])
        portable = case.pool.clone()[None]
        scattered = case.pool.clone()[None]
        fused_mamba_state_scatter_with_mask(scattered, snaps[None], case.slots, steps, case.rows)
        assert torch.equal(scattered, pool)
        del portable


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_unfused_replay_is_caught(implementation):
    """Control: rounding the product k*u, or rounding to bf16 between steps, changes the state."""
    need(implementation)
    case = Case(3, 4, 16, 32, torch.float32)
    snaps, ring = case.snapshots(4), case.ring(4)
    case.run(implementation, snapshots=snaps)
    case.run(implementation, tuples=ring)
    row, slot = int(case.rows[0]), int(case.slots[0])
    state = case.pool[slot].clone()
    for t in range(4):
        u, k, g = (r[row, t] for r in ring)
        state = unfused_step_state(state, g.exp(), k, u)
    assert not torch.equal(state, snaps[row, 3])
    assert torch.allclose(state, snaps[row, 3], atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("d", [1, 4])
def test_strided_inputs_equal_contiguous_copies(d, implementation):
    """Catches: a layout or a stride that changes the result."""
    need(implementation)
    case = Case(5, d, 16, 32, torch.float32)
    strided, copied = case.ring(d), case.ring(d)
    out = case.run(implementation, tuples=strided)
    assert torch.equal(out, case.run(implementation, contiguous=True, tuples=copied))
    rows = case.rows.long()
    assert all(torch.equal(s[rows], c[rows]) for s, c in zip(strided, copied))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padded_and_out_of_range_rows_touch_nothing(implementation):
    """Catches: padding clamped to a live slot, NaN from an unwritten output, rows recorded past the scratch."""
    need(implementation)
    case = Case(6, 4, 16, 32, torch.float32)
    case.slots[1], case.slots[2] = -1, case.num_slots
    case.rows[3], case.rows[4] = -1, case.num_rows
    before, ring, snaps = case.pool.clone(), case.ring(4), case.snapshots(4)
    out = case.run(implementation, tuples=ring)
    assert torch.equal(out, case.run(implementation, snapshots=snaps))
    assert torch.equal(case.pool, before) and not out.isnan().any()
    want = case.reference().out.float()
    assert torch.allclose(out.float().view(6, 4, 32, DIM), want, atol=3e-2, rtol=2e-2)
    recorded = sorted(r for r in case.rows.tolist() if 0 <= r < case.num_rows)
    for t in (snaps, *ring):
        for row in range(case.num_rows):
            assert t[row].isnan().any().item() == (row not in recorded)


@pytest.mark.parametrize("dtype", STATES, ids=["fp32", "bf16"])
def test_commit_tracks_first_and_skips_invalid_rows(dtype):
    """Catches: commit before track, steps past the ring, a track copy over a working slot of the batch."""
    layers, n, d, hv = 3, 6, 4, 8
    gen = torch.Generator(DEVICE).manual_seed(3)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, generator=gen)

    states = randn(layers, 2 * n, hv, DIM, DIM).to(dtype)
    u, k = randn(layers, n, d, hv, DIM), randn(layers, n, d, hv, DIM)
    g = -randn(layers, n, d, hv).abs()
    rows = torch.arange(n, device=DEVICE)
    slots = torch.tensor([1, 2, 3, 4, -1, 5], device=DEVICE)
    steps = torch.tensor([3, 0, d, -1, 1, 2], device=DEVICE)
    dests = torch.tensor([6, 7, 8, 9, 10, 1], device=DEVICE)
    track = torch.tensor([1, -1, 2, 0, 0, 1], device=DEVICE)
    want = states.clone()
    for i, at in enumerate(track.tolist()):
        if at >= 0 and i not in (4, 5):
            args = (rows[i : i + 1], slots[i : i + 1], track[i : i + 1], dests[i : i + 1])
            replay_tuples(want, u, k, g, *args)
    for i in (0, 1, 5):
        replay_tuples(want, u, k, g, rows[i : i + 1], slots[i : i + 1], steps[i : i + 1])
    wrong = states.clone()
    replay_tuples(wrong, u, k, g, rows, slots, steps)
    replay_tuples(wrong, u, k, g, rows, slots, track, dests)
    portable = states.clone()
    replay_tuples(portable, u, k, g, rows, slots, steps, use_ptx=False)
    inplace = states.clone()
    replay_tuples(inplace, u, k, g, rows, slots, steps, use_ptx=True)
    commit_tuples(states, u, k, g, rows, slots, steps, dests, track)
    assert torch.equal(states, want)
    assert not torch.equal(wrong, want)
    assert torch.allclose(portable.float(), inplace.float(), atol=1e-2)


@pytest.mark.parametrize("dtype", STATES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("n,d,capacity", [(1, 4, 8), (5, 4, 16), (5, 3, 7), (3, 16, 40)])
def test_deferred_commit_equals_immediate_commit(n, d, capacity, dtype):
    """Catches: a lost or repeated pending step, a wrong ring wrap, a boundary state stored too early."""
    need("cuda")
    layers, turns = 2, 9
    cases = [Case(n, d, 4, 16, dtype, seed=layer) for layer in range(layers)]
    gen = torch.Generator(DEVICE).manual_seed(9)
    extra = torch.randn(n, 16, DIM, DIM, device=DEVICE, generator=gen).to(dtype)
    start = torch.stack([torch.cat([case.pool, extra]) for case in cases])
    for case in cases:
        case.slots, case.rows, case.num_rows = cases[0].slots, cases[0].rows, cases[0].num_rows
    slots, rows = cases[0].slots, cases[0].rows
    track_dests = torch.arange(n, device=DEVICE) + n + 3
    now, later = start.clone(), start.clone()
    pair = [torch.stack(t) for t in zip(*(case.ring(d) for case in cases))]
    ring = [torch.stack(t) for t in zip(*(case.ring(capacity) for case in cases))]
    owner = DeferredCommit(later, *ring, max_draft_tokens=d)
    for turn in range(turns):
        steps = torch.randint(-1, d, (n,), device=DEVICE, generator=gen)
        track = torch.randint(-1, d, (n,), device=DEVICE, generator=gen)
        track = torch.where(track <= steps, track, -1)
        for layer, case in enumerate(cases):
            case.mixed = torch.randn(case.mixed.shape, device=DEVICE, generator=gen).bfloat16()
            case.pool = now[layer]
            want = case.run("cuda", tuples=[t[layer] for t in pair])
            q, k, v = case.qkv()
            a, b = case.gates.chunk(2, dim=-1)
            gates = (a, b, case.A_log, case.dt_bias)
            x = VerifyInputs(q, k, v, *gates, later[layer], slots, rows)
            got = owner.verify(layer, x, scale=DIM**-0.5)
            assert torch.equal(want, got), f"turn {turn} layer {layer}"
        commit_tuples(now, *pair, rows, slots, steps, track_dests, track)
        owner.commit(rows, slots, steps, track_dests, track, num_tokens=d)
        if turn % 4 == 3:
            owner.materialise(rows, slots)
            assert torch.equal(now, later), f"turn {turn}"
    assert not torch.equal(now, start)
    owner.materialise(rows, slots)
    assert torch.equal(now, later)


@pytest.mark.parametrize(
    "tile",
    [
        *TABLE_TILES,
        VerifyTile(4, 4, 2, 2),
        VerifyTile(8, 2, 2, 2),
        VerifyTile(4, 2, 4, 3),
        VerifyTile(4, 4, 3, pdl=True),
    ],
    ids=str,
)
def test_every_tile_gives_the_same_bits(tile):
    """Catches: a result that depends on the launch shape."""
    need("cuda")
    case = Case(9, 4, 16, 32, torch.float32)
    q, k, v = case.qkv()
    a, b = case.gates.chunk(2, dim=-1)
    x = VerifyInputs(q, k, v, a, b, case.A_log, case.dt_bias, case.pool, case.slots, case.rows)
    results = []
    for chosen in (None, tile):
        ring = case.ring(4)
        out = run_verify(x, scale=DIM**-0.5, tuples=tuple(ring), tile=chosen)
        results.append([out, *(t[case.rows.long()] for t in ring)])
    assert all(torch.equal(one, other) for one, other in zip(*results))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_decode_equals_verify_and_commit_of_one_token(implementation):
    """Catches: intermediates rounded at other points in decode than in verify."""
    need(implementation)
    case = Case(5, 1, 16, 32, torch.float32)
    ring = case.ring(1)
    out = case.run(implementation, tuples=ring)
    committed = case.pool.clone()[None]
    steps = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    replay_tuples(committed, *(t[None] for t in ring), case.rows, case.slots, steps)
    q, k, v = case.qkv()
    a, b = case.gates.chunk(2, dim=-1)
    pool = case.pool.clone()
    if implementation == "cuda":
        x = VerifyInputs(q, k, v, a, b, case.A_log, case.dt_bias, pool, case.slots, None)
        decoded = run_verify(x, scale=DIM**-0.5, write_state=True)
    else:
        decoded = fused_sigmoid_gating_delta_rule_update(
            A_log=case.A_log,
            a=a,
            dt_bias=case.dt_bias,
            softplus_beta=1.0,
            softplus_threshold=20.0,
            q=q[:, None],
            k=k[:, None],
            v=v[:, None],
            b=b,
            initial_state_source=pool,
            initial_state_indices=case.slots,
            use_qk_l2norm_in_kernel=True,
        )[:, 0]
    assert torch.equal(decoded, out)
    assert torch.equal(pool, committed[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_offsets_past_two_to_the_31(implementation):
    """Catches: 32-bit element offsets in the pool, the ring or the snapshots."""
    need(implementation)
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of free device memory")
    case = Case(1, 2, 16, 32, torch.float32)
    slots_total, rows_total = 4200, 2150
    pool = torch.empty(slots_total, 32, DIM, DIM, device=DEVICE)
    pool[-1] = case.pool[0]
    small = Case(1, 2, 16, 32, torch.float32)
    small.pool = pool[-2:].clone()
    small.slots = torch.tensor([1], device=DEVICE)
    case.pool, case.num_slots = pool, slots_total
    case.slots = torch.tensor([slots_total - 1], device=DEVICE)
    case.rows = torch.tensor([rows_total - 1], device=DEVICE, dtype=torch.int32)
    case.num_rows = rows_total
    snaps = torch.empty(rows_total, 2, 32, DIM, DIM, device=DEVICE)
    out = case.run(implementation, snapshots=snaps)
    few = small.snapshots(2)
    assert torch.equal(out, small.run(implementation, snapshots=few))
    assert torch.equal(snaps[-1], few[int(small.rows[0])])
    ring = case.ring(2)
    case.run(implementation, tuples=ring)
    steps = torch.ones(1, dtype=torch.int32, device=DEVICE)
    replay_tuples(pool[None], *(t[None] for t in ring), case.rows, case.slots, steps)
    assert torch.equal(pool[-1], snaps[-1, 1])


def test_conv_update_windows_and_prefill():
    """Catches: tap order, a window off by one, a split prompt that differs from a whole one."""
    gen = torch.Generator(DEVICE).manual_seed(4)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, generator=gen).bfloat16()

    dim, width, n, d = 8192, 4, 5, 4
    weight, state, x = randn(dim, width), randn(9, dim, width - 1), randn(n, d, dim)
    slots = torch.tensor([8, 3, 5, 1, 6], device=DEVICE)
    windows = torch.full((7, d, dim, width - 1), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    rows = torch.tensor([6, 0, 2, 3, 5], device=DEVICE, dtype=torch.int32)
    before = state.clone()
    view = x.transpose(1, 2)
    out = causal_conv1d_update(
        view,
        state,
        weight,
        None,
        "silu",
        conv_state_indices=slots,
        intermediate_conv_window=windows,
        intermediate_state_indices=rows,
    )
    assert torch.equal(state, before)
    assert torch.equal(
        out, causal_conv1d_update(view, state, weight, None, "silu", conv_state_indices=slots)
    )
    for i in range(n):
        want, expected = conv_reference(before[slots[i]], view[i], weight, None)
        assert torch.allclose(out[i].float(), want.float(), atol=2e-2, rtol=1e-2)
        assert torch.equal(windows[rows[i]], expected)
        assert torch.equal(state[slots[i]], expected[-1])
    prompt = randn(300, dim).T
    pieces, carried = [], torch.zeros(2, dim, width - 1, device=DEVICE, dtype=torch.bfloat16)
    whole = carried.clone()

    def prefill(part: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        loc = torch.tensor([0, part.shape[1]], device=DEVICE, dtype=torch.int32)
        one = torch.ones(1, device=DEVICE, dtype=torch.int32)
        return causal_conv1d_fn(part, weight, None, states, loc, [part.shape[1]], one)

    for lo, hi in ((0, 1), (1, 66), (66, 300)):
        pieces.append(prefill(prompt[:, lo:hi], carried))
    assert torch.equal(torch.cat(pieces, dim=1), prefill(prompt, whole))
    assert torch.equal(carried, whole)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
