"""Request pools, plain, hybrid and of a decode server, as outside callers use them."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.disaggregation.decode import DecodeReqToTokenPool, HybridMambaDecodeReqToTokenPool
from sglang.srt.environ import envs
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from sglang.srt.mem_cache.integrity import IntegrityError
from sglang.srt.mem_cache.memory_pool import (
    HybridReqToTokenPool,
    MambaPool,
    ReqToTokenPool,
    spec_intermediate_bytes_per_req,
)
from sglang.srt.mem_cache.req_kv import ReqKV
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
NONE = inspect.Parameter.empty


@pytest.fixture(autouse=True)
def gpu_rules(monkeypatch):
    monkeypatch.setattr(memory_pool, "_is_cpu", False)
    monkeypatch.setattr(memory_pool, "_is_npu", False)


def request() -> SimpleNamespace:
    return SimpleNamespace(kv=ReqKV())


def hybrid(**values) -> HybridReqToTokenPool:
    base = {
        "size": 5,
        "mamba_size": 12,
        "mamba_spec_state_size": 5,
        "max_context_len": 32,
        "device": "cpu",
        "enable_memory_saver": False,
        "cache_params": PARAMS,
        "mamba_layer_ids": [4, 6],
        "enable_mamba_extra_buffer": False,
        "speculative_num_draft_tokens": 3,
        "speculative_eagle_topk": 1,
    }
    return HybridReqToTokenPool(**{**base, **values})


def defaults(function) -> list[tuple[str, object]]:
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()][1:]


SIDE = [
    ("short_conv_layer_ids", None),
    ("short_conv_state_shape", None),
    ("ngram_context_len", 0),
    ("ngram_eos_token_id", 0),
]


def test_signatures():
    """Catches: an argument renamed or moved; a new one that is not at the end."""
    plain = [name for name, _ in defaults(ReqToTokenPool.__init__)]
    assert plain == ["size", "max_context_len", "device", "enable_memory_saver"]
    names = "size mamba_size mamba_spec_state_size max_context_len device enable_memory_saver"
    wanted = [(n, NONE) for n in f"{names} cache_params mamba_layer_ids".split()] + [
        ("enable_mamba_extra_buffer", NONE),
        ("enable_mamba_extra_buffer_lazy", False),
        ("speculative_num_draft_tokens", None),
        ("speculative_eagle_topk", None),
        ("enable_overlap_schedule", True),
        ("start_layer", None),
        ("enable_linear_replayssm", False),
        ("linear_replayssm_cache_len", 16),
        ("mamba_envelope_layout", False),
        ("enable_linear_replayssm_spec", False),
        ("enable_linear_lossless_verify", False),
        *SIDE,
    ]
    assert defaults(HybridReqToTokenPool.__init__)[: len(wanted)] == wanted
    parameters = list(inspect.signature(HybridReqToTokenPool.__init__).parameters.values())
    assert {p.kind for p in parameters[1:]} == {inspect.Parameter.KEYWORD_ONLY}
    assert HybridReqToTokenPool.mamba_pool_cls is MambaPool


def test_decode_pool_signature():
    """All arguments may be positional here."""
    names = "size max_context_len device enable_memory_saver cache_params mamba_layer_ids"
    more = "speculative_num_draft_tokens enable_mamba_extra_buffer pre_alloc_size"
    wanted = [(n, NONE) for n in f"{names} {more} enable_overlap_schedule".split()] + [
        ("mamba_size", None),
        ("start_layer", None),
        ("speculative_eagle_topk", None),
        ("linear_replayssm_cache_len", 16),
        ("mamba_envelope_layout", False),
        ("enable_linear_replayssm_spec", False),
        ("enable_linear_lossless_verify", False),
        *SIDE,
    ]
    assert defaults(HybridMambaDecodeReqToTokenPool.__init__) == wanted
    kinds = inspect.signature(HybridMambaDecodeReqToTokenPool.__init__).parameters.values()
    assert {p.kind for p in kinds} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert [name for name, _ in defaults(DecodeReqToTokenPool.__init__)] == [
        *("size", "max_context_len", "device", "enable_memory_saver", "pre_alloc_size")
    ]


def test_plain_pool():
    pool = ReqToTokenPool(3, 8, "cpu", False)
    assert pool.req_to_token.shape == (4, 8) and pool.req_to_token.dtype is torch.int32
    requests = [request() for _ in range(3)]
    assert sorted(pool.alloc(requests)) == [1, 2, 3] and pool.available_size() == 0
    assert pool.alloc([request()]) is None
    pool.free(requests[1])
    assert pool.available_size() == 1


def test_slot_allocator():
    allocator = MambaSlotAllocator(4, "cpu")
    slots = allocator.alloc(4)
    assert sorted(slots.tolist()) == [1, 2, 3, 4] and allocator.alloc(1) is None
    allocator.free(slots[:2])
    assert allocator.available_size() == 2


def test_debugging_checks_the_books_at_every_change():
    """Catches: a switch that nothing reads."""
    allocator = MambaSlotAllocator(4, "cpu")
    allocator._slots._free[0] = 1
    allocator.alloc(1)
    with envs.SGLANG_DEBUG_MEMORY_POOL.override(True), pytest.raises(IntegrityError):
        allocator.alloc(1)


def test_hybrid_attributes():
    pool = hybrid()
    assert isinstance(pool.mamba_pool, MambaPool)
    assert isinstance(pool.mamba_allocator, MambaSlotAllocator)
    assert pool.mamba_allocator.available_size() == 12 and pool.mamba_map == {4: 0, 6: 1}
    mapping = pool.req_index_to_mamba_index_mapping
    assert mapping.dtype is torch.int32 and mapping.shape == (6,)
    assert pool.short_conv_pool.conv_state is pool.short_conv_pool.intermediate_conv_state is None
    assert pool.ngram_pool.context is pool.ngram_pool.intermediate_context is None
    assert pool.mamba_pool.mamba_cache.temporal.shape[1] == 13
    assert pool.mamba_pool.mamba_cache.intermediate_ssm.shape[:3] == (2, 6, 3)


@pytest.mark.parametrize("row_first", [True, False])
def test_freeing_a_row_keeps_its_state_slot(row_first):
    """Catches: a slot freed twice, or lost; another slot given to a request that holds one."""
    pool, req = hybrid(), request()
    pool.alloc([req])
    slot = req.kv.mamba_pool_idx
    assert req.kv.holds_mamba and pool.available_size() == 4
    assert pool.mamba_allocator.available_size() == 11
    if row_first:
        pool.free(req)
        assert pool.available_size() == 5 and pool.mamba_allocator.available_size() == 11
        pool.alloc([req])
        assert req.kv.mamba_pool_idx == slot and pool.mamba_allocator.available_size() == 11
        pool.free(req)
        pool.free_mamba_cache(req)
    else:
        pool.free_mamba_cache(req)
        assert pool.available_size() == 4 and pool.mamba_allocator.available_size() == 12
        pool.free(req)
    assert pool.available_size() == 5 and pool.mamba_allocator.available_size() == 12
    assert not req.kv.holds_mamba


def test_indices_and_layer_caches():
    """Catches: a translation that is none; rows mapped to another request's slot."""
    pool, requests = hybrid(), [request() for _ in range(3)]
    rows = torch.tensor(pool.alloc(requests))
    slots = pool.get_mamba_indices(rows)
    assert slots.tolist() == [int(r.kv.mamba_pool_idx) for r in requests]
    assert pool.translate_mamba_indices(slots) is slots
    cache = pool.mamba2_layer_cache(6)
    whole = pool.get_speculative_mamba2_params_all_layers()
    assert cache.temporal.data_ptr() == whole.temporal[1].data_ptr()
    whole.temporal[:, 2] = 5.0
    pool.copy_mamba_state(torch.tensor([2]), torch.tensor([7]))
    assert whole.temporal[:, 7].eq(5).all()
    pool.free_mamba_cache(requests[0], mamba_ping_pong_track_buffer_to_keep=None)


@pytest.mark.parametrize(
    ("overlap", "lazy", "entries", "taken"),
    [(True, False, 2, 3), (False, False, 1, 2), (True, True, 2, 2)],
)
def test_ping_pong_slots(overlap, lazy, entries, taken):
    """Catches: an entry too many or too few; a lazy pool that takes both slots at once."""
    pool, req = (
        hybrid(
            enable_mamba_extra_buffer=True,
            enable_overlap_schedule=overlap,
            enable_mamba_extra_buffer_lazy=lazy,
        ),
        request(),
    )
    mapping = pool.req_index_to_mamba_ping_pong_mapping
    assert mapping.dtype is torch.int64 and mapping.shape == (6, entries)
    (row,) = pool.alloc([req])
    assert pool.mamba_allocator.available_size() == 12 - taken
    assert mapping[row].tolist() == list(req.kv.mamba_ping_pong_track_buffer)
    other = pool.get_mamba_ping_pong_other_idx(0)
    assert other == entries - 1 and pool.get_mamba_ping_pong_keep_idx(0) == other
    free = pool.mamba_allocator.alloc(1).item()
    given = pool.donate_mamba_ping_pong_slot(req, 0)
    pool.set_mamba_ping_pong_slot(req, 0, free)
    assert mapping[row, 0] == free
    pool.free_mamba_cache(req, mamba_ping_pong_track_buffer_to_keep=0)
    assert pool.mamba_allocator.available_size() == 12 - 2
    pool.mamba_allocator.free(torch.tensor([free, given]))
    assert pool.mamba_allocator.available_size() == 12


def test_lossless_reaches_the_state_pool_but_not_a_clone():
    pool = hybrid(enable_linear_lossless_verify=True)
    assert pool.get_speculative_mamba2_params_all_layers().intermediate_ssm is None
    clone = pool.clone_with_new_mamba(cache_params=PARAMS, mamba_layer_ids=[0, 1], mamba_size=4)
    cache = clone.mamba_pool.mamba_cache
    assert [getattr(cache, f"intermediate_ssm_{n}", None) for n in "ukg"] == [None] * 3
    assert clone.req_to_token is pool.req_to_token and clone.mamba_pool is not pool.mamba_pool
    with pytest.raises(ValueError, match="topk"):
        hybrid(enable_linear_lossless_verify=True, speculative_eagle_topk=None)


@pytest.mark.parametrize(
    ("extra", "overlap", "given", "slots"),
    [
        (False, True, None, 7),
        (True, True, None, 21),
        (True, False, 3, 14),
        (True, True, 40, 40),
    ],
)
@pytest.mark.parametrize("lossless", [True, False])
def test_decode_pool(lossless, extra, overlap, given, slots):
    """Catches: scratch for running requests only; a state pool too small for those in transfer."""
    pool = HybridMambaDecodeReqToTokenPool(
        *(4, 32, "cpu", False, PARAMS, [4, 6], 3, extra, 3, overlap, given),
        speculative_eagle_topk=1,
        enable_linear_lossless_verify=lossless,
    )
    assert pool.mamba_pool.size == slots and pool.req_to_token.shape == (8, 32)
    assert pool.available_size() == 7
    cache = pool.get_speculative_mamba2_params_all_layers()
    assert (cache.intermediate_ssm is None) is lossless
    ring = cache.intermediate_ssm_u if lossless else cache.intermediate_ssm
    assert ring.shape[:3] == (2, 4 + 3 + 1, 3)
    scratch = [cache.intermediate_ssm, cache.intermediate_ssm_u, cache.intermediate_ssm_k]
    tensors = [*scratch, cache.intermediate_ssm_g, *pool.mamba_pool._intermediate_conv_window_phys]
    actual = sum(t.untyped_storage().nbytes() for t in tensors if t is not None)
    per_row = spec_intermediate_bytes_per_req(
        PARAMS, 3, speculative_eagle_topk=1, enable_linear_lossless_verify=lossless
    )
    assert actual == per_row * 8


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
