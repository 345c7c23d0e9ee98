"""Times from CUDA-graph replays, random FP8 weights, and candidates compiled side by side before the timing."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang.kernels.ops.quantization.rows import FP8_DTYPE, num_groups

BYTES_PER_US = 4.3e6  # an H200's measured streaming rate
FLOPS_PER_US = 1.9e9  # its FP8 peak
L2_BYTES = 60e6


@dataclass(frozen=True)
class Timing:
    """One line of the table. ``floor_us``: bytes that must move or FP8 products, whichever takes longer."""

    what: str
    rows: int
    candidate: str
    us: float
    floor_us: float
    is_table: bool = False
    error: float = 0.0


def floor_us(num_bytes: float, flops: float = 0.0) -> float:
    return max(num_bytes / BYTES_PER_US, flops / FLOPS_PER_US)


def graph_us(calls: Sequence[Callable[[], object]], *, budget_us: float = 20_000.0) -> float:
    """Median time of one call, from replays of a graph of all of ``calls`` that last about ``budget_us``."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    first = _replays_us(graph, 1)
    first = min(first, _replays_us(graph, 1))
    blocks = 5
    replays = max(1, min(20, int(budget_us / blocks / first)))
    return statistics.median(_replays_us(graph, replays) for _ in range(blocks)) / len(calls)


def _replays_us(graph: torch.cuda.CUDAGraph, count: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / count


def copies_of(num_bytes: float) -> int:
    """How many weights of ``num_bytes`` are more than the L2 cache holds."""
    return max(1, min(24, int(2 * L2_BYTES / num_bytes)))


def fp8_weight(*shape: int) -> tuple[Tensor, Tensor]:
    """(weight e4m3, block scales) of values around shape[-1] ** -0.5."""
    weight = (torch.randn(shape, device="cuda") * 96).clamp(-448, 448).to(FP8_DTYPE)
    grid = (*shape[:-2], num_groups(shape[-2]), num_groups(shape[-1]))
    scale = (torch.rand(grid, device="cuda") + 0.5) * shape[-1] ** -0.5 / 96
    return weight, scale


def difference(got: Tensor, want: Tensor) -> float:
    got, want = got.float(), want.float()
    return float((got - want).norm() / want.norm())


def compile_side_by_side(
    jobs: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], workers: int
) -> float:
    """Run ``jobs`` in processes of their own, so that what they compile is on disk; seconds it took.

    A job that fails is left to fail again where it is timed.
    """
    begin = time.monotonic()
    if jobs and workers > 1:
        parts = [jobs[i::workers] for i in range(workers) if jobs[i::workers]]
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(len(parts), mp_context=context) as pool:
            list(pool.map(_run_jobs, parts))
    return time.monotonic() - begin


def _run_jobs(jobs: Sequence[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
    for function, arguments in jobs:
        try:
            function(*arguments)
        except Exception as error:
            print(f"{function.__name__}{arguments}: {str(error)[:200]}", flush=True)
