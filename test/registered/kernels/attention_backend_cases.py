"""Checks of the GPU backend of full attention in Triton's interpreter or on a GPU; run by test_paged_attention.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang.kernels import triton_support
from sglang.kernels.ops.attention.paged.launch import ShortChunks
from sglang.srt.layers.attention import triton_backend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.test.attention_reference import paged_attention_reference

DEVICE = torch.device("cpu" if triton_support.INTERPRETING else "cuda")
PAGE, HEADS, DIM, ROOM = 16, 4, 16, 96
DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
LAYER = SimpleNamespace(kv_layer=0, scaling=0.25, is_causal=True, sliding_window=0)


class Pool:
    """One layer of random K and V, which the call's own rows do not change."""

    page_size = PAGE

    def __init__(self, slots: int) -> None:
        generator = torch.Generator().manual_seed(1)
        draws = (torch.randn(slots, 2, DIM, generator=generator) for _ in range(2))
        self.keys, self.values = (draw.to(DEVICE, DTYPE) for draw in draws)

    def set_kv_buffer(self, index, slots, k, v) -> None:
        pass

    def get_key_buffer(self, index) -> torch.Tensor:
        return self.keys

    def get_value_buffer(self, index) -> torch.Tensor:
        return self.values


@pytest.fixture
def setup(monkeypatch):
    """(backend, pool, table); chunks of up to 4 rows after 40 tokens are short."""
    monkeypatch.setattr(triton_backend, "SHORT_CHUNKS", ShortChunks(max_rows=4, min_context=40))
    table = torch.randperm(5 * ROOM // PAGE)[:, None] * PAGE + torch.arange(PAGE)
    table = table.view(5, ROOM).int().to(DEVICE)
    requests = SimpleNamespace(device=DEVICE, req_to_token=table, max_context_len=ROOM)
    pool = Pool(5 * ROOM)
    backend = triton_backend.TritonAttnBackend(
        requests, pool, max_step_rows=2, num_heads=HEADS, head_dim=DIM
    )
    return backend, pool, table


def extend(backend, q, rows, prefixes, lens):
    ends = torch.tensor([0, *torch.tensor(lens).cumsum(0)], dtype=torch.int32, device=DEVICE)
    empty = torch.empty(0, device=DEVICE)
    fb = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        input_ids=empty,
        positions=empty,
        req_pool_indices=torch.tensor(rows, device=DEVICE),
        prefix_lens=torch.tensor(prefixes, device=DEVICE),
        query_lens=torch.tensor(lens, device=DEVICE),
        query_start_loc=ends,
        out_cache_loc=empty,
        prefix_lens_cpu=prefixes,
        query_lens_cpu=lens,
    )
    backend.init_forward_metadata(fb)
    return backend.forward(q, q, q, LAYER, fb)


def test_short_chunks_among_others(setup):
    """Two launches that split around one that does not; catches rows, tables or starts of the wrong
    requests, and (exactly) bits that follow the neighbours."""
    backend, pool, table = setup
    rows, prefixes, lens = [3, 1, 4, 0, 2], [60, 38, 9, 70, 50], [2, 2, 20, 3, 3]
    q = torch.randn(sum(lens), HEADS, DIM).to(DEVICE, DTYPE)
    got = extend(backend, q, rows, prefixes, lens)
    want = paged_attention_reference(
        q,
        pool.keys,
        pool.values,
        req_to_token=table,
        rows=torch.tensor(rows, device=DEVICE),
        prefix_lens=torch.tensor(prefixes, device=DEVICE),
        query_start_loc=torch.tensor([0, 2, 4, 24, 27, 30], device=DEVICE),
        scaling=0.25,
    )
    bound = 1e-5 if DTYPE == torch.float32 else 2e-2
    torch.testing.assert_close(got, want, atol=bound, rtol=bound)
    assert [run.is_split for run, _ in backend._runs] == [True, False, True, True]
    assert torch.equal(got[24:27], extend(backend, q[24:27], [0], [70], [3]))
    whole = extend(backend, q[4:24], [4], [9], [20])
    assert not backend._runs and torch.equal(got[4:24], whole)
