"""Shapes, dtypes and bytes of the recurrent-state cache."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
    extra_groups_for_head_shards,
    mamba2_state_dtype,
    mamba_cache_params,
)
from sglang.srt.environ import envs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.plan_cases import model

register_cpu_ci(est_time=3, suite="unit")


def shape(tp=1, groups=16, heads=32):
    return Mamba2StateShape.create(
        tp_world_size=tp,
        intermediate_size=heads * 128,
        n_groups=groups,
        num_heads=heads,
        head_dim=128,
        state_size=64,
        conv_kernel=4,
    )


def test_shape_of_one_rank():
    """Catches K and V swapped, and groups counted once instead of for q and k."""
    made = shape()
    assert made.conv == [(32 * 128 + 2 * 16 * 64, 3)]
    assert made.temporal == (32, 128, 64)
    assert not made.disable_conv_window_dedup
    assert made.num_k_heads_per_tp == 16


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_shards_times_ranks_is_the_whole(tp):
    one, shard = shape(), shape(tp)
    assert shard.conv[0][0] * tp == one.conv[0][0]
    assert shard.temporal[0] * tp == one.temporal[0]


def test_groups_are_extended_to_one_a_rank():
    assert extra_groups_for_head_shards(16, 4) == 0
    assert extra_groups_for_head_shards(2, 4) == 2
    assert extra_groups_for_head_shards(6, 4) == -2
    assert shape(tp=4, groups=2).conv[0][0] == (32 * 128 + 2 * 4 * 64) // 4


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(AssertionError, match="value heads"):
        shape(tp=4, groups=4, heads=6)


def test_bytes_of_a_slot():
    params = Mamba2CacheParams(
        shape=shape(),
        layers=[0, 1, 4],
        dtype=Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32),
    )
    assert params.mamba_cache_per_req == 3 * (6144 * 3 * 2 + 32 * 128 * 64 * 4)
    assert not params.is_kda


def test_kimi_windows_come_first_and_never_overlap():
    made = KimiLinearStateShape.create(tp_world_size=2, num_heads=8, head_dim=64)
    assert made.conv == [(3, 3 * 8 * 64 // 2)]
    assert made.disable_conv_window_dedup and made.conv_slice_axis == 1
    assert KimiLinearCacheParams(shape=made, layers=[0]).is_kda


def config(**values):
    return SimpleNamespace(**values)


def test_default_dtypes():
    assert mamba2_state_dtype() == Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)


def test_text_config_wins_over_the_root():
    nested = config(mamba_ssm_dtype="float16", text_config=config(mamba_ssm_dtype="bfloat16"))
    assert mamba2_state_dtype(nested).temporal == torch.bfloat16
    assert mamba2_state_dtype(config(mamba_ssm_dtype="float16")).temporal == torch.float16


def test_environment_wins_over_the_config():
    with envs.SGLANG_MAMBA_SSM_DTYPE.override("float32"):
        assert mamba2_state_dtype(config(mamba_ssm_dtype="bfloat16")).temporal == torch.float32


def test_bad_names_warn_and_keep_what_was_chosen(caplog):
    """Catches a bad environment value that resets the config's choice to the default."""
    with caplog.at_level(logging.WARNING, logger="sglang.srt.configs.mamba_utils"):
        with envs.SGLANG_MAMBA_SSM_DTYPE.override("fp7"):
            chosen = mamba2_state_dtype(config(mamba_ssm_dtype="bfloat16"))
        assert chosen.temporal == torch.bfloat16
        assert "environment variable" in caplog.text
        caplog.clear()
        assert mamba2_state_dtype(config(mamba_ssm_dtype="int3")).temporal == torch.float32
        assert "in config" in caplog.text


def test_unknown_conv_dtype_is_bfloat16_without_a_word(caplog):
    with envs.SGLANG_MAMBA_CONV_DTYPE.override("nothing"):
        assert mamba2_state_dtype().conv == torch.bfloat16
    assert not caplog.text
    with envs.SGLANG_MAMBA_CONV_DTYPE.override("float32"):
        assert mamba2_state_dtype().conv == torch.float32


@pytest.mark.parametrize(
    ("name", "slot_mib", "conv_dim"),
    [("Qwen3.6-35B-A3B", 60, 8192), ("Qwen3.8-27B", 144, 10240), ("Qwen3.5-0.8B", 18, 6144)],
)
def test_published_models(name, slot_mib, conv_dim):
    params = mamba_cache_params(model(name))
    conv_bytes = len(params.layers) * conv_dim * 3 * 2
    assert params.mamba_cache_per_req - conv_bytes == slot_mib << 20
    assert params.shape.conv == [(conv_dim, 3)]


def test_flags_win_over_everything():
    with envs.SGLANG_MAMBA_SSM_DTYPE.override("float32"):
        made = mamba_cache_params(
            model("Qwen3.5-0.8B"), tp_size=2, conv_dtype="float32", ssm_dtype="bfloat16"
        )
    assert made.dtype == Mamba2StateDType(conv=torch.float32, temporal=torch.bfloat16)
    with pytest.raises(ValueError, match="--mamba-ssm-dtype 'int8'"):
        mamba_cache_params(model("Qwen3.5-0.8B"), ssm_dtype="int8")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
