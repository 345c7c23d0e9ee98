"""State pool, request rows, KV pool and the decode server's pool: shapes, views, transfer, ownership."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from unittest.mock import patch

import pytest
import torch

from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.disaggregation.decode import HybridMambaDecodeReqToTokenPool
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.integrity import IntegrityError
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MambaPool,
    MHATokenToKVPool,
    ReqToTokenPool,
    check_linear_lossless_verify,
    conv_window_dedup_enabled,
    get_tensor_size_bytes,
    spec_intermediate_bytes_per_req,
)
from sglang.srt.mem_cache.req_kv import ReqKV
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="unit")

LAYERS = [0, 1, 4]


@dataclass(eq=False)
class FakeReq:
    kv: ReqKV = field(default_factory=ReqKV)


def params(heads=4, groups=2, layers=LAYERS, ssm=torch.float32, k=16, v=8):
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=heads * v,
        n_groups=groups,
        num_heads=heads,
        head_dim=v,
        state_size=k,
        conv_kernel=4,
    )
    return Mamba2CacheParams(
        shape=shape,
        layers=list(layers),
        dtype=Mamba2StateDType(conv=torch.bfloat16, temporal=ssm),
    )


def pool(draft_tokens=4, topk=1, lossless=False, rows=5, size=6, p=None, **kwargs):
    p = p or params()
    return MambaPool(
        size=size,
        spec_state_size=rows,
        cache_params=p,
        mamba_layer_ids=p.layers,
        device="cpu",
        speculative_num_draft_tokens=draft_tokens,
        speculative_eagle_topk=topk,
        enable_linear_lossless_verify=lossless,
        **kwargs,
    )


def scratch_storage(made):
    cache = made.mamba_cache
    names = ("intermediate_ssm", "intermediate_ssm_u", "intermediate_ssm_k", "intermediate_ssm_g")
    ssm = [t for t in (getattr(cache, name) for name in names) if t is not None]
    return get_tensor_size_bytes(ssm) + get_tensor_size_bytes(made._intermediate_conv_window_phys)


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
