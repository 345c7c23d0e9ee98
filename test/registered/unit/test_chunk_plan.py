"""Which prompt chunks split their context, and what is launched together."""

from __future__ import annotations

import pytest

from sglang.kernels.ops.attention.paged.launch import SHORT_CHUNKS, ShortChunks
from sglang.srt.layers.attention.chunk_plan import ChunkRun, plan_chunks
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="unit")

SHORT = ShortChunks(max_rows=10, min_context=100)


def kinds(query_lens: list[int], prefix_lens: list[int]) -> list[bool]:
    """Of every request, whether it splits."""
    runs = plan_chunks(query_lens, prefix_lens, short=SHORT)
    return [run.is_split for run in runs for _ in range(run.first, run.end)]


def test_runs_cover_requests_and_rows_in_order_and_fit_the_workspace():
    """Catches a request that is lost or attended to twice, and rows beyond the workspace."""
    query_lens, prefix_lens = [4, 6, 1, 40, 30, 10, 3], [200, 99, 500, 500, 0, 90, 3]
    runs = plan_chunks(query_lens, prefix_lens, short=SHORT)
    assert runs == [
        ChunkRun(0, 2, 0, 10, 6, True),
        ChunkRun(2, 3, 10, 11, 1, True),
        ChunkRun(3, 5, 11, 81, 40, False),
        ChunkRun(5, 6, 81, 91, 10, True),
        ChunkRun(6, 7, 91, 94, 3, False),
    ]


def test_a_request_decides_alone():
    """Catches a choice that follows the batch, which would change a row's bits with its neighbours."""
    requests = [(10, 90), (11, 90), (10, 89), (1, 99), (1, 98), (10, 5_000), (8_192, 5_000)]
    alone = [kinds([rows], [prefix])[0] for rows, prefix in requests]
    assert alone == [True, False, False, True, False, True, False]
    for order in (requests, requests[::-1], requests * 2):
        lens, prefixes = (list(x) for x in zip(*order, strict=True))
        assert kinds(lens, prefixes) == [alone[requests.index(request)] for request in order]


def test_whole_prompts_are_one_launch():
    assert len(plan_chunks([1_024] * 8, [0] * 8, short=SHORT_CHUNKS)) == 1
    assert plan_chunks([], [], short=SHORT) == []


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
