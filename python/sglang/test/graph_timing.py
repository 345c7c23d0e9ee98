"""Times of GPU work without the host in them, for benchmarks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch


def graph_us(calls: Sequence[Callable[[], object]], blocks: int = 5, replays: int = 3) -> float:
    """Median time of one of ``calls`` in us, from a CUDA graph of all of them after one plain run.

    Calls over several copies of the data keep the L2 cache from holding it.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(blocks):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (replays * len(calls)))
    return statistics.median(times)
