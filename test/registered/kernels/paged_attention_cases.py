"""Checks of the paged-attention kernels in Triton's interpreter; run by test_paged_attention.py."""

from __future__ import annotations

import pytest
import torch

from sglang.kernels import triton_support
from sglang.kernels.ops.attention.paged import launch
from sglang.kernels.ops.attention.paged import op as paged
from sglang.test.attention_reference import paged_attention_reference

DEVICE = torch.device("cpu" if triton_support.INTERPRETING else "cuda")


def make_case(prefixes, lens, *, heads=4, kv_heads=2, dim=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lens)
    ends = [p + n for p, n in zip(prefixes, lens, strict=True)]
    slots = torch.randperm(sum(ends) + 7, generator=generator).int()
    table = torch.zeros(len(lens) + 2, max(ends) + 1, dtype=torch.int32)
    rows, at = list(range(len(lens), 0, -1)), 0
    for row, end in zip(rows, ends, strict=True):
        table[row, :end] = slots[at : at + end]
        at += end
    start = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
    case = {
        "q": torch.randn(total, heads, dim, generator=generator),
        "k_buffer": torch.randn(len(slots), kv_heads, dim, generator=generator),
        "v_buffer": torch.randn(len(slots), kv_heads, dim, generator=generator),
        "req_to_token": table,
        "rows": torch.tensor(rows),
        "prefix_lens": torch.tensor(prefixes),
        "query_start_loc": start,
    }
    return {name: tensor.to(DEVICE) for name, tensor in case.items()}


def workspace_for(case, context):
    rows, heads, dim = case["q"].shape
    return paged.SplitWorkspace(
        max_rows=rows, max_context=context, num_heads=heads, head_dim=dim, device=DEVICE
    )


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("window", [0, 9], ids=["global", "window"])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_equals_the_reference(monkeypatch, is_causal, window, split):
    """Several requests of odd lengths, GQA, a permuted slot table; nothing outside is read."""
    monkeypatch.setattr(paged, "SPLIT_TOKENS", 16)
    case = make_case([0, 37, 5], [3, 4, 1])
    case["k_buffer"][0] = case["v_buffer"][0] = float("nan") if not split else 0.0
    used = case["req_to_token"]
    case["req_to_token"] = torch.where(used == 0, torch.ones_like(used), used)
    out = torch.full_like(case["q"], float("nan"))
    got = paged.paged_attention(
        **case,
        max_query_len=4,
        scaling=0.25,
        is_causal=is_causal,
        sliding_window=window,
        workspace=workspace_for(case, 48) if split else None,
        out=out,
    )
    want = paged_attention_reference(
        **case, scaling=0.25, is_causal=is_causal, sliding_window=window
    )
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_a_row_does_not_depend_on_its_batch(monkeypatch):
    """Exact: the same request alone and among others (catches splits that follow the batch)."""
    monkeypatch.setattr(paged, "SPLIT_TOKENS", 16)
    case = make_case([40, 21, 7], [2, 2, 2], seed=3)
    both = paged.paged_attention(
        **case, max_query_len=2, scaling=0.25, workspace=workspace_for(case, 64)
    )
    alone = dict(case)
    for name in ("rows", "prefix_lens"):
        alone[name] = case[name][1:2]
    alone["q"] = case["q"][2:4]
    alone["query_start_loc"] = case["query_start_loc"][:2]
    one = paged.paged_attention(
        **alone, max_query_len=2, scaling=0.25, workspace=workspace_for(alone, 64)
    )
    assert torch.equal(both[2:4], one)


def test_padding_rows_are_not_written():
    case = make_case([4, 6], [2, 2])
    case["rows"][1] = -1
    out = torch.full_like(case["q"], 7.0)
    paged.paged_attention(
        **case, max_query_len=2, scaling=0.25, workspace=workspace_for(case, 64), out=out
    )
    assert (out[2:] == 7.0).all() and not (out[:2] == 7.0).any()


def test_bad_shapes_are_named():
    case = make_case([4], [2], heads=3)
    with pytest.raises(ValueError, match="3 heads"):
        paged.paged_attention(**case, max_query_len=2, scaling=1.0)
    good = make_case([4], [2])
    small = workspace_for(good, 64)
    small.max_rows = 1
    with pytest.raises(ValueError, match="workspace"):
        paged.paged_attention(**good, max_query_len=2, scaling=1.0, workspace=small)


def test_launch_tiles_cover_every_head_dim():
    for dim in (64, 128, 256):
        assert launch.few_rows(dim, 32).block_m >= 16 and launch.many_rows(dim).block_n >= 32
