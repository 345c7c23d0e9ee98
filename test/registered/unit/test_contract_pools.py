"""`MambaPool` and the rules about its scratch, as outside callers use them."""

from __future__ import annotations

import dataclasses
import importlib
import inspect

import pytest
import torch

from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.memory_pool import (
    MambaPool,
    check_linear_lossless_verify,
    conv_window_dedup_enabled,
    get_tensor_size_bytes,
    spec_intermediate_bytes_per_req,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="unit")

TUPLES = ("intermediate_ssm_u", "intermediate_ssm_k", "intermediate_ssm_g")


@pytest.fixture(autouse=True)
def gpu_rules(monkeypatch):
    monkeypatch.setattr(memory_pool, "_is_cpu", False)
    monkeypatch.setattr(memory_pool, "_is_npu", False)


def params(
    layers: int = 2, heads: int = 32, dim: int = 128, state: torch.dtype = torch.float32
) -> Mamba2CacheParams:
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=heads * dim,
        n_groups=heads // 2,
        num_heads=heads,
        head_dim=dim,
        state_size=dim,
        conv_kernel=4,
    )
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=state)
    return Mamba2CacheParams(shape=shape, layers=list(range(layers)), dtype=dtype)


SMALL = params(heads=2, dim=8)


def pool(cache_params=SMALL, **values) -> MambaPool:
    base = {
        "size": 6,
        "spec_state_size": 3,
        "cache_params": cache_params,
        "mamba_layer_ids": [4, 6],
        "device": "cpu",
        "speculative_num_draft_tokens": 4,
        "speculative_eagle_topk": 1,
    }
    return MambaPool(**{**base, **values})


def test_module_names():
    assert importlib.import_module("sglang.srt.mem_cache.memory_pool") is memory_pool
    assert isinstance(memory_pool._is_cpu, bool) and isinstance(memory_pool._is_npu, bool)


def test_tensor_sizes():
    t = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert get_tensor_size_bytes(t) == 12 and get_tensor_size_bytes([t, t]) == 24
    assert get_tensor_size_bytes(torch.zeros(4).as_strided((3, 2), (1, 1))) == 24


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ((False, False, None, False), True),
        ((False, False, 1, False), True),
        ((False, False, 0, False), True),
        ((False, False, 2, False), False),
        ((True, False, 1, False), False),
        ((False, True, 1, False), False),
        ((False, False, 1, True), False),
    ],
)
def test_dedup_rule(arguments, wanted):
    assert conv_window_dedup_enabled(*arguments) is wanted


def test_lossless_rule_order():
    """Catches: topk None accepted; another order of the three errors."""
    ok = {"speculative_eagle_topk": 1, "is_kda": False, "enable_linear_replayssm_spec": False}
    assert check_linear_lossless_verify(**ok) is None
    cases = (
        ({"is_kda": True, "enable_linear_replayssm_spec": True}, "KDA"),
        ({"enable_linear_replayssm_spec": True}, "replayssm-spec"),
    )
    for topk in (None, 0, 2):
        worst = {"is_kda": True, "enable_linear_replayssm_spec": True}
        with pytest.raises(ValueError, match="topk"):
            check_linear_lossless_verify(**{**ok, **worst, "speculative_eagle_topk": topk})
    for values, gist in cases:
        with pytest.raises(ValueError, match=gist):
            check_linear_lossless_verify(**{**ok, **values})
    with pytest.raises(TypeError):
        check_linear_lossless_verify(1, False, False)


@pytest.mark.parametrize(("draft", "wanted"), [(2, 262656), (4, 459776), (8, 854016)])
def test_lossless_check_values(draft, wanted):
    got = spec_intermediate_bytes_per_req(
        params(), draft, speculative_eagle_topk=1, enable_linear_lossless_verify=True
    )
    assert got == wanted == 2 * (8192 * (draft + 2) * 2 + 32 * 257 * draft * 4)


def test_snapshot_check_value_and_dedup_default():
    """Catches: topk None taken for a tree; dense windows where they are shared."""
    assert spec_intermediate_bytes_per_req(params(), 4) == 16973824
    dense = spec_intermediate_bytes_per_req(params(), 4, speculative_eagle_topk=2)
    assert dense == 2 * (8192 * 3 * 4 * 2 + 32 * 128 * 128 * 4 * 4)
    parameters = inspect.signature(spec_intermediate_bytes_per_req).parameters
    assert [(p.name, p.kind is p.KEYWORD_ONLY) for p in parameters.values()] == [
        ("cache_params", False),
        ("speculative_num_draft_tokens", False),
        ("speculative_eagle_topk", True),
        ("enable_linear_lossless_verify", True),
    ]


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("lossless", "topk"), [(True, 1), (False, 1), (False, 3)])
def test_bytes_equal_what_is_allocated(lossless, topk, state):
    """Catches: a formula that forgets the discard row, the state dtype, or shared columns."""
    cache_params = params(heads=2, dim=8, state=state)
    p = pool(cache_params, speculative_eagle_topk=topk, enable_linear_lossless_verify=lossless)
    scratch = [*p._intermediate_conv_window_phys]
    scratch += [t for t in (getattr(p.mamba_cache, n) for n in TUPLES) if t is not None]
    if p.mamba_cache.intermediate_ssm is not None:
        scratch.append(p.mamba_cache.intermediate_ssm)
    actual = sum(t.untyped_storage().nbytes() for t in scratch)
    per_row = spec_intermediate_bytes_per_req(
        cache_params, 4, speculative_eagle_topk=topk, enable_linear_lossless_verify=lossless
    )
    assert per_row * (3 + 1) == actual


def test_constructor_and_state_fields():
    parameters = inspect.signature(MambaPool.__init__).parameters
    wanted = {
        **dict.fromkeys("size spec_state_size cache_params mamba_layer_ids device".split(), "none"),
        "enable_memory_saver": False,
        "speculative_num_draft_tokens": None,
        "speculative_eagle_topk": None,
        "enable_linear_replayssm": False,
        "linear_replayssm_cache_len": 16,
        "envelope_layout": False,
        "enable_linear_replayssm_spec": False,
        "enable_linear_lossless_verify": False,
    }
    names = list(parameters)[1:]
    assert names[: len(wanted)] == list(wanted)
    for name, default in wanted.items():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        empty = parameters[name].default is inspect.Parameter.empty
        assert empty if default == "none" else parameters[name].default == default
    base = ["conv", "temporal", *(f"replayssm_{n}" for n in "d k g rawv rawk beta".split())]
    assert [f.name for f in dataclasses.fields(MambaPool.State)] == base
    spec = [f.name for f in dataclasses.fields(MambaPool.SpeculativeState)]
    assert spec == [*base, "intermediate_ssm", "intermediate_conv_window", *TUPLES]
    assert issubclass(MambaPool.SpeculativeState, MambaPool.State)
    with pytest.raises(TypeError):
        MambaPool.SpeculativeState(conv=[], temporal=torch.zeros(1))


def test_lossless_pool():
    """Catches: a ring in the state's dtype, or not zeroed; snapshots allocated beside it."""
    p = pool(params(heads=2, dim=8, state=torch.bfloat16), enable_linear_lossless_verify=True)
    cache = p.get_speculative_mamba2_params_all_layers()
    assert cache.intermediate_ssm is None
    shapes = ((2, 4, 4, 2, 8), (2, 4, 4, 2, 8), (2, 4, 4, 2))
    for name, shape in zip(TUPLES, shapes):
        tensor = getattr(cache, name)
        assert tensor.shape == shape and tensor.dtype is torch.float32 and tensor.eq(0).all()
    snapshots = pool().mamba_cache
    assert snapshots.intermediate_ssm.shape == (2, 4, 4, 2, 8, 8)
    assert [getattr(snapshots, name) for name in TUPLES] == [None] * 3
    assert snapshots.temporal.shape == (2, 7, 2, 8, 8) and snapshots.conv[0].shape == (2, 7, 32, 3)


def test_replayssm_and_lossless_exclude_each_other():
    p = pool(enable_linear_replayssm_spec=True)
    assert p.mamba_cache.intermediate_ssm is None and p.mamba_cache.intermediate_ssm_u is None
    assert p.replayssm_spec_fold is True
    with pytest.raises(ValueError, match="replayssm-spec"):
        pool(enable_linear_replayssm_spec=True, enable_linear_lossless_verify=True)


def test_pool_without_drafts_runs_no_lossless_check():
    for values in ({"speculative_eagle_topk": 4}, {"speculative_eagle_topk": None}):
        p = pool(speculative_num_draft_tokens=None, enable_linear_lossless_verify=True, **values)
        assert type(p.mamba_cache) is MambaPool.State
        with pytest.raises(AssertionError):
            p.get_speculative_mamba2_params_all_layers()
        with pytest.raises(ValueError):
            pool(enable_linear_lossless_verify=True, **values)


def test_kda_pool_refuses_and_never_shares_windows():
    shape = KimiLinearStateShape.create(tp_world_size=1, num_heads=2, head_dim=8)
    kda = KimiLinearCacheParams(shape=shape, layers=[0, 1])
    with pytest.raises(ValueError, match="KDA"):
        pool(kda, enable_linear_lossless_verify=True)
    p = pool(kda)
    assert p.replayssm_is_kda is True
    assert p._intermediate_conv_window_phys is p.mamba_cache.intermediate_conv_window


@pytest.mark.parametrize("lossless", [True, False])
def test_at_layer_idx(lossless):
    cache = pool(enable_linear_lossless_verify=lossless).mamba_cache
    layer = cache.at_layer_idx(1)
    assert type(layer) is type(cache)
    for field in dataclasses.fields(cache):
        whole, part = getattr(cache, field.name), getattr(layer, field.name)
        if whole is None:
            assert part is None
        elif isinstance(whole, list):
            assert [x.data_ptr() for x in part] == [x[1].data_ptr() for x in whole]
            assert [x.stride() for x in part] == [x[1].stride() for x in whole]
        else:
            assert part.data_ptr() == whole[1].data_ptr() and part.shape == whole.shape[1:]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
