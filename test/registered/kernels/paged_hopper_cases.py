"""Checks of the Hopper kernel on a GPU of compute capability 9.0; run by test_paged_attention.py."""

from __future__ import annotations

import pytest
import torch

from sglang.kernels.ops.attention.paged import hopper, op
from sglang.kernels.ops.attention.paged.launch import HopperLaunch, many_rows
from sglang.kernels.ops.attention.paged.op import paged_attention
from sglang.test.attention_reference import paged_attention_reference

DEVICE = torch.device("cuda")
PAGE = 64
HOPPER = HopperLaunch()


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


def run(case, *, is_causal=True, tile=HOPPER):
    return paged_attention(
        **case,
        max_query_len=int(case["query_start_loc"].diff().max()),
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


def counted(serve, served):
    """``serve``, which adds its name to ``served`` on every call."""

    def call(*args, **options):
        served.append(serve.__name__)
        serve(*args, **options)

    return call


def test_prompt_chunks_take_it_unless_told_otherwise(monkeypatch):
    """Catches a table that leaves Hopper's prompt chunks to the general kernel; an override is the control."""
    served: list[str] = []
    for module, serve in ((op, op._attend), (hopper, hopper.hopper_prefill)):
        monkeypatch.setattr(module, serve.__name__, counted(serve, served))
    case = make_case([900], [200])
    by_table, by_override = run(case, tile=None), run(case, tile=many_rows(256))
    assert served == ["hopper_prefill", "_attend"]
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
