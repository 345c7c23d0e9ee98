"""Request rows and their state slots, also of a draft model and of a decode server."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.disaggregation.decode import HybridMambaDecodeReqToTokenPool
from sglang.srt.mem_cache.integrity import IntegrityError
from sglang.srt.mem_cache.memory_pool import (
    HybridReqToTokenPool,
    MambaPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.req_kv import ReqKV
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.pool_cases import LAYERS, FakeReq, params

register_cpu_ci(est_time=3, suite="unit")


def req_pool(size=3, mamba_size=20, extra=True, lazy=False, overlap=True, cls=HybridReqToTokenPool):
    return cls(
        size=size,
        mamba_size=mamba_size,
        mamba_spec_state_size=size,
        max_context_len=32,
        device="cpu",
        enable_memory_saver=False,
        cache_params=params(),
        mamba_layer_ids=LAYERS,
        enable_mamba_extra_buffer=extra,
        enable_mamba_extra_buffer_lazy=lazy,
        enable_overlap_schedule=overlap,
        speculative_num_draft_tokens=4,
        speculative_eagle_topk=1,
    )


def test_rows_without_recurrent_layers():
    rows = ReqToTokenPool(2, 16, "cpu", False)
    a, b, c = FakeReq(), FakeReq(), FakeReq()
    assert rows.req_to_token.shape == (3, 16) and rows.req_to_token.dtype == torch.int32
    assert rows.alloc([a, b, c]) is None and a.kv.req_pool_idx is None
    assert sorted(rows.alloc([a, b])) == [1, 2]
    assert rows.alloc([a]) == [a.kv.req_pool_idx], "a later chunk keeps its row"
    rows.free(a)
    with pytest.raises(IntegrityError, match="without a row"):
        rows.free(a)
    rows.check_integrity()
    assert rows.available_size() == 1


@pytest.mark.parametrize(
    ("extra", "lazy", "overlap", "entries", "taken"),
    [
        (False, False, True, 0, 1),
        (True, False, True, 2, 3),
        (True, False, False, 1, 2),
        (True, True, True, 2, 2),
    ],
    ids=["no_buffer", "overlap", "no-overlap", "lazy"],
)
def test_slots_of_a_request(extra, lazy, overlap, entries, taken):
    rows = req_pool(extra=extra, lazy=lazy, overlap=overlap)
    req = FakeReq()
    (row,) = rows.alloc([req])
    assert rows.mamba_allocator.available_size() == 20 - taken
    assert rows.get_mamba_indices(torch.tensor([row])).tolist() == [req.kv.mamba_pool_idx]
    buffer = req.kv.mamba_ping_pong_track_buffer
    assert len(buffer or []) == entries
    if entries:
        assert rows.req_index_to_mamba_ping_pong_mapping[row].tolist() == buffer
        assert buffer.count(-1) == int(lazy)
    rows.free_mamba_cache(req)
    rows.free(req)
    assert req.kv == ReqKV(), "no reference may survive"
    assert rows.mamba_allocator.available_size() == 20
    rows.check_integrity()


def test_admission_is_all_or_nothing():
    """Three slots each: the second request does not fit, and nothing of it stays taken."""
    rows = req_pool(mamba_size=5)
    first, second = FakeReq(), FakeReq()
    assert rows.alloc([first]) is not None
    assert rows.alloc([second]) is None and second.kv == ReqKV()
    assert rows.available_size() == 2 and rows.mamba_allocator.available_size() == 2
    full = req_pool(size=1)
    full.alloc([FakeReq()])
    assert full.alloc([second]) is None and full.mamba_allocator.available_size() == 17


def test_row_and_slots_are_freed_independently():
    rows = req_pool(extra=False)
    req = FakeReq()
    rows.alloc([req])
    slot = req.kv.mamba_pool_idx
    rows.free(req)
    assert rows.available_size() == 3 and rows.mamba_allocator.available_size() == 19
    rows.alloc([req])
    assert req.kv.mamba_pool_idx == slot, "the working state of a resumed request is kept"
    rows.free_mamba_cache(req)
    rows.free(req)
    assert rows.mamba_allocator.available_size() == 20


def test_a_donated_track_slot_stays_out_of_the_free_list():
    rows = req_pool()
    req = FakeReq()
    rows.alloc([req])
    keep = rows.get_mamba_ping_pong_keep_idx(req.kv.mamba_next_track_idx)
    slot = req.kv.mamba_ping_pong_track_buffer[keep]
    rows.free_mamba_cache(req, mamba_ping_pong_track_buffer_to_keep=keep)
    assert rows.mamba_allocator.available_size() == 19 and rows.mamba_allocator.is_held(slot)
    rows.free(req)
    rows.alloc([req])
    fresh = rows.mamba_allocator.alloc_ids(1)[0]
    given = rows.donate_mamba_ping_pong_slot(req, 1, replacement=fresh)
    assert given != fresh and req.kv.mamba_ping_pong_track_buffer[1] == fresh
    assert rows.req_index_to_mamba_ping_pong_mapping[req.kv.req_pool_idx, 1] == fresh


def test_layer_ids_map_to_pool_layers():
    rows = req_pool()
    cache = rows.mamba_pool.mamba_cache
    assert rows.mamba2_layer_cache(4).temporal.data_ptr() == cache.temporal[2].data_ptr()
    with pytest.raises(KeyError):
        rows.mamba2_layer_cache(3)
    assert rows.get_speculative_mamba2_params_all_layers() is cache
    assert rows.short_conv_pool.conv_state is None and rows.ngram_pool.context is None


def test_draft_clone_shares_rows_and_has_no_scratch():
    """Draft pools verify nothing: the lossless flag and the scratch are not passed on."""
    rows = req_pool()
    clone = rows.clone_with_new_mamba(
        cache_params=params(layers=[0]), mamba_layer_ids=[0], mamba_size=9
    )
    req = FakeReq()
    clone.alloc([req])
    assert clone.req_to_token is rows.req_to_token
    assert rows.available_size() == 2 and rows.mamba_allocator.available_size() == 20
    assert type(clone.mamba_pool.mamba_cache) is MambaPool.State


@pytest.mark.parametrize(
    ("extra", "overlap", "given", "slots"),
    [(True, True, None, 15), (True, False, 4, 10), (False, True, 7, 7), (False, True, 2, 5)],
)
def test_decode_server_pool(extra, overlap, given, slots):
    """Rows and scratch count requests in transfer; the state pool is raised to what they hold."""
    made = HybridMambaDecodeReqToTokenPool(
        size=3,
        max_context_len=32,
        device="cpu",
        enable_memory_saver=False,
        cache_params=params(),
        mamba_layer_ids=LAYERS,
        speculative_num_draft_tokens=4,
        enable_mamba_extra_buffer=extra,
        pre_alloc_size=2,
        enable_overlap_schedule=overlap,
        mamba_size=given,
        speculative_eagle_topk=1,
        enable_linear_lossless_verify=True,
    )
    assert made.size == 3 and made.available_size() == 5
    assert made.req_to_token.shape == (6, 32)
    assert made.mamba_pool.size == slots == made.mamba_allocator.available_size()
    cache = made.mamba_pool.mamba_cache
    assert cache.intermediate_ssm is None and cache.intermediate_ssm_u.shape[:3] == (3, 6, 4)
    reqs = [FakeReq() for _ in range(5)]
    assert made.alloc(reqs) is not None
    made.check_integrity()


def test_side_state_of_other_families_is_refused():
    with pytest.raises(ValueError, match="ngram_context_len"):
        HybridReqToTokenPool(
            size=1,
            mamba_size=1,
            mamba_spec_state_size=1,
            max_context_len=8,
            device="cpu",
            enable_memory_saver=False,
            cache_params=params(),
            mamba_layer_ids=LAYERS,
            enable_mamba_extra_buffer=False,
            ngram_context_len=2,
        )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
