"""Checks of the paged-attention kernels in Triton's interpreter or on a GPU; run by test_paged_attention.py."""

from __future__ import annotations

import pytest
import torch

from sglang.kernels import triton_support
from sglang.kernels.ops.attention.paged import op as paged
from sglang.kernels.ops.attention.paged.launch import (
    PagedLaunch,
    SplitRule,
    few_rows,
    many_rows,
    short_chunks,
)
from sglang.test.attention_reference import paged_attention_reference

DEVICE = torch.device("cpu" if triton_support.INTERPRETING else "cuda")
RULE = SplitRule(min_tokens=16, step_tokens=16, max_splits=4)
TILE = PagedLaunch(16, 16, 4, 2)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def make_case(prefixes, lens, *, heads=4, kv_heads=2, dim=16, seed=0, page=1, dtype=torch.float32):
    """Requests over a permuted pool whose slots outside their contexts hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lens)
    ends = [p + n for p, n in zip(prefixes, lens, strict=True)]
    pages = [-(-end // page) for end in ends]
    order = torch.randperm(sum(pages) + 2, generator=generator)
    table = torch.zeros(len(lens) + 2, (max(pages) + 1) * page, dtype=torch.int32)
    written = torch.zeros(len(order) * page, dtype=torch.bool)
    rows, at = list(range(len(lens), 0, -1)), 0
    for row, end, count in zip(rows, ends, pages, strict=True):
        slots = (order[at : at + count, None] * page + torch.arange(page)).reshape(-1)[:end]
        table[row, :end] = slots.int()
        written[slots] = True
        at += count
    buffers = {}
    for name in ("k_buffer", "v_buffer"):
        values = torch.randn(len(written), kv_heads, dim, generator=generator)
        values[~written] = float("nan")
        buffers[name] = values.to(dtype)
    case = {
        "q": torch.randn(total, heads, dim, generator=generator).to(dtype),
        **buffers,
        "req_to_token": table,
        "rows": torch.tensor(rows),
        "prefix_lens": torch.tensor(prefixes),
        "query_start_loc": torch.tensor([0, *torch.tensor(lens).cumsum(0)], dtype=torch.int32),
    }
    return {name: tensor.to(DEVICE) for name, tensor in case.items()}


def workspace_for(case, rule=RULE):
    rows, heads, dim = case["q"].shape
    return paged.SplitWorkspace(
        max_rows=rows,
        max_context=case["req_to_token"].shape[1],
        num_heads=heads,
        head_dim=dim,
        device=DEVICE,
        dtype=case["q"].dtype,
        rule=rule,
    )


def run(case, *, split, page=1, tile=TILE, max_query_len=None, out=None, **kind):
    lens = case["query_start_loc"].diff()
    return paged.paged_attention(
        **case,
        max_query_len=max_query_len or int(lens.max()),
        scaling=0.25,
        workspace=workspace_for(case) if split else None,
        out=torch.full_like(case["q"], float("nan")) if out is None else out,
        page_size=page,
        tile=tile,
        **kind,
    )


def check(case, *, split, **how):
    got = run(case, split=split, **how)
    kind = {k: v for k, v in how.items() if k in ("is_causal", "sliding_window")}
    want = paged_attention_reference(**case, scaling=0.25, **kind)
    bound = TOLERANCE[case["q"].dtype]
    torch.testing.assert_close(got, want, atol=bound, rtol=bound)


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("window", [0, 9], ids=["global", "window"])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("page", [1, 16])
def test_equals_the_reference(is_causal, window, split, page):
    """Odd lengths over a permuted pool; catches a read of a slot outside the context (it holds NaN)."""
    case = make_case([0, 37, 5], [3, 4, 1], page=page)
    check(case, split=split, page=page, is_causal=is_causal, sliding_window=window)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("page", [4, 64])
def test_pages_that_are_smaller_or_larger_than_a_block(page, split):
    """Catches a look-up at the wrong page, and an offset within the page that is lost."""
    check(make_case([37, 70], [3, 2], page=page), split=split, page=page)


@pytest.mark.parametrize("prefix", [0, 14, 15, 16, 32, 62, 63, 64, 95])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_contexts_around_block_and_split_edges(prefix, split):
    """Catches a block or a split that is dropped, repeated or masked at its edge."""
    check(make_case([prefix], [2], page=16), split=split, page=16)


@pytest.mark.parametrize("heads, kv_heads", [(8, 2), (12, 2), (16, 2), (3, 3)])
@pytest.mark.parametrize("steps", [1, 3, 16])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_head_groups_and_steps(heads, kv_heads, steps, split):
    """Groups 4, 6, 8, 1 and up to 16 rows; catches a row or head that lands in another tile."""
    case = make_case([33, 7], [steps, 1], heads=heads, kv_heads=kv_heads, page=16)
    check(case, split=split, page=16)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_a_prompt_longer_than_a_tile(split):
    """Catches the reversed order of tiles, and a mask that starts at the wrong row."""
    check(make_case([21, 0], [45, 30], page=16), split=split, page=16)


@pytest.mark.parametrize("dim", [24, 64])
def test_head_dims(dim):
    """A dim that is no power of two; catches an unmasked column."""
    for split in (False, True):
        check(make_case([20], [3], dim=dim, page=16), split=split, page=16)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_low_precision_pools(split, kv_dtype):
    """Rows over a pool of another dtype; fp32 rows in the interpreter, which multiplies no bf16."""
    dtype = torch.float32 if triton_support.INTERPRETING else torch.bfloat16
    case = make_case([37, 5], [4, 1], page=16, dtype=dtype)
    for name in ("k_buffer", "v_buffer"):
        case[name] = case[name].to(kv_dtype)
    check(case, split=split, page=16)


def test_a_row_does_not_depend_on_its_batch():
    """Exact: the same request alone and among others, also in a longer table (catches splits that
    follow the batch or the longest context)."""
    case = make_case([40, 21, 7], [2, 2, 2], seed=3, page=16)
    both = run(case, split=True, page=16)
    alone = dict(case)
    for name in ("rows", "prefix_lens"):
        alone[name] = case[name][1:2]
    alone["q"] = case["q"][2:4]
    alone["query_start_loc"] = case["query_start_loc"][:2]
    wider = torch.nn.functional.pad(case["req_to_token"], (0, 300))
    alone["req_to_token"] = wider
    assert torch.equal(both[2:4], run(alone, split=True, page=16, max_query_len=5))
    other_rule = SplitRule(min_tokens=32, step_tokens=16, max_splits=4)
    control = paged.paged_attention(
        **alone,
        max_query_len=2,
        scaling=0.25,
        workspace=workspace_for(alone, other_rule),
        page_size=16,
        tile=TILE,
    )
    torch.testing.assert_close(both[2:4], control)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_padding_is_not_written(split):
    """Rows of -1, one with rows of its own and one of zero rows, as captured graphs pad a step."""
    case = make_case([4, 6, 9], [2, 2, 2])
    case["rows"][1] = -1
    pad = torch.tensor([-1, -1], device=DEVICE)
    case["rows"] = torch.cat([case["rows"], pad])
    case["prefix_lens"] = torch.cat([case["prefix_lens"], pad * 0])
    start = case["query_start_loc"]
    case["query_start_loc"] = torch.cat([start, start[-1:].expand(2)])
    case["q"] = torch.cat([case["q"], case["q"].new_full((4, *case["q"].shape[1:]), float("nan"))])
    out = run(case, split=split, out=torch.full_like(case["q"], 7.0), max_query_len=2)
    assert (out[2:4] == 7.0).all() and (out[6:] == 7.0).all()
    live = torch.cat([out[:2], out[4:6]])
    assert live.isfinite().all() and not (live == 7.0).any()


def test_an_empty_call_returns_at_once():
    case = make_case([4], [2])
    case["q"] = case["q"][:0]
    assert run(case, split=True, max_query_len=1).shape[0] == 0


def test_bad_arguments_are_named():
    case = make_case([4], [2], heads=3)
    with pytest.raises(ValueError, match="3 heads"):
        paged.paged_attention(**case, max_query_len=2, scaling=1.0)
    good = make_case([4], [2])
    small = workspace_for(good)
    small.max_rows = 1
    with pytest.raises(ValueError, match="workspace"):
        paged.paged_attention(**good, max_query_len=2, scaling=1.0, workspace=small)
    with pytest.raises(ValueError, match="scaling"):
        paged.paged_attention(**good, max_query_len=2, scaling=0.0)
    with pytest.raises(ValueError, match="step by 16"):
        run(good, split=True, tile=PagedLaunch(16, 32, 4, 2))


def test_splits_cover_every_context_and_stay_within_their_bound():
    """Catches a rule that loses the tail of a context or overflows the workspace."""
    for rule in (RULE, SplitRule()):
        for context in (*range(1, 700), 8192, 8193, 27_003, 262_144, 1_000_000):
            splits, size = rule.num_splits(context), rule.split_tokens(context)
            assert 1 <= splits <= rule.max_splits and size % rule.step_tokens == 0
            assert splits <= paged.most_splits(rule, context)
            assert (splits - 1) * size < context <= splits * size


@pytest.mark.parametrize("amd", [False, True], ids=["nvidia", "amd"])
def test_the_launch_table_fits_its_splits(amd):
    step = SplitRule().step_tokens
    for dim in (64, 128, 256):
        for rows in (1, 8, 32, 128):
            assert step % few_rows(dim, rows, amd=amd).block_n == 0
        assert step % short_chunks(dim, amd=amd).block_n == 0
        assert many_rows(dim, amd=amd).block_n >= 32
