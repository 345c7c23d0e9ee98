"""State shapes, dtypes and environment fields, as outside callers use them."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
from types import SimpleNamespace

import pytest
import torch

from sglang.srt.configs.mamba_utils import (
    BaseLinearStateParams,
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
    extra_groups_for_head_shards,
    mamba2_state_dtype,
)
from sglang.srt.environ import envs
from sglang.srt.utils import is_cpu
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit")

LOGGER = "sglang.srt.configs.mamba_utils"
GEOMETRY = {
    "intermediate_size": 4096,
    "n_groups": 16,
    "num_heads": 32,
    "head_dim": 128,
    "state_size": 128,
    "conv_kernel": 4,
}


@pytest.fixture(autouse=True)
def no_dtype_from_outside(monkeypatch):
    for name in ("SGLANG_MAMBA_SSM_DTYPE", "SGLANG_MAMBA_CONV_DTYPE", "SGLANG_ENABLE_PP_SPEC"):
        monkeypatch.delenv(name, raising=False)


def test_dtype_record():
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    assert [f.name for f in dataclasses.fields(Mamba2StateDType)] == ["conv", "temporal"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        dtype.conv = torch.float16
    with pytest.raises(TypeError):
        Mamba2StateDType(torch.bfloat16, torch.float32)


def config(root: str | None = None, text: str | None = None) -> SimpleNamespace:
    values: dict[str, object] = {} if root is None else {"mamba_ssm_dtype": root}
    if text is not None:
        values["text_config"] = SimpleNamespace(mamba_ssm_dtype=text)
    return SimpleNamespace(**values)


@pytest.mark.parametrize(
    ("given", "env", "wanted"),
    [
        (None, None, torch.float32),
        (config(), None, torch.float32),
        (config("bfloat16"), None, torch.bfloat16),
        (config(text="bfloat16"), None, torch.bfloat16),
        (config("float16", "bfloat16"), None, torch.bfloat16),
        (config("bfloat16"), "float32", torch.float32),
        (None, "bfloat16", torch.bfloat16),
    ],
    ids=str,
)
def test_state_dtype_order(given, env, wanted):
    """Catches: the root config before text_config; the config over the environment."""
    with envs.SGLANG_MAMBA_SSM_DTYPE.override(env):
        dtype = mamba2_state_dtype(given)
    assert dtype == Mamba2StateDType(conv=torch.bfloat16, temporal=wanted)


def test_invalid_names_warn_and_change_nothing(caplog):
    """Catches: an error, a silent skip, or a fall-back to float32 over a valid config."""
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        assert mamba2_state_dtype(config("int3")).temporal is torch.float32
    assert [r.name for r in caplog.records] == [LOGGER] and "in config" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING), envs.SGLANG_MAMBA_SSM_DTYPE.override("int3"):
        assert mamba2_state_dtype(config("bfloat16")).temporal is torch.bfloat16
    assert [r.name for r in caplog.records] == [LOGGER]
    assert "environment variable" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING), envs.SGLANG_MAMBA_CONV_DTYPE.override("int3"):
        assert mamba2_state_dtype().conv is torch.bfloat16
    with envs.SGLANG_MAMBA_CONV_DTYPE.override("float32"):
        assert mamba2_state_dtype().conv is torch.float32
    assert not caplog.records


def test_shape_fields_and_create():
    names = {f.name for f in dataclasses.fields(Mamba2StateShape)}
    assert names >= {
        *("conv", "temporal", "disable_conv_window_dedup", "intermediate_size", "conv_dim"),
        *("ssm_state_size", "num_heads", "head_dim", "state_size", "conv_kernel"),
        *("num_k_heads_per_tp", "conv_shard_groups"),
    }
    parameters = inspect.signature(Mamba2StateShape.create).parameters
    assert list(parameters) == ["tp_world_size", *GEOMETRY, "conv_shard_groups"]
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    shape = Mamba2StateShape.create(tp_world_size=2, **GEOMETRY)
    assert shape.conv == [(4096, 3)] and shape.temporal == (16, 128, 128)
    assert shape.conv_dim == 4096 + 2 * 16 * 128 and shape.disable_conv_window_dedup is False
    assert shape.num_k_heads_per_tp == 8 and shape.conv_shard_groups is None


def test_groups_and_divisibility():
    """Catches: groups not extended for more ranks than groups; a silent floor division."""
    assert [extra_groups_for_head_shards(*x) for x in ((16, 4), (2, 4), (6, 4))] == [0, 2, -2]
    wide = Mamba2StateShape.create(tp_world_size=32, **GEOMETRY)
    assert wide.conv == [((4096 + 2 * 32 * 128) // 32, 3)] and wide.temporal == (1, 128, 128)
    for wrong in ({"num_heads": 33}, {"intermediate_size": 4097}):
        with pytest.raises(AssertionError):
            Mamba2StateShape.create(tp_world_size=2, **{**GEOMETRY, **wrong})


def test_cache_params():
    """Catches: layers forgotten in the bytes; conv counted in the state's dtype."""
    shape = Mamba2StateShape.create(tp_world_size=1, **GEOMETRY)
    with envs.SGLANG_MAMBA_SSM_DTYPE.override("bfloat16"):
        params = Mamba2CacheParams(shape=shape, layers=[0, 1, 2])
    assert params.dtype.temporal is torch.bfloat16
    assert params.mamba_cache_per_req == 3 * (8192 * 3 * 2 + 32 * 128 * 128 * 2)
    assert isinstance(params, BaseLinearStateParams) and params.is_kda is False
    dtype = Mamba2StateDType(conv=torch.float32, temporal=torch.float32)
    wide = Mamba2CacheParams(shape=shape, layers=[0], dtype=dtype)
    assert wide.mamba_cache_per_req == 8192 * 3 * 4 + 32 * 128 * 128 * 4
    ring = params.replayssm_ring_bytes_per_req(8)
    assert ring > 0 and params.replayssm_ring_bytes_per_req(record_len=16) == 2 * ring


def test_kda_params():
    shape = KimiLinearStateShape.create(
        tp_world_size=2, num_heads=8, head_dim=64, num_k_heads=8, head_k_dim=64, conv_kernel_size=4
    )
    assert shape.disable_conv_window_dedup is True and shape.conv_slice_axis == 1
    assert all(window == 3 for window, _ in shape.conv)
    assert sum(dims for _, dims in shape.conv) == 3 * 8 * 64 // 2
    assert KimiLinearCacheParams(shape=shape, layers=[1]).is_kda is True


def test_fields_are_no_values():
    for use in (bool, len):
        with pytest.raises(RuntimeError):
            use(envs.SGLANG_ENABLE_PP_SPEC)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((t, True) for t in ("true", "1", "yes", "y", "TRUE", "Yes", "Y")),
        *((t, False) for t in ("false", "0", "no", "n", "FALSE", "No", "N")),
    ],
)
def test_booleans(text, value, monkeypatch):
    """Catches: a value cached at import; a word missing; case."""
    monkeypatch.setenv("SGLANG_ENABLE_PP_SPEC", text)
    assert envs.SGLANG_ENABLE_PP_SPEC.get() is value
    monkeypatch.setenv("SGLANG_ENABLE_PP_SPEC", "false" if value else "true")
    assert envs.SGLANG_ENABLE_PP_SPEC.get() is not value


def test_unreadable_text(monkeypatch, caplog):
    monkeypatch.setenv("SGLANG_ENABLE_PP_SPEC", "perhaps")
    with caplog.at_level(logging.WARNING):
        assert envs.SGLANG_ENABLE_PP_SPEC.get() is False
    assert "SGLANG_ENABLE_PP_SPEC" in caplog.text


def test_set_clear_override():
    """Catches: an override that survives an error in its body, or forgets what was set before."""
    field = envs.SGLANG_MAMBA_CONV_DTYPE
    assert not field.is_set() and field.get() == "bfloat16"
    field.set("float16")
    assert field.is_set() and os.environ["SGLANG_MAMBA_CONV_DTYPE"] == "float16"
    with pytest.raises(KeyError), field.override("float32"):
        assert field.get() == "float32"
        raise KeyError
    assert field.get() == "float16"
    with field.override(None):
        assert field.get() is None
    assert field.get() == "float16"
    field.clear()
    assert field.get() == "bfloat16" and not field.is_set()
    with field.override("float32"), field.override("float16"):
        assert field.get() == "float16"
    assert not field.is_set()


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("SGLANG_ENABLE_PP_SPEC", False),
        ("SGLANG_RAGGED_VERIFY_MODE", "static"),
        ("SGLANG_MAMBA_SSM_DTYPE", None),
        ("SGLANG_MAMBA_CONV_DTYPE", "bfloat16"),
        ("SGLANG_OPT_MAMBA_SKIP_DECODE_LOCK", False),
        ("SGLANG_DEBUG_MEMORY_POOL", False),
        ("SGLANG_DISABLE_FUSED_MAMBA_SLOT_OPS", False),
        ("SGLANG_VALIDATE_MAMBA_REPLAY_STATE_INDICES", False),
        ("SGLANG_IS_IN_CI", False),
        ("SGLANG_TEST_MAX_RETRY", None),
    ],
)
def test_fields_and_defaults(name, default, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    assert getattr(envs, name).get() == default


def test_cpu_engine_is_asked_for(monkeypatch):
    """A machine without a GPU is not "cpu"."""
    for text, value in (("0", False), ("1", True), ("true", False)):
        monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", text)
        assert is_cpu() is value
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE")
    assert is_cpu() is False


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
