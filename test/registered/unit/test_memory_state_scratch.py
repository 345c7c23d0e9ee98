"""Verify scratch of the state pool: bytes, kinds, refusals, windows that share columns."""

from __future__ import annotations

from dataclasses import fields
from unittest.mock import patch

import pytest
import torch

from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
)
from sglang.srt.mem_cache.memory_pool import (
    MambaPool,
    check_linear_lossless_verify,
    conv_window_dedup_enabled,
    spec_intermediate_bytes_per_req,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.pool_cases import params, pool, scratch_storage

register_cpu_ci(est_time=3, suite="unit")


@pytest.mark.parametrize("draft_tokens", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("ssm", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("lossless", "topk"), [(False, None), (False, 1), (False, 4), (True, 1)], ids=str
)
def test_formula_equals_allocation(draft_tokens, ssm, lossless, topk):
    """Catches a formula and an allocation that drift apart, for every width, dtype and mode."""
    p = params(ssm=ssm)
    made = pool(draft_tokens, topk, lossless, p=p)
    per_row = spec_intermediate_bytes_per_req(
        p, draft_tokens, speculative_eagle_topk=topk, enable_linear_lossless_verify=lossless
    )
    assert per_row * 6 == scratch_storage(made)
    total = p.mamba_cache_per_req * 7 + per_row * 6
    assert made.get_kv_size_bytes() == total
    assert made.mem_usage == total / (1 << 30)
    made.check_integrity()


@pytest.mark.parametrize(
    ("lossless", "draft_tokens", "nbytes"),
    [(True, 2, 262_656), (True, 4, 459_776), (True, 8, 854_016), (False, 4, 16_973_824)],
)
def test_contract_values(lossless, draft_tokens, nbytes):
    p = params(heads=32, groups=16, layers=[0, 1], k=128, v=128)
    assert nbytes == spec_intermediate_bytes_per_req(
        p, draft_tokens, speculative_eagle_topk=1, enable_linear_lossless_verify=lossless
    )


def test_snapshot_pool():
    made = pool()
    cache = made.mamba_cache
    assert cache.temporal.shape == (3, 7, 4, 8, 16)
    assert cache.conv[0].shape == (3, 7, 96, 3)
    assert cache.intermediate_ssm.shape == (3, 6, 4, 4, 8, 16)
    assert cache.intermediate_conv_window[0].shape == (3, 6, 4, 96, 3)
    for name in ("intermediate_ssm_u", "intermediate_ssm_k", "intermediate_ssm_g"):
        assert getattr(cache, name) is None
    with pytest.raises(AttributeError):
        cache.temporal = None


@pytest.mark.parametrize("ssm", [torch.float32, torch.bfloat16], ids=str)
def test_lossless_pool_keeps_fp32_tuples_whatever_the_state_is(ssm):
    cache = pool(lossless=True, p=params(ssm=ssm)).mamba_cache
    assert cache.intermediate_ssm is None
    assert cache.temporal.dtype == ssm
    shapes = {"u": (3, 6, 4, 4, 8), "k": (3, 6, 4, 4, 16), "g": (3, 6, 4, 4)}
    for name, shape in shapes.items():
        ring = getattr(cache, f"intermediate_ssm_{name}")
        assert ring.shape == shape and ring.dtype == torch.float32
        assert not ring.any(), "the ring must start as zeros"


def test_no_speculation_builds_no_scratch_and_checks_nothing():
    """A prefill server passes the flag on but never verifies."""
    made = pool(None, topk=None, lossless=True)
    assert type(made.mamba_cache) is MambaPool.State
    assert made._intermediate_conv_window_phys == []
    with pytest.raises(AssertionError):
        made.get_speculative_mamba2_params_all_layers()


def kimi_params():
    shape = KimiLinearStateShape.create(tp_world_size=1, num_heads=2, head_dim=8)
    return KimiLinearCacheParams(shape=shape, layers=[0, 1])


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"topk": 2}, "--speculative-eagle-topk 1, got 2"),
        ({"topk": None}, "--speculative-eagle-topk 1, got None"),
        ({"p": kimi_params()}, "KDA"),
        ({"enable_linear_replayssm_spec": True}, "--enable-linear-replayssm-spec"),
    ],
    ids=["tree", "unset", "kda", "replayssm"],
)
def test_lossless_refusals(kwargs, words):
    with pytest.raises(ValueError, match=words):
        pool(lossless=True, **kwargs)


def test_order_of_refusals():
    with pytest.raises(ValueError, match="topk"):
        check_linear_lossless_verify(
            speculative_eagle_topk=3, is_kda=True, enable_linear_replayssm_spec=True
        )
    with pytest.raises(ValueError, match="KDA"):
        check_linear_lossless_verify(
            speculative_eagle_topk=1, is_kda=True, enable_linear_replayssm_spec=True
        )


@pytest.mark.parametrize(
    ("npu", "cpu", "topk", "kda", "shared"),
    [
        (False, False, None, False, True),
        (False, False, 1, False, True),
        (False, False, 2, False, False),
        (True, False, 1, False, False),
        (False, True, 1, False, False),
        (False, False, 1, True, False),
    ],
)
def test_when_windows_share_columns(npu, cpu, topk, kda, shared):
    assert conv_window_dedup_enabled(npu, cpu, topk, kda) is shared


@pytest.mark.parametrize("flag", ["_is_npu", "_is_cpu"])
def test_platform_flags_are_read_when_a_pool_is_built(flag):
    """Catches flags copied at import, and views that are no longer the buffers themselves."""
    shared = pool()
    with patch(f"sglang.srt.mem_cache.memory_pool.{flag}", True):
        dense = pool()
        per_row = spec_intermediate_bytes_per_req(params(), 4, speculative_eagle_topk=1)
    assert per_row * 6 == scratch_storage(dense) > scratch_storage(shared)
    cache = dense.mamba_cache
    assert dense._intermediate_conv_window_phys is cache.intermediate_conv_window
    assert cache.intermediate_conv_window[0].shape == (
        shared.mamba_cache.intermediate_conv_window[0].shape
    )


def test_shared_windows_overlap_by_all_but_one_column():
    """Step d's window starts one column after step d-1's; writing one shows in the other."""
    made = pool(draft_tokens=5)
    physical = made._intermediate_conv_window_phys[0]
    view = made.mamba_cache.intermediate_conv_window[0]
    assert physical.shape == (3, 6, 96, 7) and view.shape == (3, 6, 5, 96, 3)
    physical.copy_(torch.arange(physical.numel()).reshape(physical.shape) % 251)
    for step in range(5):
        assert torch.equal(view[:, :, step], physical[..., step : step + 3])
    view[2, 5, 1, 7, 2] = -3
    assert view[2, 5, 2, 7, 1] == view[2, 5, 3, 7, 0] == -3
    layer = made.mamba2_layer_cache(1).intermediate_conv_window[0]
    assert layer.untyped_storage().data_ptr() == physical.untyped_storage().data_ptr()


def test_window_axis_of_a_subclass_and_missing_device():
    class WindowFirst(MambaPool):
        conv_window_axis = 0

    made = object.__new__(WindowFirst)
    physical, view = made._allocate_deduplicated_conv_window(
        conv_shape=(3, 5),
        num_mamba_layers=2,
        spec_state_size=3,
        speculative_num_draft_tokens=4,
        conv_dtype=torch.float32,
    )
    assert physical.shape == (2, 4, 6, 5) and view.shape == (2, 4, 4, 3, 5)
    physical.copy_(torch.arange(physical.numel()).reshape(physical.shape))
    for step in range(4):
        assert torch.equal(view[:, :, step], physical[:, :, step : step + 3])


@pytest.mark.parametrize("lossless", [False, True])
def test_one_layer_is_the_same_kind_of_state(lossless):
    made = pool(lossless=lossless)
    layer = made.mamba_cache.at_layer_idx(2)
    assert type(layer) is MambaPool.SpeculativeState
    for item in fields(layer):
        whole, part = getattr(made.mamba_cache, item.name), getattr(layer, item.name)
        if whole is None:
            assert part is None
        elif isinstance(whole, list):
            assert [p.data_ptr() for p in part] == [w[2].data_ptr() for w in whole]
        else:
            assert part.data_ptr() == whole[2].data_ptr() and part.shape == whole.shape[1:]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
