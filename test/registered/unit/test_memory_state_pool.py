"""State slots of the pool: copies, offload, transfer, rings, integrity."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from sglang.srt.mem_cache.integrity import IntegrityError
from sglang.srt.mem_cache.memory_pool import (
    MambaPool,
    get_tensor_size_bytes,
)
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.pool_cases import LAYERS, params, pool

register_cpu_ci(est_time=2, suite="unit")


def fill(made, seed=0):
    gen = torch.Generator().manual_seed(seed)
    for tensor in made.named_tensors().values():
        tensor.copy_(torch.randn(tensor.shape, generator=gen))


def test_clear_and_copy_touch_only_the_named_slots():
    made = pool()
    fill(made)
    before = {name: t.clone() for name, t in made.named_tensors().items()}
    made.copy_from(torch.tensor([1, 2]), torch.tensor([4, 5]))
    made.clear_slots(torch.tensor([3]))
    for name, tensor in made.named_tensors().items():
        if name.startswith("intermediate"):
            assert torch.equal(tensor, before[name]), "scratch is not part of a slot"
            continue
        assert torch.equal(tensor[:, [4, 5]], before[name][:, [1, 2]])
        assert not tensor[:, 3].any()
        assert torch.equal(tensor[:, [0, 1, 2, 6]], before[name][:, [0, 1, 2, 6]])


@pytest.mark.parametrize("lossless", [False, True])
def test_host_offload_carries_state_and_no_scratch(lossless):
    made = pool(lossless=lossless)
    fill(made)
    slots = torch.tensor([2, 5])
    conv, temporal = copy = made.get_cpu_copy(slots)
    assert [c.shape for c in conv] == [(3, 2, 96, 3)] and temporal.shape == (3, 2, 4, 8, 16)
    assert (
        get_tensor_size_bytes(conv) + get_tensor_size_bytes(temporal)
        == 2 * made.cache_params.mamba_cache_per_req
    )
    before = {name: t.clone() for name, t in made.named_tensors().items()}
    made.clear_slots(slots)
    made.load_cpu_copy(copy, slots)
    for name, tensor in made.named_tensors().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("lossless", [False, True])
def test_transfer_sends_conv_and_state_only(lossless):
    """Catches a new scratch field that is shipped over the wire because it is not excluded."""
    made = pool(lossless=lossless)
    pointers, lengths, item_lengths = made.get_contiguous_buf_infos()
    cache = made.mamba_cache
    want = [t[i] for t in (cache.conv[0], cache.temporal) for i in range(3)]
    assert pointers == [t.data_ptr() for t in want]
    assert lengths == [t.nbytes for t in want]
    assert item_lengths == [t[0].nbytes for t in want]
    assert sum(item_lengths) == made.cache_params.mamba_cache_per_req
    assert made.get_state_dim_per_tensor() == [96] * 3 + [4] * 3
    assert made.get_state_layer_ids() == LAYERS * 2


def test_every_scratch_field_is_kept_from_transfer():
    persistent = {"conv", "temporal"}
    scratch = {item.name for item in fields(MambaPool.SpeculativeState)} - persistent
    assert scratch <= MambaPool._NON_TRANSFER_STATE_FIELDS
    assert not persistent & MambaPool._NON_TRANSFER_STATE_FIELDS


def test_replayssm_ring_is_per_slot_and_replaces_snapshots():
    p = params()
    made = pool(p=p, enable_linear_replayssm_spec=True, linear_replayssm_cache_len=5)
    cache = made.mamba_cache
    assert cache.intermediate_ssm is None and cache.replayssm_rawv.shape == (3, 7, 5, 4, 8)
    ring = [cache.replayssm_rawv, cache.replayssm_rawk, cache.replayssm_g, cache.replayssm_beta]
    assert get_tensor_size_bytes(ring) == 7 * p.replayssm_ring_bytes_per_req(record_len=5)
    assert len(made.get_contiguous_buf_infos()[0]) == 6


@pytest.mark.parametrize(
    "kwargs",
    [{"enable_memory_saver": True}, {"envelope_layout": True}, {"enable_linear_replayssm": True}],
    ids=str,
)
def test_what_a_pool_cannot_do_is_refused_by_name(kwargs):
    with pytest.raises(ValueError, match="--enable-.* is not available"):
        pool(**kwargs)


def test_integrity_finds_a_replaced_tensor():
    """Control: a tensor of another shape must be seen."""
    made = pool()
    made._tensors["temporal"] = torch.zeros(3, 6, 4, 8, 16)
    with pytest.raises(IntegrityError, match="temporal"):
        made.check_integrity()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
