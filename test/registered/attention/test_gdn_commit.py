"""Commit of a verify through the hybrid backend, on CPU tensors, and what the backends refuse."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

from sglang.kernels.exact_math import fma_f32, step_state
from sglang.kernels.ops.gdn_cuda.launch_table import TABLE_TILES, select_tile
from sglang.kernels.ops.mamba.mamba_state_scatter_triton import (
    fused_commit_track_indices,
    fused_mamba_state_scatter_with_mask,
)
from sglang.kernels.ops.mamba.tuple_replay import replay_tuples
from sglang.srt.environ import envs
from sglang.srt.layers.attention.hybrid_linear_attn_backend import (
    HybridLinearAttnBackend,
    _reconstruct_ssm_from_tuples,
)
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend, GDNKernelDispatcher
from sglang.srt.layers.attention.linear.utils import (
    LinearAttnKernelBackend,
    build_verify_intermediate_state_indices,
    select_linear_attn_backends,
    select_verify_intermediate_state_indices,
)
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.gdn_reference import replay_reference, unfused_step_state

register_cpu_ci(est_time=15, suite="attention")

L, S, R, D, HV, V, K = 2, 10, 6, 4, 3, 8, 16
SLOTS = [3, 1, 5, -1]
STEPS = [2, -1, 3, 1]
TRACKS = [7, 8, 3, 2]
TRACK_STEPS = [1, 0, 2, -1]


def make_case(dtype: torch.dtype, rows: list[int]) -> dict[str, torch.Tensor]:
    """Tuples, the snapshots they belong to, and windows; scratch row rows[i] belongs to request i."""
    torch.manual_seed(0)
    case = {
        "ssm": torch.randn(L, S, HV, V, K).to(dtype),
        "u": torch.randn(L, R, D, HV, V),
        "k": torch.randn(L, R, D, HV, K),
        "g": -torch.rand(L, R, D, HV),
        "conv": torch.randn(L, S, 6, 3),
        "windows": torch.randn(L, R, D, 6, 3),
    }
    snapshots = torch.full((L, R, D, HV, V, K), float("nan")).to(dtype)
    for layer in range(L):
        for row, slot in zip(rows, SLOTS):
            start = case["ssm"][layer, max(slot, 0)]
            for t in range(D):
                tuples = [case[name][layer, row] for name in "ukg"]
                snapshots[layer, row, t] = replay_reference(start, *tuples, t + 1)
    case["snapshots"] = snapshots
    return case


def commit(case: dict[str, torch.Tensor], *, lossless: bool, rows: list[int], pp: bool = False):
    """Returns (temporal, conv) after the commit through an unbound call on bare namespaces."""
    temporal, conv = case["ssm"].clone(), case["conv"].clone()
    caches = SimpleNamespace(
        temporal=temporal,
        conv=[conv],
        intermediate_conv_window=[case["windows"]],
        intermediate_ssm=None if lossless else case["snapshots"],
        intermediate_ssm_u=case["u"] if lossless else None,
        intermediate_ssm_k=case["k"] if lossless else None,
        intermediate_ssm_g=case["g"] if lossless else None,
    )
    pool = SimpleNamespace(
        get_speculative_mamba2_params_all_layers=lambda: caches,
        get_mamba_indices=lambda r: torch.tensor(SLOTS),
        mamba_pool=SimpleNamespace(replayssm_is_kda=False),
        short_conv_pool=None,
        ngram_pool=None,
    )
    linear = SimpleNamespace(
        _translate_mamba_indices=lambda x: x,
        forward_metadata=SimpleNamespace(mamba_cache_indices=torch.tensor([*SLOTS, 9])),
        req_to_token_pool=pool,
        accept_lens_pool=None,
        verify_intermediate_state_indices=torch.arange(R, dtype=torch.int32),
    )
    backend = SimpleNamespace(
        linear_attn_backend=linear, _update_ple_state_after_mtp_verify=lambda *args: None
    )
    HybridLinearAttnBackend.update_mamba_state_after_mtp_verify(
        backend,
        last_correct_step_indices=torch.tensor(STEPS),
        mamba_track_indices=torch.tensor(TRACKS),
        mamba_steps_to_track=torch.tensor(TRACK_STEPS),
        model=None,
        req_pool_indices=torch.tensor(rows) if pp else None,
    )
    return temporal, conv


def expected(case: dict[str, torch.Tensor], rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    temporal, conv = case["ssm"].clone(), case["conv"].clone()
    # Request 1 accepts nothing but has a boundary; request 2's boundary slot is request 0's working slot.
    for slot, row, step in ((7, rows[0], 1), (8, rows[1], 0), (3, rows[0], 2), (5, rows[2], 3)):
        temporal[:, slot] = case["snapshots"][:, row, step]
        conv[:, slot] = case["windows"][:, row, step]
    return temporal, conv


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("lossless", [True, False], ids=["tuples", "snapshots"])
@pytest.mark.parametrize("pp", [False, True], ids=["batch rows", "stable rows"])
def test_commit_is_exact_and_touches_nothing_else(pp, lossless, dtype):
    """Catches: commit before track, a clamped padding slot, batch rows used for stable rows, bf16 steps."""
    rows = [4, 0, 2, 5] if pp else [0, 1, 2, 3]
    case = make_case(dtype, rows)
    with envs.SGLANG_ENABLE_PP_SPEC.override(pp):
        temporal, conv = commit(case, lossless=lossless, rows=rows, pp=pp)
    want_temporal, want_conv = expected(case, rows)
    # The compiled CPU op and torch.exp may differ in the last bit of exp; exact within one implementation.
    if lossless:
        assert torch.allclose(temporal.float(), want_temporal.float(), rtol=1e-2, atol=1e-5)
        untouched = [0, 1, 2, 4, 6, 9]
        assert torch.equal(temporal[:, untouched], want_temporal[:, untouched])
    else:
        assert torch.equal(temporal, want_temporal)
    assert torch.equal(conv, want_conv)
    assert not torch.equal(temporal, case["ssm"])


def test_wrong_order_is_caught():
    """Control: advancing in place before the boundary copy stores another boundary state."""
    case = make_case(torch.float32, [0, 1, 2, 3])
    args = [case[name] for name in "ukg"]
    rows, slots = torch.arange(4), torch.tensor(SLOTS)
    steps, track = torch.tensor(STEPS), torch.tensor(TRACK_STEPS)
    states = case["ssm"].clone()
    _reconstruct_ssm_from_tuples(states, *args, rows, slots, steps)
    _reconstruct_ssm_from_tuples(states, *args, rows, slots, track, torch.tensor(TRACKS))
    right, _ = commit(case, lossless=True, rows=[0, 1, 2, 3])
    assert not torch.equal(states[:, 7], right[:, 7])


def test_exact_fma_differs_from_two_roundings():
    """Catches: a twin that rounds the product; the control of every exactness test."""
    torch.manual_seed(2)
    a, b, c = (torch.randn(4096) for _ in range(3))
    exact = (a.double() * b.double() + c.double()).float()
    assert (fma_f32(a, b, c) == exact).float().mean() > 0.999
    assert not torch.equal(fma_f32(a, b, c), a * b + c)
    state, k, u = torch.randn(V, K), torch.randn(K), torch.randn(V)
    decay = torch.tensor(0.7)
    assert not torch.equal(step_state(state, decay, k, u), unfused_step_state(state, decay, k, u))


def test_steps_past_the_ring_are_skipped_and_shapes_are_checked():
    """Catches: a clamp to the last step; a silent broadcast of a wrong shape."""
    case = make_case(torch.float32, [0, 1, 2, 3])
    args = [case[name] for name in "ukg"]
    states = case["ssm"].clone()
    one = torch.tensor([1])
    replay_tuples(states, *args, one, one, torch.tensor([D]))
    assert torch.equal(states, case["ssm"])
    with pytest.raises(ValueError, match="u must be"):
        replay_tuples(states, case["k"], case["k"], case["g"], one, one, one)
    with pytest.raises(ValueError, match="layers"):
        fused_mamba_state_scatter_with_mask(states[:1], case["snapshots"], one, one)
    with pytest.raises(ValueError, match="1-D"):
        fused_mamba_state_scatter_with_mask(states, case["snapshots"], one[None], one)


def test_track_steps_of_a_commit():
    """Catches: a boundary one token off; a crossing claimed where none is."""
    accept_index = torch.tensor([[0, 1, 2, -1], [4, -1, -1, -1], [8, 9, 10, 11], [-1] * 4])
    lens = torch.tensor([3, 1, 4, 0])
    before = torch.tensor([62, 10, 60, 63])
    last, track = fused_commit_track_indices(accept_index, lens, before, 4, 64)
    assert last.tolist() == [2, 0, 3, -1]
    assert track.tolist() == [1, -1, 3, -1]
    assert fused_commit_track_indices(accept_index, lens, None, 4, 64)[1] is None


def test_scratch_rows_and_backends():
    """Catches: a discard row inside the pool; the verify default; a family accepted without a kernel."""
    rows = build_verify_intermediate_state_indices(5, "cpu")
    assert rows[:7].tolist() == [0, 1, 2, 3, 4, 5, 5] and rows.dtype == torch.int32
    reqs, valid = torch.tensor([4, 2]), torch.tensor([True, False])
    assert select_verify_intermediate_state_indices(rows, reqs, valid, 5) is rows
    with envs.SGLANG_ENABLE_PP_SPEC.override(True):
        picked = select_verify_intermediate_state_indices(rows, reqs, valid, 5)
    assert picked.tolist() == [4, 5]
    assert select_linear_attn_backends("triton").verify.is_triton()
    assert select_linear_attn_backends("triton", decode="flashinfer").verify.is_flashinfer()
    assert LinearAttnKernelBackend("something else").is_custom()
    triton = LinearAttnKernelBackend.TRITON
    with pytest.raises(ValueError, match="flashinfer has no GDN kernel"):
        GDNKernelDispatcher(triton, triton, LinearAttnKernelBackend.FLASHINFER)


def test_a_verify_kernel_that_would_ignore_the_ring_is_refused():
    """Catches: a ring that stays zero because the kernel drops unknown buffers."""
    backend = GDNAttnBackend.__new__(GDNAttnBackend)
    backend._tuple_kernel_checked = False
    backend.kernel_dispatcher = SimpleNamespace(verify_kernel=object())
    with pytest.raises(RuntimeError, match="--linear-attn-verify-backend triton"):
        backend._require_tuple_kernel()


def test_hybrid_backend_prepares_both_children_once():
    """Catches: a child prepared twice or not at all; recurrent metadata built for a draft model's rows."""
    calls = []

    def child(name: str) -> SimpleNamespace:
        return SimpleNamespace(
            init_forward_metadata=lambda fb: calls.append(name),
            init_forward_metadata_out_graph=lambda fb, in_capture=False: calls.append(name),
        )

    hybrid = HybridLinearAttnBackend(child("full"), child("linear"), [0])
    for draft, want in ((False, ["full", "linear"]), (True, ["full"])):
        calls.clear()
        mode = SimpleNamespace(is_draft_extend_v2=lambda draft=draft: draft)
        hybrid.init_forward_metadata(SimpleNamespace(forward_mode=mode))
        assert calls == want
    calls.clear()
    hybrid.init_forward_metadata_out_graph(SimpleNamespace(), in_capture=True)
    assert calls == ["full", "linear"]


def test_padding_rows_of_a_replay_name_no_slot():
    """Catches: padding that reuses a live slot or a real row's track destination."""
    pool = SimpleNamespace(
        get_mamba_indices=lambda rows: rows * 2, translate_mamba_indices=lambda x: x
    )
    backend = GDNAttnBackend.__new__(GDNAttnBackend)
    backend.req_to_token_pool = pool
    rows, tracks = torch.tensor([4, 2, 0, 0]), torch.tensor([9, -1, 5, 5])
    metadata = backend._replay_metadata(
        4, rows, ForwardMode.TARGET_VERIFY, None, None, num_padding=2, mamba_track_indices=tracks
    )
    assert metadata.mamba_cache_indices.tolist() == [8, 4, -1, -1]
    assert metadata.mamba_track_indices.tolist() == [9, -1, -1, -1]


def test_other_names_are_the_same_modules():
    """Catches: a second copy of a module, on which a replaced function has no effect."""
    name = "fused_sigmoid_gating_recurrent"
    real = importlib.import_module(f"sglang.kernels.ops.attention.fla.{name}")
    for package in ("sglang.kernels.ops.attention.linear", "sglang.srt.layers.attention.fla"):
        assert importlib.import_module(f"{package}.{name}") is real
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("sglang.kernels.ops.attention.linear.no_such_module")


def test_every_launch_has_a_tile_of_the_table():
    """Catches: a launch setting that the exactness tests on a GPU do not cover."""
    for heads in (1, 264, 265, 4000):
        for width in (1, 8, 9, 32):
            for deferred in (False, True):
                tile = select_tile(num_heads_in_batch=heads, draft_tokens=width, deferred=deferred)
                assert tile in TABLE_TILES


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
