"""KV pools: what they store, moves between slots, layers by their number in the model."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    MHATokenToKVPool,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_kv_pool_stores_what_it_was_given(dtype):
    made = MHATokenToKVPool(32, 8, dtype, head_num=2, head_dim=4, layer_num=3, device="cpu")
    assert [b.shape for b in made.k_buffer + made.v_buffer] == [(40, 2, 4)] * 6
    k, v = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    loc = torch.tensor([9, 33, -1])
    made.set_kv_buffer(1, loc, k, v)
    assert torch.equal(made.get_key_buffer(1)[loc[:2]].float(), k[:2].to(dtype).float())
    assert torch.equal(made.get_value_buffer(1)[loc[:2]].float(), v[:2].to(dtype).float())
    assert not made.get_key_buffer(1)[39].float().any(), "slot -1 must not wrap to the last slot"
    assert not made.get_key_buffer(0).float().any()
    copy = made.get_cpu_copy(loc[:2])
    made.load_cpu_copy(copy, torch.tensor([20, 21]))
    assert torch.equal(made.get_key_buffer(1)[[20, 21]].float(), k[:2].to(dtype).float())
    made.check_integrity()


def test_moving_kv_slots_may_overlap():
    """Accepted tree rows move to consecutive slots."""
    made = MHATokenToKVPool(8, 1, torch.float32, head_num=1, head_dim=1, layer_num=1, device="cpu")
    made.k_buffer[0].copy_(torch.arange(9.0).view(9, 1, 1))
    made.move_slots(torch.tensor([2, 3, 5]), torch.tensor([1, 2, 3]))
    assert made.k_buffer[0].flatten().tolist() == [0, 2, 3, 5, 4, 5, 6, 7, 8]


def test_kv_by_model_layer():
    made = HybridLinearKVPool(
        size=4,
        dtype=torch.float32,
        page_size=1,
        head_num=1,
        head_dim=2,
        full_attention_layer_ids=[3, 7],
        device="cpu",
    )
    made.set_kv_buffer(7, torch.tensor([2]), torch.ones(1, 1, 2), torch.ones(1, 1, 2))
    assert made.get_kv_buffer(7)[0][2].tolist() == [[1.0, 1.0]]
    with pytest.raises(ValueError, match="layer_id=1 not in full attention layers"):
        made.get_kv_buffer(1)


def test_both_names_are_one_module():
    from sglang.srt.mem_cache import pool as package

    assert memory_pool is package


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
