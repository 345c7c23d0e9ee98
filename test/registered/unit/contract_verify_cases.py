"""The verify kernel as outside callers use it, in Triton's interpreter; run by test_contract_verify.py.

The interpreter rounds the product of a fused multiply-add, so twins are compared within a tolerance, and
two calls of the kernel with one another exactly.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sglang.kernels import triton_support
from sglang.kernels.ops.attention.fla import (
    fused_recurrent,
    fused_sigmoid_gating_recurrent,
)
from sglang.kernels.ops.attention.fla.fused_gdn_gating import fused_gdn_gating
from sglang.srt.layers.attention.hybrid_linear_attn_backend import _reconstruct_ssm_from_tuples

assert triton_support.INTERPRETING, "run with TRITON_INTERPRET=1"

update = fused_sigmoid_gating_recurrent.fused_sigmoid_gating_delta_rule_update
N, T, D, R, H, HV, K, V = 2, 2, 4, 5, 1, 2, 8, 4
ROWS = [3, 1]
NAN = float("nan")


def inputs(dtype: torch.dtype = torch.float32, n: int = N, t: int = T, **sizes: int) -> dict:
    """Keyword arguments of a verify of n requests with t tokens each; a, b [1, n*t, HV]."""
    k_dim, v_dim = sizes.get("k", K), sizes.get("v", V)
    torch.manual_seed(0)
    return {
        "A_log": torch.randn(HV) * 0.3,
        "a": torch.randn(1, n * t, HV).to(dtype),
        "dt_bias": torch.randn(HV).to(dtype),
        "softplus_beta": 1.0,
        "softplus_threshold": 20.0,
        "q": torch.randn(1, n * t, H, k_dim).to(dtype),
        "k": torch.randn(1, n * t, H, k_dim).to(dtype),
        "v": torch.randn(1, n * t, HV, v_dim).to(dtype),
        "b": torch.randn(1, n * t, HV).to(dtype),
        "initial_state_source": torch.randn(4, HV, v_dim, k_dim),
        "initial_state_indices": torch.arange(n, dtype=torch.int32),
        "use_qk_l2norm_in_kernel": True,
        "cu_seqlens": torch.arange(0, n * t + 1, t, dtype=torch.int32),
        "is_kda": False,
        "disable_state_update": True,
    }


def rings(fill: float = NAN) -> dict[str, torch.Tensor]:
    shapes = {"u": (R, D, HV, V), "k": (R, D, HV, K), "g": (R, D, HV)}
    return {f"{name}_states_buffer": torch.full(s, fill) for name, s in shapes.items()}


def rows(extra: int = 0) -> torch.Tensor:
    return torch.tensor([*ROWS, *([0] * extra)], dtype=torch.int32)


def test_definition_of_the_step():
    """Catches: u before beta, k before its norm or per key head, exp(g) for g, a scale on k."""
    x = inputs()
    ring = rings()
    state = x["initial_state_source"]
    before = state.clone()
    out = update(**x, **ring, intermediate_state_indices=rows(), cache_steps=T)
    assert out.shape == x["v"].shape and torch.equal(state, before)
    g = -x["A_log"].exp() * F.softplus(x["a"][0] + x["dt_bias"])
    beta = x["b"][0].sigmoid()
    q, k = (t[0] / (t[0].square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (x["q"], x["k"]))
    q, k = q.expand(-1, HV, -1) * K**-0.5, k.expand(-1, HV, -1)
    for i, row in enumerate(ROWS):
        h = before[i]
        for t in range(T):
            token = i * T + t
            h = h * g[token].exp()[:, None, None]
            u = (x["v"][0, token] - (h * k[token][:, None]).sum(-1)) * beta[token][:, None]
            h = h + u[..., None] * k[token][:, None]
            want = {"u": u, "k": k[token], "g": g[token]}
            for name, value in want.items():
                assert torch.allclose(ring[f"{name}_states_buffer"][row, t], value, atol=1e-5)
            assert torch.allclose(out[0, token], (h * q[token][:, None]).sum(-1), atol=1e-5)


def test_pitch_comes_from_the_buffer():
    """Catches: a pitch from cache_steps, which would spill into the next row."""
    ring = rings()
    snapshots = torch.full((R, D, HV, V, K), NAN)
    update(**inputs(), **ring, intermediate_state_indices=rows(), cache_steps=T)
    update(
        **inputs(),
        intermediate_states_buffer=snapshots,
        intermediate_state_indices=rows(),
        cache_steps=T,
    )
    others = [row for row in range(R) if row not in ROWS]
    for buffer in (*ring.values(), snapshots):
        assert not buffer[ROWS, :T].isnan().any()
        assert buffer[:, T:].isnan().all() and buffer[others].isnan().all()


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ring_and_snapshots_agree_and_replay(dtype, state):
    """Catches: outputs that depend on what is recorded; a replay that rounds between steps."""
    x = inputs(dtype)
    x["initial_state_source"] = x["initial_state_source"].to(state)
    ring, snapshots = rings(), torch.full((R, D, HV, V, K), NAN).to(state)
    more = {"intermediate_state_indices": rows(), "cache_steps": T}
    out_ring = update(**x, **ring, **more)
    out_snapshot = update(**x, intermediate_states_buffer=snapshots, **more)
    assert out_ring.dtype is dtype and torch.equal(out_ring, out_snapshot)
    both_ring, both = rings(), torch.full_like(snapshots, NAN)
    out_both = update(**x, **both_ring, intermediate_states_buffer=both, **more)
    assert torch.equal(out_both, out_ring)
    assert torch.equal(both[ROWS, :T], snapshots[ROWS, :T])
    assert all(torch.equal(both_ring[n][ROWS, :T], ring[n][ROWS, :T]) for n in ring)
    for step in range(T):
        pool = x["initial_state_source"].clone()[None]
        tuples = [t[None] for t in ring.values()]
        index = [torch.tensor(v) for v in (ROWS, [0, 1], [step, step])]
        _reconstruct_ssm_from_tuples(pool, *tuples, *index)
        assert torch.equal(pool[0, :N], snapshots[ROWS, step])


def test_rows_may_be_more_than_requests_and_negative():
    x, ring = inputs(), rings()
    long, negative = rows(extra=3), torch.tensor([-1, 1], dtype=torch.int32)
    out = update(**x, **ring, intermediate_state_indices=long, cache_steps=T)
    assert ring["u_states_buffer"][0].isnan().all()
    ring = rings()
    assert torch.equal(out, update(**x, **ring, intermediate_state_indices=negative, cache_steps=T))
    assert [not t.isnan().all() for t in ring["g_states_buffer"]] == [False, True] + [False] * 3


def test_absent_and_negative_slots_start_from_zero():
    x = inputs()
    x["disable_state_update"] = False
    x["initial_state_indices"] = torch.tensor([-1, 1], dtype=torch.int32)
    before = x["initial_state_source"].clone()
    out = update(**x)
    assert torch.equal(x["initial_state_source"][[0, 2, 3]], before[[0, 2, 3]])
    assert not torch.equal(x["initial_state_source"][1], before[1])
    x["initial_state_source"] = x["initial_state_indices"] = None
    assert torch.equal(update(**x)[:, :T], out[:, :T])


def test_views_of_packed_tensors_are_bit_identical():
    """Catches: a stride computed from a shape, for a, b [T, HV] split off one row and q, k, v of one row."""
    x = inputs()
    want = update(**x)
    total = N * T
    gates = torch.cat([x["b"][0], x["a"][0], torch.zeros(total, 3)], dim=-1)
    b, a, _ = gates.split((HV, HV, 3), dim=-1)
    packed = torch.cat([x[n][0].reshape(total, -1) for n in ("q", "k", "v")], dim=-1)
    q, k, v = packed.split((H * K, H * K, HV * V), dim=-1)
    views = {
        "q": q.unflatten(-1, (H, K))[None],
        "k": k.unflatten(-1, (H, K))[None],
        "v": v.unflatten(-1, (HV, V))[None],
    }
    assert not a.is_contiguous() and not views["v"].is_contiguous()
    assert torch.equal(update(**{**x, **views, "a": a, "b": b}), want)
    assert torch.equal(update(**{**x, "a": a[None], "b": b[None]}), want)


def test_strided_pool_and_exchanged_inner_dims():
    """Catches: a slot stride computed from the shape; inner dims of the state checked against K and V."""
    x = inputs()
    want = update(**x)
    state = x["initial_state_source"]
    envelope = torch.full((4, state[0].numel() + 5), NAN)
    strided = envelope[:, :-5].unflatten(-1, state.shape[1:])
    strided.copy_(state)
    assert torch.equal(update(**{**x, "initial_state_source": strided}), want)
    exchanged = state.view(4, HV, K, V)
    assert torch.equal(update(**{**x, "initial_state_source": exchanged}), want)


def test_without_offsets_the_batch_is_the_first_axis():
    x = inputs()
    want = update(**x)
    batched = {n: x[n].view(N, T, *x[n].shape[2:]) for n in ("q", "k", "v")}
    got = update(**{**x, **batched, "cu_seqlens": None})
    assert got.shape == (N, T, HV, V) and torch.equal(got.flatten(0, 1), want[0])


def test_scale():
    x = inputs()
    assert torch.equal(update(**x), update(**x, scale=K**-0.5))
    for wrong in (0.0, -1.0):
        with pytest.raises(AssertionError):
            update(**x, scale=wrong)


def test_a_replaced_launch_is_used(monkeypatch):
    """Catches: a wrapper that keeps the function it imported; results that depend on the tile."""
    seen = []

    def chosen(*args: object, **keywords: object) -> tuple[int, int]:
        seen.append((args, keywords))
        return 2, 1

    x, ring = inputs(), rings()
    want = update(**x)
    monkeypatch.setattr(fused_sigmoid_gating_recurrent, "_select_recurrent_launch_config", chosen)
    more = {"intermediate_state_indices": rows(), "cache_steps": T}
    assert torch.equal(update(**x), want) and torch.equal(update(**x, **ring, **more), want)
    snapshots = torch.zeros(R, D, HV, V, K)
    update(**x, intermediate_states_buffer=snapshots, **more)
    assert [args[6] for args, _ in seen] == [False, True, True]
    assert all(args[:6] == (N, H, HV, K, V, False) for args, _ in seen)
    assert not any(t[ROWS, :T].isnan().any() for t in ring.values())


def test_tree_needs_snapshots():
    x = inputs(n=1, t=3)
    parents = torch.tensor([[-1, 0, 0]])
    snapshots = torch.full((R, D, HV, V, K), NAN)
    more = {"intermediate_state_indices": torch.tensor([2], dtype=torch.int32), "cache_steps": 3}
    tree = update(**x, **more, intermediate_states_buffer=snapshots, retrieve_parent_token=parents)
    assert not torch.equal(tree, update(**x)) and torch.equal(tree[:, :2], update(**x)[:, :2])
    assert snapshots[2, 3:].isnan().all() and not snapshots[2, :3].isnan().any()
    with pytest.raises(ValueError, match="intermediate_states_buffer"):
        update(**x, **more, **rings(), retrieve_parent_token=parents)


def test_gating_reads_strided_rows():
    """Catches: a row stride taken for HV; beta narrowed to b's dtype."""
    packed = torch.randn(3, 5 * HV, dtype=torch.bfloat16)
    b, a = packed[:, HV : 2 * HV], packed[:, 3 * HV : 4 * HV]
    x = inputs()
    g, beta = fused_gdn_gating(x["A_log"], a, b, x["dt_bias"])
    assert g.shape == beta.shape == (1, 3, HV) and g.dtype is beta.dtype is torch.float32
    assert torch.allclose(beta[0], b.float().sigmoid(), atol=1e-6)
    want = -x["A_log"].exp() * F.softplus(a.float() + x["dt_bias"])
    assert torch.allclose(g[0], want, atol=1e-6)


def test_reference_agrees():
    x = inputs(torch.bfloat16)
    g, beta = fused_gdn_gating(x["A_log"], x["a"][0], x["b"][0], x["dt_bias"])
    shared = ("q", "k", "v", "initial_state_source", "initial_state_indices", "cu_seqlens")
    call = {n: x[n] for n in shared}
    got = fused_recurrent.fused_recurrent_gated_delta_rule_update(
        g=g.view(1, N * T, HV),
        beta=beta.view(1, N * T, HV),
        use_qk_l2norm_in_kernel=True,
        disable_state_update=True,
        intermediate_state_indices=torch.arange(N, dtype=torch.int32),
        **call,
    )
    assert torch.allclose(got, update(**x), rtol=1e-2, atol=1e-2)
    for wrong in ("initial_state_indices", "intermediate_state_indices"):
        index = {"intermediate_state_indices": torch.arange(N), **call, wrong: torch.arange(N + 1)}
        with pytest.raises(ValueError, match=wrong):
            fused_recurrent.fused_recurrent_gated_delta_rule_update(g=g, beta=beta, **index)
    with pytest.raises(ValueError, match="batch"):
        doubled = {n: x[n].view(N, T, *x[n].shape[2:]) for n in ("q", "k", "v")}
        fused_recurrent.fused_recurrent_gated_delta_rule_update(
            g=g, beta=beta, **{**call, **doubled}
        )


def test_packed_decode_is_verify_of_one_token():
    """Catches: a beta rounded to bf16 in one of the two."""
    x = inputs(torch.bfloat16, n=3, t=1)
    x["disable_state_update"] = False
    state = x["initial_state_source"].clone()
    packed = torch.cat([x[n][0].reshape(3, -1) for n in ("q", "k", "v")], dim=-1)
    out = packed.new_empty(3, 1, HV, V)
    slots = x["initial_state_indices"]
    got, returned = fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode(
        packed,
        x["a"][0],
        x["b"][0],
        x["A_log"],
        x["dt_bias"],
        K**-0.5,
        state,
        out,
        slots,
        use_qk_l2norm_in_kernel=True,
    )
    want = update(**x)
    assert got is out and returned is state
    assert torch.equal(out[:, 0], want[0]) and torch.equal(state, x["initial_state_source"])
    good = (packed, x["a"][0], x["b"][0], x["A_log"], x["dt_bias"], 1.0, state, out, slots)
    for at, wrong in (
        (0, packed[:2]),
        (1, x["a"][0][:2]),
        (6, state[0]),
        (7, out[:, 0]),
        (8, slots[:1]),
    ):
        with pytest.raises(ValueError):
            fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode(
                *good[:at], wrong, *good[at + 1 :]
            )
