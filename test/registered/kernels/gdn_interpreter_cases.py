"""Checks of the real GDN kernels in Triton's interpreter; run by test_gdn_interpreter.py.

The interpreter's fma rounds its product, so states are compared with the unfused twin, exactly where the
inputs are the kernel's own tuples and within a tolerance where reductions differ in order.
"""

from __future__ import annotations

import pytest
import torch

from sglang.kernels import triton_support
from sglang.kernels.ops.attention.fla.fused_gdn_gating import fused_gdn_gating
from sglang.kernels.ops.attention.fla.fused_recurrent import (
    fused_recurrent_gated_delta_rule_packed_decode,
    fused_recurrent_gated_delta_rule_update,
)
from sglang.kernels.ops.attention.fla.fused_sigmoid_gating_recurrent import (
    fused_sigmoid_gating_delta_rule_update as verify,
)
from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn, causal_conv1d_update
from sglang.kernels.ops.mamba.mamba_state_scatter_triton import (
    fused_conv_window_scatter_with_mask,
    fused_mamba_state_scatter_with_mask,
    track_mamba_states_all_layers,
)
from sglang.kernels.ops.mamba.tuple_replay import commit_tuples, replay_tuples
from sglang.test.gdn_reference import (
    GdnInputs,
    conv_reference,
    gdn_reference,
    unfused_step_state,
)

assert triton_support.INTERPRETING, "run with TRITON_INTERPRET=1"

H, HV, K, V = 1, 2, 16, 8
SLOTS, ROWS, PITCH = 6, 5, 4


def make_inputs(n: int, steps: int, state_dtype: torch.dtype = torch.float32) -> GdnInputs:
    torch.manual_seed(7)
    return GdnInputs(
        q=torch.randn(n, steps, H, K),
        k=torch.randn(n, steps, H, K),
        v=torch.randn(n, steps, HV, V),
        a=torch.randn(n, steps, HV),
        b=torch.randn(n, steps, HV),
        A_log=torch.randn(HV) * 0.3,
        dt_bias=torch.randn(HV) * 0.3,
        start=torch.randn(n, HV, V, K).to(state_dtype),
    )


def run_verify(x: GdnInputs, pool: torch.Tensor, slots: torch.Tensor, **buffers: object):
    n, steps = x.q.shape[:2]
    packed = [t.reshape(1, n * steps, *t.shape[2:]) for t in (x.q, x.k, x.v)]
    out = verify(
        A_log=x.A_log,
        a=x.a.reshape(n * steps, HV),
        dt_bias=x.dt_bias,
        softplus_beta=1.0,
        softplus_threshold=20.0,
        q=packed[0],
        k=packed[1],
        v=packed[2],
        b=x.b.reshape(n * steps, HV),
        initial_state_source=pool,
        initial_state_indices=slots,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=torch.arange(0, n * steps + 1, steps, dtype=torch.int32),
        disable_state_update=True,
        **buffers,
    )
    return out.view(n, steps, HV, V)


def make_ring(layers: int = 1) -> list[torch.Tensor]:
    shapes = ((HV, V), (HV, K), (HV,))
    return [torch.full((layers, ROWS, PITCH, *s), float("nan")) for s in shapes]


def pool_of(x: GdnInputs, slots: list[int]) -> torch.Tensor:
    pool = torch.randn(SLOTS, HV, V, K).to(x.start.dtype)
    for i, slot in enumerate(slots):
        if 0 <= slot < SLOTS:
            pool[slot] = x.start[i]
    return pool


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_tuples_replay_to_snapshots(state_dtype):
    """Catches: modes with different arithmetic, bf16 rounding between steps, a pitch taken from cache_steps."""
    steps = PITCH - 1
    x = make_inputs(3, steps, state_dtype)
    slot_list, row_list = [4, 1, 5], [2, 0, 4]
    slots = torch.tensor(slot_list, dtype=torch.int32)
    rows = torch.tensor([*row_list, 3], dtype=torch.int32)
    pool = pool_of(x, slot_list)
    before = pool.clone()
    snaps = torch.full((ROWS, PITCH, HV, V, K), float("nan")).to(state_dtype)
    ring = make_ring()
    common = dict(intermediate_state_indices=rows, cache_steps=steps)
    out_snap = run_verify(x, pool, slots, intermediate_states_buffer=snaps, **common)
    names = ("u_states_buffer", "k_states_buffer", "g_states_buffer")
    tuples = {name: t[0] for name, t in zip(names, ring)}
    out_tuple = run_verify(x, pool, slots, **tuples, **common)
    assert torch.equal(out_snap, out_tuple)
    assert torch.equal(pool, before)
    want = gdn_reference(x, step=unfused_step_state)
    assert torch.allclose(out_snap, want.out, atol=2e-5)
    assert torch.allclose(ring[0][0][row_list, :steps], want.u, atol=2e-5)
    for t in (snaps, *(r[0] for r in ring)):
        assert t[:, steps:].isnan().all() and t[[1, 3]].isnan().all()
    for accepted in range(steps):
        replayed = pool.clone()[None]
        at = torch.full((3,), accepted)
        replay_tuples(replayed, *ring, rows[:3], slots, at)
        assert torch.equal(replayed[0, slot_list], snaps[row_list, accepted])
        assert torch.equal(replayed[0, [0, 2, 3]], before[[0, 2, 3]])
    wrong = pool.clone()[None]
    replay_tuples(wrong, *ring, rows[:3], slots, torch.zeros(3, dtype=torch.int64))
    assert not torch.equal(wrong[0, slot_list], snaps[row_list, 1])


def test_invalid_rows_are_skipped_and_track_leaves_first():
    """Catches: clamped padding indices, commit before track, a track copy over a committed slot."""
    torch.manual_seed(1)
    ring = [torch.randn_like(t) for t in make_ring(2)]
    ring[2] = -ring[2].abs()
    states = torch.randn(2, SLOTS, HV, V, K)
    rows = torch.tensor([0, 1, 2, ROWS, 3, 4])
    slots = torch.tensor([1, 2, -1, 3, SLOTS, 4])
    steps = torch.tensor([2, PITCH, 1, 1, 1, 0])
    tracks = torch.tensor([5, -1, 0, 0, 0, 1])
    track_steps = torch.tensor([1, 0, 0, 0, 0, 0])
    want = states.clone()
    replay_tuples(want, *ring, rows[:1], slots[:1], track_steps[:1], tracks[:1])
    for i in (0, 5):
        replay_tuples(want, *ring, rows[i : i + 1], slots[i : i + 1], steps[i : i + 1])
    commit_tuples(states, *ring, rows, slots, steps, tracks, track_steps)
    assert torch.equal(states, want)


def test_negative_slot_starts_from_zero_and_negative_row_records_nothing():
    """Catches: reading slot -1, recording for a padded row, unwritten output."""
    x = make_inputs(2, 2)
    x.start[1] = 0
    pool = pool_of(x, [3, -1])
    ring = make_ring()
    out = run_verify(
        x,
        pool,
        torch.tensor([3, -1]),
        intermediate_state_indices=torch.tensor([-1, ROWS], dtype=torch.int32),
        u_states_buffer=ring[0][0],
        k_states_buffer=ring[1][0],
        g_states_buffer=ring[2][0],
    )
    assert torch.allclose(out, gdn_reference(x, step=unfused_step_state).out, atol=2e-5)
    assert all(t.isnan().all() for t in ring)


def test_tree_nodes_continue_from_their_parents():
    """Catches: a node that continues from the node before it; a later or own index used as parent."""
    x = make_inputs(2, 4)
    x.parents = [[-1, 0, 0, 2], [-1, 0, 1, 3]]
    pool = pool_of(x, [0, 2])
    snaps = torch.full((ROWS, PITCH, HV, V, K), float("nan"))
    out = run_verify(
        x,
        pool,
        torch.tensor([0, 2]),
        intermediate_states_buffer=snaps,
        intermediate_state_indices=torch.tensor([1, 4], dtype=torch.int32),
        retrieve_parent_token=torch.tensor(x.parents),
    )
    want = gdn_reference(x, step=unfused_step_state)
    assert torch.allclose(out, want.out, atol=2e-5)
    assert torch.allclose(snaps[[1, 4]], want.snapshots, atol=2e-5)
    x.parents = None
    assert not torch.allclose(out, gdn_reference(x, step=unfused_step_state).out, atol=1e-3)


def test_decode_forms_agree():
    """Catches: beta narrowed to the input dtype, packed offsets, a state not written in place."""
    x = make_inputs(3, 1)
    want = gdn_reference(x, step=unfused_step_state)
    slots = torch.tensor([2, 5, 0])
    pool = pool_of(x, slots.tolist())
    mixed = torch.cat([t.reshape(3, -1) for t in (x.q, x.k, x.v)], dim=-1)
    out = torch.full((3, 1, HV, V), float("nan"))
    gates = (x.a[:, 0], x.b[:, 0], x.A_log, x.dt_bias)
    fused_recurrent_gated_delta_rule_packed_decode(
        mixed, *gates, K**-0.5, pool, out, slots, use_qk_l2norm_in_kernel=True
    )
    assert torch.allclose(out, want.out, atol=2e-5)
    assert torch.allclose(pool[slots], want.final, atol=2e-5)
    g, beta = fused_gdn_gating(x.A_log, x.a[:, 0], x.b[:, 0], x.dt_bias)
    pool2 = pool_of(x, slots.tolist())
    out2 = fused_recurrent_gated_delta_rule_update(
        x.q,
        x.k,
        x.v,
        g.view(3, 1, HV),
        beta.view(3, 1, HV),
        initial_state_source=pool2,
        initial_state_indices=slots,
        use_qk_l2norm_in_kernel=True,
    )
    assert torch.allclose(out2, want.out, atol=2e-5)
    assert torch.allclose(pool2[slots], want.final, atol=2e-5)


def test_scatters_follow_the_row_rules():
    """Catches: a layer or row stride mix-up, windows that overlap in memory read as dense."""
    torch.manual_seed(3)
    layers, dim, width = 2, 5, 3
    phys = torch.randn(layers, ROWS, dim, PITCH + width - 1)
    stride = phys.stride()
    windows = phys.as_strided(
        (layers, ROWS, PITCH, dim, width), (stride[0], stride[1], 1, stride[2], 1)
    )
    dst = torch.randn(layers, SLOTS, dim, width)
    want = dst.clone()
    dests, steps = torch.tensor([3, -1, 1, 2]), torch.tensor([1, 0, PITCH - 1, PITCH])
    want[:, 3], want[:, 1] = windows[:, 4, 1], windows[:, 2, PITCH - 1]
    rows = torch.tensor([4, 1, 2, 3])
    fused_conv_window_scatter_with_mask(dst, windows, dests, steps, rows)
    assert torch.equal(dst, want)
    flat = torch.randn(layers, SLOTS, 7)
    source = torch.randn(layers, 4, PITCH, 7)
    want = flat.clone()
    want[:, 3], want[:, 1] = source[:, 0, 1], source[:, 2, PITCH - 1]
    fused_mamba_state_scatter_with_mask(flat, source, dests, steps)
    assert torch.equal(flat, want)
    with pytest.raises(ValueError, match="layers"):
        fused_mamba_state_scatter_with_mask(flat[:1], source, dests, steps)


def test_track_copies_only_masked_rows():
    """Catches: a copy for an unmasked or freed request."""
    conv, ssm = torch.randn(2, SLOTS, 3, 3), torch.randn(2, SLOTS, HV, V, K)
    want = ssm.clone()
    want[:, 4] = ssm[:, 1]
    mask = torch.tensor([True, False, True])
    track_mamba_states_all_layers(
        conv, ssm, torch.tensor([1, 2, 3]), mask, torch.tensor([4, 5, -1]), 3, True
    )
    assert torch.equal(ssm, want) and torch.equal(conv[:, 4], conv[:, 1])


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_conv_update_and_windows(tokens):
    """Catches: tap order, a window off by one, a verify that changes the working state."""
    torch.manual_seed(5)
    dim, width = 6, 4
    weight, bias = torch.randn(dim, width), torch.randn(dim)
    state = torch.randn(SLOTS, dim, width - 1)
    x = torch.randn(2, tokens, dim).transpose(1, 2)
    slots = torch.tensor([4, 1])
    windows = torch.full((ROWS, tokens, dim, width - 1), float("nan"))
    rows = torch.tensor([3, 0], dtype=torch.int32)
    before = state.clone()
    out = causal_conv1d_update(
        x,
        state,
        weight,
        bias,
        "silu",
        conv_state_indices=slots,
        intermediate_conv_window=windows,
        intermediate_state_indices=rows,
    )
    assert torch.equal(state, before)
    stepped = causal_conv1d_update(x, state, weight, bias, "silu", conv_state_indices=slots)
    assert torch.equal(stepped, out)
    for i in range(2):
        want, expected = conv_reference(before[slots[i]], x[i], weight, bias)
        assert torch.allclose(out[i], want, atol=1e-5)
        assert torch.equal(windows[rows[i]], expected)
        assert torch.equal(state[slots[i]], expected[-1])


def test_conv_tree_follows_parents():
    """Catches: a sibling's token taken for an ancestor."""
    torch.manual_seed(6)
    dim, width = 4, 4
    weight = torch.randn(dim, width)
    state, x = torch.randn(SLOTS, dim, width - 1), torch.randn(1, dim, 4)
    windows = torch.zeros(1, 4, dim, width - 1)
    parents = torch.tensor([[-1, 0, 0, 2]])
    out = causal_conv1d_update(
        x,
        state,
        weight,
        None,
        None,
        conv_state_indices=torch.tensor([2]),
        intermediate_conv_window=windows,
        retrieve_parent_token=parents,
    )
    for node, path in enumerate(([0], [0, 1], [0, 2], [0, 2, 3])):
        want, expected = conv_reference(state[2], x[0][:, path], weight, None, silu=False)
        assert torch.allclose(out[0, :, node], want[:, -1], atol=1e-5)
        assert torch.equal(windows[0, node], expected[-1])


def test_conv_prefill_split_equals_whole_and_prompts_stay_apart():
    """Catches: neighbours that leak into each other, a lost carry, a boundary window off by one."""
    torch.manual_seed(8)
    dim, width = 5, 4
    weight = torch.randn(dim, width)
    lengths = [7, 2]
    x = torch.randn(dim, sum(lengths))
    state = torch.zeros(SLOTS, dim, width - 1)
    loc = torch.tensor([0, 7, 9], dtype=torch.int32)
    slots, tracks = torch.tensor([1, 2]), torch.tensor([3, -1])
    out = causal_conv1d_fn(
        x,
        weight,
        None,
        state,
        loc,
        lengths,
        cache_indices=slots,
        track_dests=tracks,
        track_rows=torch.tensor([4, -1]),
    )
    zero = torch.zeros(dim, width - 1)
    for i, (lo, hi) in enumerate(((0, 7), (7, 9))):
        want, windows = conv_reference(zero, x[:, lo:hi], weight, None)
        assert torch.allclose(out[:, lo:hi], want, atol=1e-5)
        assert torch.equal(state[slots[i]], windows[-1])
    assert torch.equal(state[3], x[:, 1:4])
    again = torch.zeros_like(state)
    parts = []
    for lo, hi in ((0, 2), (2, 7)):
        loc = torch.tensor([0, hi - lo], dtype=torch.int32)
        parts.append(
            causal_conv1d_fn(
                x[:, lo:hi], weight, None, again, loc, [hi - lo], cache_indices=slots[:1]
            )
        )
    assert torch.equal(torch.cat(parts, dim=1), out[:, :7])
    assert torch.equal(again[1], state[1])
