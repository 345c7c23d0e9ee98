"""Checks of the Hopper kernels on a GPU of compute capability 9.0; run by test_paged_attention.py."""

from __future__ import annotations

import pytest
import torch

from sglang.kernels.ops.attention.paged import op
from sglang.kernels.ops.attention.paged.launch import HopperLaunch, SplitRule, many_rows
from sglang.kernels.ops.attention.paged.op import SplitWorkspace, paged_attention
from sglang.test.attention_reference import paged_attention_reference

DEVICE = torch.device("cuda")
PAGE = 64
HOPPER = HopperLaunch()
SPLIT_LAUNCHES = (HopperLaunch(32, 2, programs=2), HopperLaunch(64, 2), HopperLaunch(64, 3))
RULE = SplitRule(min_tokens=64, step_tokens=64, max_splits=8)


def make_case(prefixes, lens, *, heads=16, kv_heads=2, dim=256, seed=0):
    """Requests over a permuted pool whose slots outside their contexts hold NaN."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, generator=generator)

    ends = [p + n for p, n in zip(prefixes, lens, strict=True)]
    pages = [-(-end // PAGE) for end in ends]
    order = torch.randperm(sum(pages) + 2, generator=torch.Generator().manual_seed(seed))
    table = torch.zeros(len(lens) + 1, (max(pages) + 1) * PAGE, dtype=torch.int32)
    written, at = torch.zeros(len(order) * PAGE, dtype=torch.bool), 0
    for row, (end, count) in enumerate(zip(ends, pages, strict=True)):
        slots = (order[at : at + count, None] * PAGE + torch.arange(PAGE)).reshape(-1)[:end]
        table[row, :end] = slots.int()
        written[slots] = True
        at += count
    keys, values = (draw(len(written), kv_heads, dim) for _ in range(2))
    keys[~written] = values[~written] = float("nan")
    start = torch.tensor([0, *torch.tensor(lens).cumsum(0)], dtype=torch.int32)
    return {
        "q": draw(sum(lens), heads, dim),
        "k_buffer": keys,
        "v_buffer": values,
        "req_to_token": table.to(DEVICE),
        "rows": torch.arange(len(lens), device=DEVICE),
        "prefix_lens": torch.tensor(prefixes, device=DEVICE),
        "query_start_loc": start.to(DEVICE),
    }


def workspace_for(case, rule=RULE):
    rows, heads, dim = case["q"].shape
    return SplitWorkspace(
        max_rows=rows,
        max_context=case["req_to_token"].shape[1],
        num_heads=heads,
        head_dim=dim,
        device=DEVICE,
        dtype=torch.bfloat16,
        rule=rule,
    )


def run(case, *, is_causal=True, tile=HOPPER, split=False, max_query_len=None):
    return paged_attention(
        **case,
        max_query_len=max_query_len or int(case["query_start_loc"].diff().max()),
        workspace=workspace_for(case) if split else None,
        scaling=case["q"].shape[-1] ** -0.5,
        is_causal=is_causal,
        out=torch.full_like(case["q"], float("nan")),
        page_size=PAGE,
        tile=tile,
    )


@pytest.mark.parametrize("heads, kv_heads, dim", [(16, 2, 256), (24, 4, 256), (8, 2, 128)])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
def test_equals_the_reference(heads, kv_heads, dim, is_causal):
    """Odd lengths, several tiles, contexts that end inside a page whose rest holds NaN."""
    case = make_case([0, 130, 63, 64], [37, 5, 65, 1], heads=heads, kv_heads=kv_heads, dim=dim)
    got = run(case, is_causal=is_causal)
    want = paged_attention_reference(**case, scaling=dim**-0.5, is_causal=is_causal)
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("prefix", [0, 1, 62, 63, 64, 127, 128, 300])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 100])
def test_page_and_tile_edges(prefix, length):
    """Catches a block that is dropped, repeated or not masked, and a ring that loses count."""
    case = make_case([prefix], [length])
    want = paged_attention_reference(**case, scaling=256**-0.5)
    torch.testing.assert_close(run(case), want, atol=2e-2, rtol=2e-2)


def test_a_row_does_not_depend_on_its_batch_and_repeats():
    """Exact; catches a race between the copies and the products."""
    case = make_case([900, 2000, 64], [200, 300, 64])
    both = run(case)
    for _ in range(20):
        assert torch.equal(both, run(case))
    alone = {**case, "rows": case["rows"][1:2], "prefix_lens": case["prefix_lens"][1:2]}
    alone["q"] = case["q"][200:500]
    alone["query_start_loc"] = torch.tensor([0, 300], dtype=torch.int32, device=DEVICE)
    assert torch.equal(both[200:500], run(alone))


@pytest.mark.parametrize("tile", SPLIT_LAUNCHES, ids=str)
@pytest.mark.parametrize("heads, kv_heads, dim", [(16, 2, 256), (24, 4, 256), (8, 2, 128)])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
def test_splits_equal_the_reference(heads, kv_heads, dim, is_causal, tile):
    """Odd lengths, several tiles and splits, contexts that end inside a page whose rest holds NaN."""
    case = make_case([0, 130, 63, 1000], [37, 5, 65, 4], heads=heads, kv_heads=kv_heads, dim=dim)
    got = run(case, is_causal=is_causal, tile=tile, split=True)
    want = paged_attention_reference(**case, scaling=dim**-0.5, is_causal=is_causal)
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("tile", SPLIT_LAUNCHES, ids=str)
@pytest.mark.parametrize("prefix", [0, 31, 32, 62, 63, 64, 127, 511, 512, 513])
def test_split_edges(prefix, tile):
    """Catches a split that some or all rows of a tile do not reach, and one of a single block."""
    case = make_case([prefix], [4])
    want = paged_attention_reference(**case, scaling=256**-0.5)
    torch.testing.assert_close(run(case, tile=tile, split=True), want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("tile", SPLIT_LAUNCHES, ids=str)
def test_a_split_row_does_not_depend_on_its_batch_and_repeats(tile):
    """Exact, padding included; catches a race, also between programs of one multiprocessor."""
    case = make_case([900, 2000, 64, 5000], [4, 4, 4, 4])
    both = run(case, tile=tile, split=True)
    for _ in range(20):
        assert torch.equal(both, run(case, tile=tile, split=True))
    alone = {**case, "rows": case["rows"][1:2], "prefix_lens": case["prefix_lens"][1:2]}
    alone["q"] = case["q"][4:8]
    alone["query_start_loc"] = case["query_start_loc"][:2]
    assert torch.equal(both[4:8], run(alone, tile=tile, split=True, max_query_len=16))
    case["rows"][0] = -1
    padded = run(case, tile=tile, split=True)
    assert padded[:4].isnan().all() and torch.equal(padded[4:], both[4:])


def test_prompt_chunks_take_it_unless_told_otherwise(monkeypatch):
    """Catches a table that leaves Hopper's prompt chunks to the general kernel; an override is the control."""
    served = []
    for name in ("_attend", "_attend_on_hopper"):

        def count(*args, name=name, serve=getattr(op, name), **options):
            served.append(name)
            serve(*args, **options)

        monkeypatch.setattr(op, name, count)
    case = make_case([900], [200])
    by_table, by_override = run(case, tile=None), run(case, tile=many_rows(256))
    assert served == ["_attend_on_hopper", "_attend"]
    assert torch.equal(by_table, run(case))
    torch.testing.assert_close(by_table, by_override, atol=2e-2, rtol=2e-2)


def test_padding_is_not_written():
    case = make_case([4, 6], [20, 20])
    case["rows"][1] = -1
    out = run(case)
    assert out[:20].isfinite().all() and out[20:].isnan().all()


def test_what_it_does_not_serve_is_named():
    case = make_case([4], [2])
    case["k_buffer"] = case["k_buffer"].float()
    with pytest.raises(ValueError, match="bfloat16"):
        run(case)
