"""Kernel families, scratch rows, dispatcher and GDN adapter, as outside callers use them."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest
import torch

from sglang.srt.environ import envs
from sglang.srt.layers.attention.linear import gdn_backend, utils
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend, GDNKernelDispatcher
from sglang.srt.layers.attention.linear.kernels import gdn_triton
from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel
from sglang.srt.layers.attention.linear.kernels.kernel_base import LinearAttnKernelBase
from sglang.srt.layers.attention.linear.utils import (
    LinearAttnBackends,
    LinearAttnKernelBackend,
    build_verify_intermediate_state_indices,
    pp_spec_stable_rows_enabled,
    resolve_linear_attn_backends,
    select_verify_intermediate_state_indices,
)
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context, get_exec
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="unit")

TRITON, FLASHINFER = LinearAttnKernelBackend.TRITON, LinearAttnKernelBackend.FLASHINFER


@pytest.mark.parametrize(
    "name",
    "triton cutedsl nv_cutedsl flashinfer flashkda nvidia_kda ptx_kda helion intel_xpu".split(),
)
def test_families(name):
    member = LinearAttnKernelBackend(name)
    assert member.value == name and getattr(member, f"is_{name}")()
    assert not LinearAttnKernelBackend("something new").is_triton()
    assert LinearAttnKernelBackend("something new") is LinearAttnKernelBackend.CUSTOM


@pytest.mark.parametrize(
    ("values", "default", "wanted"),
    [
        ({}, None, ("triton", "triton", "triton")),
        ({}, "flashinfer", ("triton", "flashinfer", "triton")),
        ({"linear_attn_prefill_backend": "cutedsl"}, None, ("triton", "cutedsl", "triton")),
        (
            {"linear_attn_decode_backend": "flashinfer"},
            None,
            ("flashinfer", "triton", "flashinfer"),
        ),
        (
            {"linear_attn_backend": "flashinfer", "linear_attn_verify_backend": "triton"},
            None,
            ("flashinfer", "flashinfer", "triton"),
        ),
    ],
    ids=str,
)
def test_families_of_the_published_arguments(values, default, wanted):
    """Catches: the prefill default reaching decode or the record; verify following prefill."""
    with get_context().override_server_args(**values):
        backends = resolve_linear_attn_backends(prefill_default=default)
        assert isinstance(backends, LinearAttnBackends)
        got = (backends.decode, backends.prefill, backends.verify)
        assert tuple(b.value for b in got) == wanted
        if not values:
            assert get_exec().mamba.linear_attn_prefill_backend is None
            assert resolve_linear_attn_backends().prefill is TRITON


def test_stable_rows_are_read_each_call():
    assert pp_spec_stable_rows_enabled() is False
    with envs.SGLANG_ENABLE_PP_SPEC.override(True):
        assert pp_spec_stable_rows_enabled() is True
    assert pp_spec_stable_rows_enabled() is False


def test_scratch_rows_of_a_verify():
    """Catches: a copy of the default rows; the discard row off by one; another dtype."""
    default = torch.arange(8, dtype=torch.int32)
    rows, valid = torch.tensor([17, 23, 31]), torch.tensor([True, False, True])
    arguments = (default, rows, valid)
    assert select_verify_intermediate_state_indices(*arguments, 64) is default
    with patch.object(utils, "pp_spec_stable_rows_enabled", return_value=True):
        got = select_verify_intermediate_state_indices(*arguments, pool_size=64)
    assert got.dtype is torch.int32 and got.tolist() == [17, 64, 31]


@pytest.mark.parametrize("size", [1, 5])
def test_default_rows_end_with_the_discard_row(size):
    rows = build_verify_intermediate_state_indices(size, "cpu")
    assert rows.dtype is torch.int32 and rows[:size].tolist() == list(range(size))
    assert rows.numel() > size and rows[size:].eq(size).all()


def test_dispatcher():
    """Catches: trees sent to another kernel than Triton's; a family without kernels taken silently."""
    parameters = inspect.signature(GDNKernelDispatcher).parameters
    assert list(parameters) == ["decode_backend", "prefill_backend", "verify_backend"]
    assert parameters["verify_backend"].default is None
    for verify in (None, TRITON):
        dispatcher = GDNKernelDispatcher(TRITON, TRITON, verify)
        assert isinstance(dispatcher.verify_kernel, TritonGDNKernel)
        assert type(dispatcher.tree_verify_kernel) is TritonGDNKernel
        assert dispatcher.verify_kernel_is_flashinfer is False
        assert dispatcher.target_verify_supports_strided_qkv is True
    with pytest.raises(ValueError, match="--linear-attn-decode-backend flashinfer"):
        GDNKernelDispatcher(FLASHINFER, TRITON)


def test_adapter_surface():
    assert issubclass(TritonGDNKernel, LinearAttnKernelBase)
    assert TritonGDNKernel.supports_packed_decode is True
    assert TritonGDNKernel.supports_strided_target_verify_qkv is True
    for name in ("packed_decode", "decode", "extend"):
        assert callable(getattr(TritonGDNKernel, name))
    parameters = inspect.signature(TritonGDNKernel.target_verify).parameters
    assert list(parameters)[1:8] == ["A_log", "dt_bias", "q", "k", "v", "a", "b"]
    keywords = {p.name: p.default for p in parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert set(keywords) >= {
        *("ssm_states", "cache_indices", "query_start_loc", "intermediate_states_buffer"),
        *("intermediate_state_indices", "cache_steps", "retrieve_parent_token", "stable_rows"),
    }
    assert [keywords[f"{name}_states_buffer"] for name in "ukg"] == [None] * 3


@pytest.mark.parametrize("lossless", [True, False])
def test_adapter_forwards_tuples_only_when_there_are_some(lossless, monkeypatch):
    """Catches: keywords that a function without tuple parameters would refuse."""
    seen: dict[str, object] = {}
    monkeypatch.setattr(
        gdn_triton, "fused_sigmoid_gating_delta_rule_update", lambda **values: seen.update(values)
    )
    t = torch.zeros(1)
    rings = {f"{name}_states_buffer": torch.zeros(2) for name in "ukg"} if lossless else {}
    TritonGDNKernel().target_verify(
        *(t for _ in range(7)),
        ssm_states=t,
        cache_indices=t,
        query_start_loc=t,
        intermediate_states_buffer=None if lossless else t,
        intermediate_state_indices=t,
        cache_steps=4,
        retrieve_parent_token=None,
        **rings,
        stable_rows=True,
    )
    assert {name for name in seen if name[1:] == "_states_buffer"} == set(rings)
    assert seen["use_qk_l2norm_in_kernel"] is True and seen["disable_state_update"] is True
    assert (seen["softplus_beta"], seen["softplus_threshold"]) == (1.0, 20.0)
    assert seen["cache_steps"] == 4 and "stable_rows" not in seen


class OtherKernel:
    """Takes whatever it is given and records nothing."""

    supports_strided_target_verify_qkv = True


def make_backend(lossless: bool) -> tuple[GDNAttnBackend, MagicMock, SimpleNamespace]:
    cache = SimpleNamespace(
        conv=[torch.zeros(4, 16, 3)],
        temporal=torch.zeros(4, 2, 4, 4),
        intermediate_conv_window=[torch.zeros(3, 2, 16, 3)],
        intermediate_ssm=None if lossless else torch.zeros(3, 2, 2, 4, 4),
        **{f"intermediate_ssm_{n}": torch.zeros(3) if lossless else None for n in "ukg"},
    )
    pool = MagicMock()
    pool.mamba2_layer_cache.return_value = cache
    backend = GDNAttnBackend(
        pool,
        device=torch.device("cpu"),
        num_verify_rows=2,
        backends=LinearAttnBackends(TRITON, TRITON, TRITON),
    )
    kernel = MagicMock(spec=TritonGDNKernel)
    backend.kernel_dispatcher.verify_kernel = kernel
    backend.kernel_dispatcher.extend_kernel = kernel
    return backend, kernel, cache


def make_batch(mode: ForwardMode) -> SimpleNamespace:
    return SimpleNamespace(
        forward_mode=mode,
        batch_size=2,
        draft_token_num=2,
        tree_parents=None,
        mamba_cache_indices=torch.tensor([1, 3], dtype=torch.int32),
        mamba_track_indices=None,
        mamba_track_rows=None,
        req_pool_indices=torch.tensor([2, 1]),
        query_start_loc=torch.tensor([0, 2, 4], dtype=torch.int32),
        query_lens_cpu=[2, 2],
    )


def run(backend: GDNAttnBackend, batch: SimpleNamespace, monkeypatch) -> MagicMock:
    layer = RadixLinearAttention(
        layer_id=0,
        num_k_heads=1,
        num_v_heads=2,
        head_k_dim=4,
        head_v_dim=4,
        conv_kernel_size=4,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    conv = MagicMock(side_effect=lambda x, *args, **values: x)
    monkeypatch.setattr(gdn_backend, "causal_conv1d_update", conv)
    monkeypatch.setattr(gdn_backend, "causal_conv1d_fn", conv)
    backend.init_forward_metadata(batch)
    backend.forward_linear(torch.zeros(4, 16), torch.zeros(4, 2), torch.zeros(4, 2), layer, batch)
    return conv


@pytest.mark.parametrize("stable", [True, False])
@pytest.mark.parametrize("lossless", [True, False])
def test_verify_of_a_layer(lossless, stable, monkeypatch):
    """Catches: q, k, v copied for a kernel that reads them strided; windows at other rows than tuples."""
    monkeypatch.setattr(
        gdn_backend, "fused_qkv_split_gdn_prefill", lambda *a: pytest.fail("split in a verify")
    )
    backend, kernel, cache = make_backend(lossless)
    with envs.SGLANG_ENABLE_PP_SPEC.override(stable):
        conv = run(backend, make_batch(ForwardMode.TARGET_VERIFY), monkeypatch)
    rows = [2, 1] if stable else [0, 1]
    assert conv.call_args.kwargs["intermediate_conv_window"] is cache.intermediate_conv_window[0]
    assert conv.call_args.kwargs["intermediate_state_indices"].tolist() == rows
    values = kernel.target_verify.call_args.kwargs
    assert values["intermediate_state_indices"].tolist() == rows
    assert values["stable_rows"] is stable and values["retrieve_parent_token"] is None
    assert values["cache_steps"] == 2
    if lossless:
        assert values["intermediate_states_buffer"] is None
        for name in "ukg":
            assert values[f"{name}_states_buffer"] is getattr(cache, f"intermediate_ssm_{name}")
    else:
        assert values["intermediate_states_buffer"] is cache.intermediate_ssm
        assert "u_states_buffer" not in values
    q = kernel.target_verify.call_args.args[2]
    assert q.stride(1) == 16 and not q.is_contiguous()


def test_prefill_splits(monkeypatch):
    split = MagicMock(side_effect=gdn_backend.fused_qkv_split_gdn_prefill)
    monkeypatch.setattr(gdn_backend, "fused_qkv_split_gdn_prefill", split)
    run(make_backend(True)[0], make_batch(ForwardMode.EXTEND), monkeypatch)
    split.assert_called_once()


def test_a_kernel_that_would_ignore_the_ring(monkeypatch):
    """Catches: silent loss of all tuples; the check repeated for every layer."""
    backend, _, cache = make_backend(True)
    backend.kernel_dispatcher.verify_kernel = OtherKernel()
    with pytest.raises(RuntimeError) as error:
        run(backend, make_batch(ForwardMode.TARGET_VERIFY), monkeypatch)
    for part in ("--enable-linear-lossless-verify", "OtherKernel"):
        assert part in str(error.value)
    assert "--linear-attn-verify-backend triton" in str(error.value)
    backend, kernel, cache = make_backend(True)
    run(backend, make_batch(ForwardMode.TARGET_VERIFY), monkeypatch)
    other = make_backend(True)[0]
    other.kernel_dispatcher.verify_kernel = OtherKernel()
    with pytest.raises(RuntimeError):
        run(other, make_batch(ForwardMode.TARGET_VERIFY), monkeypatch)
    cache.intermediate_ssm_u = None
    with pytest.raises(AssertionError):
        run(backend, make_batch(ForwardMode.TARGET_VERIFY), monkeypatch)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
