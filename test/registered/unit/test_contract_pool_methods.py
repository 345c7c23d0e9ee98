"""Conv windows, attributes and slot methods of `MambaPool`, as outside callers use them."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.memory_pool import MambaPool, get_tensor_size_bytes
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="unit")

SHAPE = Mamba2StateShape.create(
    tp_world_size=1,
    intermediate_size=16,
    n_groups=1,
    num_heads=2,
    head_dim=8,
    state_size=4,
    conv_kernel=4,
)
PARAMS = Mamba2CacheParams(
    shape=SHAPE,
    layers=[0, 1],
    dtype=Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32),
)
SCRATCH = (
    *("intermediate_ssm", "intermediate_conv_window"),
    *(f"intermediate_ssm_{name}" for name in "ukg"),
    *(f"replayssm_{name}" for name in ("d", "k", "g", "rawv", "rawk", "beta")),
)


@pytest.fixture(autouse=True)
def gpu_rules(monkeypatch):
    monkeypatch.setattr(memory_pool, "_is_cpu", False)
    monkeypatch.setattr(memory_pool, "_is_npu", False)


def pool(**values) -> MambaPool:
    base = {
        "size": 6,
        "spec_state_size": 3,
        "cache_params": PARAMS,
        "mamba_layer_ids": [4, 6],
        "device": "cpu",
        "speculative_num_draft_tokens": 4,
        "speculative_eagle_topk": 1,
    }
    return MambaPool(**{**base, **values})


class WindowFirst(MambaPool):
    conv_window_axis = 0


@pytest.mark.parametrize(
    ("cls", "shape"), [(MambaPool, (5, 3)), (WindowFirst, (3, 5))], ids=["last", "first"]
)
@pytest.mark.parametrize("with_device", [True, False])
def test_shared_windows_without_a_constructor(cls, shape, with_device):
    """Catches: an attribute that only the constructor sets; a step stride on the channel axis."""
    assert MambaPool.conv_window_axis == -1
    p = object.__new__(cls)
    if with_device:
        p.device = "cpu"
    physical, view = p._allocate_deduplicated_conv_window(
        conv_shape=shape,
        num_mamba_layers=2,
        spec_state_size=3,
        speculative_num_draft_tokens=4,
        conv_dtype=torch.float32,
    )
    axis = shape.index(3)
    wide = list(shape)
    wide[axis] = 4 + 3 - 1
    assert physical.shape == (2, 4, *wide) and view.shape == (2, 4, 4, *shape)
    assert physical.dtype is torch.float32
    physical.copy_(torch.arange(physical.numel()).view_as(physical))
    for step in range(4):
        assert torch.equal(view[:, :, step], physical.narrow(2 + axis, step, 3))
    assert view.stride(2) == view.stride(3 + axis)
    view[0, 0, 0].select(axis, 1)[0] = -1
    assert view[0, 0, 1].select(axis, 0)[0] == -1


@pytest.mark.parametrize("flag", ["_is_cpu", "_is_npu"])
def test_platform_flags_are_read_at_call_time(flag, monkeypatch):
    """Catches: a flag copied at import; other logical shapes of the two layouts."""
    shared = pool()
    assert shared._intermediate_conv_window_phys[0].shape == (2, 4, 24, 6)
    monkeypatch.setattr(memory_pool, flag, True)
    dense = pool()
    assert dense._intermediate_conv_window_phys is dense.mamba_cache.intermediate_conv_window
    views = [p.mamba_cache.intermediate_conv_window[0] for p in (shared, dense)]
    assert views[0].shape == views[1].shape == (2, 4, 4, 24, 3)
    assert views[1].is_contiguous() and not views[0].is_contiguous()


@pytest.mark.parametrize("lossless", [True, False])
def test_memory_usage(lossless):
    """Catches: shared columns counted once per window in the pool's figure."""
    p = pool(enable_linear_lossless_verify=lossless)
    cache, logical = p.mamba_cache, p.mamba_cache.mem_usage_bytes()
    views = get_tensor_size_bytes(cache.intermediate_conv_window)
    physical = get_tensor_size_bytes(p._intermediate_conv_window_phys)
    assert views == 2 * 4 * 4 * 24 * 3 * 2 and physical == 2 * 4 * 24 * 6 * 2
    assert p.mem_usage == pytest.approx((logical - views + physical) / (1 << 30))


def test_attributes():
    p = pool()
    assert p.size == 6 and p.device == "cpu"
    assert p.mamba_layer_ids == [4, 6] and p.num_mamba_layers == 2
    assert p.replayssm_is_kda is False and not p.replayssm_spec_fold
    for name in ("replayssm_write_pos", "replayssm_spec_write_pos", "replayssm_cache_base"):
        assert getattr(p, name) is None
    assert p.replayssm_is_flush is None
    assert p.enable_linear_replayssm is False and p.linear_replayssm_cache_len == 16
    assert set(SCRATCH) <= set(MambaPool._NON_TRANSFER_STATE_FIELDS)
    assert not {"conv", "temporal"} & set(MambaPool._NON_TRANSFER_STATE_FIELDS)


def fill(p: MambaPool) -> None:
    torch.manual_seed(0)
    for tensor in (*p.mamba_cache.conv, p.mamba_cache.temporal):
        tensor.copy_(torch.randn(tensor.shape))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_clear_and_copy_slots(dtype):
    p = pool(enable_linear_lossless_verify=True)
    fill(p)
    tensors = (*p.mamba_cache.conv, p.mamba_cache.temporal)
    before = [t.clone() for t in tensors]
    p.copy_from(torch.tensor([1, 2], dtype=dtype), torch.tensor([5, 6], dtype=dtype))
    p.clear_slots(torch.tensor([3], dtype=dtype))
    for now, old in zip(tensors, before):
        assert torch.equal(now[:, [5, 6]], old[:, [1, 2]])
        assert now[:, 3].eq(0).all() and torch.equal(now[:, [0, 1, 2, 4]], old[:, [0, 1, 2, 4]])


def test_host_copies():
    """Catches: scratch in the payload; slots restored in another order."""
    p = pool(enable_linear_lossless_verify=True)
    fill(p)
    slots = torch.tensor([4, 2])
    payload = p.get_cpu_copy(slots)
    conv, temporal = payload
    assert len(payload) == 2 and isinstance(conv, list)
    assert torch.equal(temporal, p.mamba_cache.temporal[:, slots])
    old = p.mamba_cache.temporal[:, slots].clone(), p.mamba_cache.conv[0][:, slots].clone()
    p.clear_slots(slots)
    p.load_cpu_copy(payload, torch.tensor([1, 5]))
    assert torch.equal(p.mamba_cache.temporal[:, [1, 5]], old[0])
    assert torch.equal(p.mamba_cache.conv[0][:, [1, 5]], old[1])


@pytest.mark.parametrize("lossless", [True, False])
def test_transfer_covers_state_only(lossless):
    """Catches: scratch sent to a peer, which expects as many buffers as it has itself."""
    p = pool(enable_linear_lossless_verify=lossless)
    pointers, sizes, items = p.get_contiguous_buf_infos()
    state = [*p.mamba_cache.conv, p.mamba_cache.temporal]
    layers = [t[i] for t in state for i in range(2)]
    assert pointers == [t.data_ptr() for t in layers]
    assert sizes == [get_tensor_size_bytes(t) for t in layers]
    assert items == [get_tensor_size_bytes(t[0]) for t in layers]
    assert p.get_state_layer_ids() == [4, 6, 4, 6]
    assert p.get_state_dim_per_tensor() == [24, 24, 2, 2]
    plain = pool(speculative_num_draft_tokens=None)
    assert len(plain.get_contiguous_buf_infos()[0]) == len(pointers)
    assert p.get_kv_size_bytes() > plain.get_kv_size_bytes()


def test_layer_cache():
    p = pool(enable_linear_lossless_verify=True)
    layer = p.mamba2_layer_cache(1)
    assert layer.temporal.data_ptr() == p.mamba_cache.temporal[1].data_ptr()
    assert layer.intermediate_ssm_u.shape == (4, 4, 2, 8) and layer.intermediate_ssm is None


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
