"""State slots and verify rows: the three branches, and the contract method on bare namespaces."""

from __future__ import annotations

import random
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch

from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.environ import envs
from sglang.srt.mem_cache import kv_cache_configurator as kvc
from sglang.srt.mem_cache.memory_pool import spec_intermediate_bytes_per_req
from sglang.srt.mem_cache.state_sizing import (
    StateCosts,
    StateRequest,
    divide,
    divide_lossless,
    slots_per_request,
    solve,
)
from sglang.srt.mem_cache.track import TrackGrids, TrackPolicy
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.plan_cases import server_args

register_cpu_ci(est_time=4, suite="unit")

GIB = 1 << 30


@pytest.mark.parametrize(
    ("strategy", "overlap", "skip_off", "skip_on"),
    [
        ("no_buffer", False, 3, 3),
        ("extra_buffer_lazy", True, 4, 3),
        ("extra_buffer", True, 5, 4),
        ("extra_buffer", False, 4, 3),
    ],
)
def test_slots_per_request(strategy, overlap, skip_off, skip_on):
    for skip, want in ((False, skip_off), (True, skip_on)):
        got = slots_per_request(
            radix_cache=True,
            extra_buffer=strategy != "no_buffer",
            lazy=strategy == "extra_buffer_lazy",
            overlap=overlap,
            skip_decode_lock=skip,
        )
        assert got == want
        args = server_args(
            mamba_radix_cache_strategy=strategy, disable_overlap_schedule=not overlap
        )
        with patch.object(kvc, "get_schedule", return_value=args):
            with envs.SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK.override(skip):
                assert kvc.KVCacheConfigurator._calculate_mamba_ratio(SimpleNamespace()) == want
    assert slots_per_request(
        radix_cache=False, extra_buffer=False, lazy=False, overlap=True, skip_decode_lock=False
    ) == 1  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "overlap"),
    [
        ("no_buffer", False),
        ("extra_buffer", False),
        ("extra_buffer", True),
        ("extra_buffer_lazy", False),
        ("extra_buffer_lazy", True),
    ],
)
def test_sizing_counts_what_requests_hold(strategy, overlap):
    """Own slots, the matched prefix's state while it is locked, and the state being handed over.

    The second entry of a lazy pair is taken near a boundary and only if a slot is free.
    """
    policy = TrackPolicy.resolve(
        strategy=strategy,
        grids=TrackGrids.resolve(page_size=1, track_interval=256),
        overlap_schedule=overlap,
    )
    eager_entries = policy.num_entries - int(policy.is_lazy)
    assert 1 + eager_entries + 2 == slots_per_request(
        radix_cache=True,
        extra_buffer=strategy != "no_buffer",
        lazy=policy.is_lazy,
        overlap=overlap,
        skip_decode_lock=False,
    )


def params(layers=30):
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=32 * 128,
        n_groups=16,
        num_heads=32,
        head_dim=128,
        state_size=128,
        conv_kernel=4,
    )
    return Mamba2CacheParams(
        shape=shape,
        layers=list(range(layers)),
        dtype=Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32),
    )


def handle(rest_gib, *, speculative=True, lossless=False, mode="null", dp=1, pp=1, extra=0, **args):
    """Run the contract method on a namespace that has only what it may read."""
    record = server_args(enable_linear_lossless_verify=lossless, disaggregation_mode=mode, **args)
    bare = SimpleNamespace(
        mambaish_config=SimpleNamespace(mamba2_cache_params=params()),
        pp_size=pp,
        attn_dp_size=dp,
        model_config=SimpleNamespace(num_hidden_layers=40),
        spec_algorithm=SimpleNamespace(is_none=lambda: not speculative),
        _calculate_mamba_ratio=lambda: 5,
    )
    cls = kvc.KVCacheConfigurator
    if speculative:
        bare.hybrid_gdn_config = object()
        bare.hybrid_kda_config = None
        bare.extra_mamba_cache_bytes_per_req = extra
        bare._linear_lossless_verify_enabled = lambda: cls._linear_lossless_verify_enabled(bare)
        bare._spec_intermediate_bytes = lambda n, s: cls._spec_intermediate_bytes(bare, n, s)
    override = Mock()
    with (
        patch.object(kvc, "get_server_args", return_value=record),
        patch.object(kvc, "get_schedule", return_value=record),
        patch.object(kvc, "get_spec", return_value=record),
        patch.object(kvc, "get_exec", return_value=SimpleNamespace(mamba=record)),
        patch.object(kvc, "get_disagg", return_value=record),
        patch.object(kvc, "get_context", return_value=SimpleNamespace(override=override)),
    ):
        rest = cls._handle_max_mamba_cache(bare, rest_gib)
    return override.call_args.kwargs["max_mamba_cache_size"], rest


P = params().mamba_cache_per_req
STOCK_ROW = P * 4
LOSSLESS_ROW = spec_intermediate_bytes_per_req(
    params(), 4, speculative_eagle_topk=1, enable_linear_lossless_verify=True
)


def left(rest_gib, slots, rows, row):
    return rest_gib - (rows * row + (slots + 1) * P) / GIB


@pytest.mark.parametrize(("lossless", "row"), [(False, STOCK_ROW), (True, LOSSLESS_ROW)])
@pytest.mark.parametrize(("running", "dp", "rows"), [(25, 1, 26), (40, 1, 31), (24, 2, 13)])
def test_branch_1_slots_are_given(lossless, row, running, dp, rows):
    """rows = min(running // dp, slots // ratio) + 1."""
    slots, rest = handle(
        40, lossless=lossless, max_mamba_cache_size=150 * dp, max_running_requests=running, dp=dp
    )
    assert slots == 150
    assert rest == left(40, 150, rows, row)


@pytest.mark.parametrize(("lossless", "row"), [(False, STOCK_ROW), (True, LOSSLESS_ROW)])
def test_branch_2_no_prefix_cache(lossless, row):
    slots, rest = handle(
        40, lossless=lossless, disable_radix_cache=True, max_running_requests=24, dp=2
    )
    assert slots == 12 and rest == left(40, 12, 13, row)


@pytest.mark.parametrize(("lossless", "row"), [(False, STOCK_ROW), (True, LOSSLESS_ROW)])
@pytest.mark.parametrize("rest_gib", [5.0, 17.3, 40.0])
def test_branch_3_joint_solve(lossless, row, rest_gib):
    budget = rest_gib * GIB * 0.9 / 1.9
    slots = int((budget - P - row) // (P + row / 5))
    got, rest = handle(rest_gib, lossless=lossless, max_running_requests=25)
    assert got == slots
    assert rest == left(rest_gib, slots, min(25, slots // 5) + 1, row)
    assert (slots + 1) * P + (slots / 5 + 1) * row <= budget


def test_without_speculation_nothing_is_recorded():
    budget = 40 * GIB * 0.9 / 1.9
    slots, rest = handle(40, speculative=False)
    assert slots == int((budget - P) // P) and rest == left(40, slots, 0, 0)


def test_a_prefill_server_reserves_no_scratch():
    slots, rest = handle(40, mode="prefill", max_mamba_cache_size=50)
    assert rest == left(40, 50, 0, 0)


def test_extra_bytes_are_paid_for_every_slot_with_the_padding_slot():
    _, rest = handle(40, max_mamba_cache_size=50, max_running_requests=8, extra=1 << 20)
    assert rest == left(40, 50, 9, STOCK_ROW) - 51 * (1 << 20) / GIB


def test_stages_are_charged_the_largest_share():
    """30 linear layers 0..29 of 40: the first of four stages holds 10, a third."""
    _, rest = handle(40, pp=4, max_mamba_cache_size=50, max_running_requests=8)
    share = int(P * (10 / 30))
    assert rest == 40 - (9 * share * 4 + 51 * share) / GIB


def test_a_flag_on_another_kind_of_model_is_refused():
    bare = SimpleNamespace(hybrid_gdn_config=None)
    on = SimpleNamespace(mamba=SimpleNamespace(enable_linear_lossless_verify=True))
    off = SimpleNamespace(mamba=SimpleNamespace(enable_linear_lossless_verify=False))
    check = kvc.KVCacheConfigurator._linear_lossless_verify_enabled
    with patch.object(kvc, "get_exec", return_value=off):
        assert check(bare) is False
    with patch.object(kvc, "get_exec", return_value=on):
        with pytest.raises(ValueError, match="Gated-DeltaNet"):
            check(bare)
        assert check(SimpleNamespace(hybrid_gdn_config=object())) is True


def test_adaptive_width_counts_only_with_the_flag_on():
    """Flag off keeps the configured width; flag on uses the widest candidate (7 steps, 8 rows)."""
    off = handle(40, speculative_adaptive=True, max_mamba_cache_size=50, max_running_requests=8)
    assert off[1] == left(40, 50, 9, STOCK_ROW)
    widest = spec_intermediate_bytes_per_req(
        params(), 8, speculative_eagle_topk=1, enable_linear_lossless_verify=True
    )
    on = handle(
        40,
        lossless=True,
        speculative_adaptive=True,
        max_mamba_cache_size=50,
        max_running_requests=8,
    )
    assert on[1] == left(40, 50, 9, widest)


def test_no_slot_is_an_error_with_advice():
    with pytest.raises(RuntimeError, match="Raise --mem-fraction-static"):
        handle(0.2)
    with pytest.raises(RuntimeError, match="0.00 GiB are left"):
        handle(-3.0)
    with pytest.raises(RuntimeError, match="lower --speculative-num-draft-tokens 4"):
        handle(0.2)
    with pytest.raises(RuntimeError, match="--mamba-full-memory-ratio 0.9$"):
        handle(0.05, speculative=False)


def test_sizing_reads_and_writes_the_runtime_context():
    """The customary way to call it: scoped arguments, a bare namespace, the result by accessor.

    Catches accessors that exist only in the configurator, a share left at its default (None), and
    fields of the model that are read although one stage needs none of them.
    """
    from sglang.srt.runtime_context import get_context, get_schedule

    bare = SimpleNamespace(
        mambaish_config=SimpleNamespace(
            mamba2_cache_params=SimpleNamespace(mamba_cache_per_req=1 << 20)
        ),
        pp_size=1,
        attn_dp_size=1,
        model_config=SimpleNamespace(hf_config=None),
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
        _calculate_mamba_ratio=lambda: 3,
    )
    handled = kvc.KVCacheConfigurator._handle_max_mamba_cache
    context = get_context()
    former = context._server_args
    for share, slots in ((None, 4 * 1024 * 9 // 19 - 1), (1.0, 2047)):
        with context.override_server_args(mamba_full_memory_ratio=share):
            rest = handled(bare, 4.0)
            assert get_schedule().max_mamba_cache_size == slots
            assert rest == 4 - (slots + 1) / 1024
        assert context._server_args is former
    installed = context.override_server_args(max_mamba_cache_size=20)
    installed.install()
    assert handled(bare, 4.0) == 4 - 21 / 1024 and get_schedule().max_mamba_cache_size == 20
    installed.restore()
    assert context._server_args is former


def test_the_size_outlives_the_call_in_the_runtime_context():
    """Catches a result that vanishes when the override object is collected."""
    from sglang.srt import runtime_context

    context = runtime_context.RuntimeContext()
    context.publish(server_args(max_mamba_cache_size=None))
    with patch.object(kvc, "get_context", return_value=context):
        kvc._override_for_good(max_mamba_cache_size=17)
    assert context.server_args.max_mamba_cache_size == 17


def random_case(rng):
    slot = rng.randrange(1, 2000)
    costs = StateCosts(
        slot=slot,
        row=slot * rng.choice([0, 2, 4, 8, 16]),
        ratio=rng.choice([1, 3, 4, 5]),
        extra=rng.choice([0, 7]),
    )
    request = StateRequest(
        max_mamba_cache_size=rng.choice([None, None, rng.randrange(1, 200)]),
        max_running_requests=rng.choice([None, rng.randrange(1, 64)]),
        radix_cache=rng.random() < 0.7,
        full_memory_ratio=rng.choice([0.1, 0.5, 0.9, 2.0]),
        slot_limit=rng.choice([None, None, 100]),
    )
    return costs, request


def test_more_memory_never_gives_less_kv():
    """Catches the saw-tooth of a whole-slot solution: one byte more must not cost a slot of KV."""
    rng = random.Random(5)
    teeth = 0
    for _ in range(300):
        costs, request = random_case(rng)
        start = rng.randrange(1, 400_000)
        budgets = [start + costs.slot * step // 7 for step in range(40)]
        budgets = [b for b in budgets if solve(costs, request, b).slots >= costs.ratio]
        divisions = [divide(costs, request, budget) for budget in budgets]
        kv = [division.kv_bytes for division in divisions]
        assert kv == sorted(kv)
        for budget, division in zip(budgets, divisions):
            assert division.state.slots >= costs.ratio
            assert division.kv_bytes + division.state.charged <= budget
            assert division.kv_bytes >= budget - solve(costs, request, budget).charged
        plain = [b - solve(costs, request, b).charged for b in budgets]
        teeth += plain != sorted(plain)
    assert teeth > 20, "the control: without the rule there are teeth"


def test_lossless_never_leaves_less_kv_than_the_default():
    """The joint solution spends freed scratch on slots; it must not spend more than was freed."""
    rng = random.Random(6)
    bound = 0
    for _ in range(1500):
        costs, request = random_case(rng)
        if not costs.has_scratch:
            continue
        small = StateCosts(max(1, costs.slot), max(1, costs.row // 60), costs.ratio, costs.extra)
        budget = rng.randrange(1, 2_000_000)
        default = divide(costs, request, budget)
        if default.state.slots < costs.ratio:
            continue
        lossless = divide_lossless(small, costs.row, request, budget)
        assert lossless.kv_bytes >= default.kv_bytes
        assert lossless.state.slots >= default.state.slots
        assert lossless.kv_bytes + lossless.state.charged <= budget
        bound += divide(small, request, budget).kv_bytes < default.kv_bytes
    assert bound > 20, "the control: the plain joint solution does leave less"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
