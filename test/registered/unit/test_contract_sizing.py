"""`KVCacheConfigurator` methods called unbound on namespaces, as outside callers use them."""

from __future__ import annotations

import dataclasses
import inspect
from types import SimpleNamespace

import pytest
import torch

from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.environ import envs
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import spec_intermediate_bytes_per_req
from sglang.srt.runtime_context import get_context, get_exec, get_schedule
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit")

GIB = 1 << 30
STATE = 1 << 20


@pytest.fixture(autouse=True)
def gpu_rules(monkeypatch):
    monkeypatch.setattr(memory_pool, "_is_cpu", False)
    monkeypatch.setattr(memory_pool, "_is_npu", False)


def qwen(layers: int = 30) -> Mamba2CacheParams:
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=4096,
        n_groups=16,
        num_heads=32,
        head_dim=128,
        state_size=128,
        conv_kernel=4,
    )
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    return Mamba2CacheParams(shape=shape, layers=list(range(layers)), dtype=dtype)


def arguments(**values):
    base = {
        "mamba_radix_cache_strategy": "no_buffer",
        "disable_radix_cache": False,
        "max_mamba_cache_size": None,
        "max_running_requests": 16,
        "mamba_full_memory_ratio": 0.9,
        "enable_linear_lossless_verify": False,
        "speculative_algorithm": "EAGLE",
        "speculative_num_draft_tokens": 4,
        "speculative_eagle_topk": 1,
    }
    return get_context().override_server_args(**{**base, **values})


def plain(**values) -> SimpleNamespace:
    """What a call without speculation may read, and no more."""
    base = {
        "mambaish_config": SimpleNamespace(
            mamba2_cache_params=SimpleNamespace(mamba_cache_per_req=STATE, layers=[0, 1, 2, 4, 5])
        ),
        "pp_size": 1,
        "attn_dp_size": 1,
        "model_config": None,
        "spec_algorithm": SimpleNamespace(is_none=lambda: True),
        "hybrid_gdn_config": object(),
        "_calculate_mamba_ratio": lambda: 3,
    }
    return SimpleNamespace(**{**base, **values})


def speculative(row: int = STATE // 4, extra: int = 0, **values) -> SimpleNamespace:
    return plain(
        spec_algorithm=SimpleNamespace(is_none=lambda: False),
        hybrid_kda_config=None,
        extra_mamba_cache_bytes_per_req=extra,
        _linear_lossless_verify_enabled=lambda: True,
        _spec_intermediate_bytes=lambda n, scale: int(row * scale) * n,
        **values,
    )


def solve(configurator: SimpleNamespace, rest: float, **values) -> tuple[int, float]:
    """(slots, bytes charged)"""
    with arguments(**values):
        left = KVCacheConfigurator._handle_max_mamba_cache(configurator, rest)
        return get_schedule().max_mamba_cache_size, (rest - left) * GIB


def test_class_form():
    assert dataclasses.is_dataclass(KVCacheConfigurator) and KVCacheConfigurator.__slots__
    parameters = list(inspect.signature(KVCacheConfigurator).parameters.values())
    assert {p.kind for p in parameters} == {inspect.Parameter.KEYWORD_ONLY}


def test_first_branch_slots_given():
    """Catches: the ratio applied to what is published; dp ignored; the discard row forgotten."""
    slots, charged = solve(speculative(), 8, max_mamba_cache_size=30, max_running_requests=100)
    assert slots == 30 and charged == pytest.approx(31 * STATE + (10 + 1) * STATE // 4)
    dp = speculative(attn_dp_size=2)
    slots, charged = solve(dp, 8, max_mamba_cache_size=60, max_running_requests=8)
    assert slots == 30 and charged == pytest.approx(31 * STATE + (4 + 1) * STATE // 4)
    slots, charged = solve(plain(), 8, max_mamba_cache_size=30, speculative_algorithm=None)
    assert slots == 30 and charged == pytest.approx(31 * STATE)


def test_second_branch_no_prefix_cache():
    c = speculative(_calculate_mamba_ratio=lambda: 1, attn_dp_size=2)
    slots, charged = solve(c, 8, disable_radix_cache=True, max_running_requests=16)
    assert slots == 8 and charged == pytest.approx(9 * STATE + 9 * STATE // 4)


@pytest.mark.parametrize("extra", [0, STATE // 8])
@pytest.mark.parametrize("ratio", [0.5, 0.9])
def test_third_branch_joint_solution(ratio, extra):
    """Catches: P and I solved one after the other; rows not capped by the running requests."""
    row, rest = STATE // 4, 2.0
    budget = rest * GIB * ratio / (1 + ratio)
    slots, charged = solve(
        speculative(row, extra), rest, mamba_full_memory_ratio=ratio, max_running_requests=16
    )
    want = int((budget - STATE - row - extra) // (STATE + row / 3 + extra))
    assert slots == want > 48
    assert charged == pytest.approx((16 + 1) * row + (want + 1) * (STATE + extra))
    slots, charged = solve(
        speculative(row, extra), rest, mamba_full_memory_ratio=ratio, max_running_requests=None
    )
    assert slots == want
    assert charged == pytest.approx((want // 3 + 1) * row + (want + 1) * (STATE + extra))
    # The equation that it solves: one slot more would not fit.
    assert (want + 1) * (STATE + extra) + (want / 3 + 1) * row <= budget
    assert (want + 2) * (STATE + extra) + ((want + 1) / 3 + 1) * row > budget


def test_third_branch_without_scratch():
    budget = 2.0 * GIB * 0.9 / 1.9
    want = int((budget - STATE) // STATE)
    slots, charged = solve(plain(), 2.0, speculative_algorithm=None)
    assert slots == want and charged == pytest.approx((want + 1) * STATE)
    slots, _ = solve(plain(), 2.0, mamba_full_memory_ratio=None, speculative_algorithm=None)
    assert slots == want


def test_when_no_scratch_is_reserved():
    """Catches: scratch reserved on a prefill server, or beside the ring of ReplaySSM."""
    c = speculative()
    c._spec_intermediate_bytes = lambda n, scale: pytest.fail("scratch was priced")
    slots, charged = solve(c, 2.0, disaggregation_mode="prefill")
    assert charged == pytest.approx((slots + 1) * STATE)
    c.mambaish_config.mamba2_cache_params.replayssm_ring_bytes_per_req = lambda record_len: 64
    slots, charged = solve(c, 2.0, enable_linear_replayssm_spec=True)
    assert charged == pytest.approx((slots + 1) * (STATE + 64))


def test_pipeline_stages_share_layers():
    """The fullest of two stages of three layers holds three of five linear layers."""
    stages = plain(pp_size=2, model_config=SimpleNamespace(num_hidden_layers=6))
    slots, charged = solve(stages, 2.0, speculative_algorithm=None)
    per_slot = int(STATE * 3 / 5)
    assert charged == pytest.approx((slots + 1) * per_slot)
    assert slots == int((2.0 * GIB * 0.9 / 1.9 - per_slot) // per_slot)


def test_no_slot_fits():
    with pytest.raises(RuntimeError, match="--mem-fraction-static"):
        solve(speculative(), 0.001)


def test_published_value_is_undone_with_its_scope():
    with arguments() as outer:
        with arguments():
            KVCacheConfigurator._handle_max_mamba_cache(speculative(), 2.0)
            assert get_schedule().max_mamba_cache_size > 0
        assert outer.max_mamba_cache_size is None
        assert get_schedule().max_mamba_cache_size is None


@pytest.mark.parametrize(
    ("values", "skip", "wanted"),
    [
        ({"disable_radix_cache": True}, False, 1),
        ({"disable_radix_cache": True}, True, 1),
        ({}, False, 3),
        ({}, True, 3),
        ({"mamba_radix_cache_strategy": "extra_buffer"}, False, 5),
        ({"mamba_radix_cache_strategy": "extra_buffer"}, True, 4),
        ({"mamba_radix_cache_strategy": "extra_buffer_lazy"}, False, 4),
        ({"mamba_radix_cache_strategy": "extra_buffer_lazy"}, True, 3),
        (
            {"mamba_radix_cache_strategy": "extra_buffer", "disable_overlap_schedule": True},
            False,
            4,
        ),
    ],
    ids=str,
)
def test_slot_ratio(values, skip, wanted):
    with arguments(**values), envs.SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK.override(skip):
        assert KVCacheConfigurator._calculate_mamba_ratio(SimpleNamespace()) == wanted


def test_lossless_enabled():
    ask = KVCacheConfigurator._linear_lossless_verify_enabled
    gdn, other = (SimpleNamespace(hybrid_gdn_config=c) for c in (object(), None))
    with arguments(enable_linear_lossless_verify=False):
        assert ask(gdn) is False and ask(other) is False
    with arguments(enable_linear_lossless_verify=True):
        assert get_exec().mamba.enable_linear_lossless_verify is True
        assert ask(gdn) is True
        with pytest.raises(ValueError, match="--enable-linear-lossless-verify"):
            ask(other)


@pytest.mark.parametrize("scale", [1.0, 0.37])
@pytest.mark.parametrize("lossless", [True, False])
def test_scratch_bytes(lossless, scale):
    """Catches: stock price by the adaptive width, lossless price by the configured one."""
    params = qwen()
    c = SimpleNamespace(
        mambaish_config=SimpleNamespace(mamba2_cache_params=params),
        hybrid_gdn_config=object(),
        _linear_lossless_verify_enabled=lambda: lossless,
    )
    adaptive = {"speculative_adaptive": True, "speculative_num_draft_tokens": 4}
    with arguments(enable_linear_lossless_verify=lossless, **adaptive) as args:
        widest = args.max_speculative_num_draft_tokens()
        got = KVCacheConfigurator._spec_intermediate_bytes(c, 26, scale)
    assert widest > 4
    if lossless:
        row = spec_intermediate_bytes_per_req(
            params, widest, speculative_eagle_topk=1, enable_linear_lossless_verify=True
        )
        assert got == int(row * scale) * 26
    else:
        assert got == int(params.mamba_cache_per_req * scale) * 26 * 4


def test_published_figures():
    """30 layers, 16/32 heads, 4 drafts, 26 rows: 0.096 GiB of ring, 0.167 with windows, 6.09 stock."""
    params = qwen()
    ring = 30 * 32 * (128 + 128 + 1) * 4 * 4 * 26
    assert round(ring / GIB, 3) == 0.096
    row = spec_intermediate_bytes_per_req(
        params, 4, speculative_eagle_topk=1, enable_linear_lossless_verify=True
    )
    assert round(row * 26 / GIB, 3) == 0.167
    assert params.mamba_cache_per_req * 4 * 26 / GIB > 6.09


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
