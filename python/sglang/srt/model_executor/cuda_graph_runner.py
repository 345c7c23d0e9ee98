"""Device work that is recorded once per batch size and then replayed with one launch."""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class GraphedCall(Generic[T]):
    """A function of nothing but fixed tensors, and the graph of it once captured.

    ``result`` holds the tensors that every replay writes again, so they must outlive it.
    """

    function: Callable[[], T]
    graph: torch.cuda.CUDAGraph | None = None
    result: T | None = field(default=None, repr=False)

    def __call__(self) -> T:
        if self.graph is None or self.result is None:
            return self.function()
        self.graph.replay()
        return self.result

    def capture(self, pool: tuple[int, int]) -> None:
        """Record the function; its memory comes from ``pool``."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self.result = self.function()
        self.graph = graph


class GraphSizes:
    """The batch sizes that steps are padded to; larger steps run as they are, uncaptured."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sorted(set(sizes))

    def padded(self, num_requests: int) -> int:
        """Smallest size that holds so many requests; that many themselves beyond the largest."""
        at = bisect.bisect_left(self.sizes, num_requests)
        return self.sizes[at] if at < len(self.sizes) else num_requests


def capture_all(
    sizes: GraphSizes,
    calls_of: Callable[[int], Sequence[GraphedCall]],
) -> int:
    """Capture the calls of every size into one memory pool, the largest first, so that smaller ones
    reuse its memory. Returns the bytes that the graphs hold.

    Each size first runs once as it is: kernels compile then, which a capture does not allow. The
    caller's inputs must be padding, so that nothing happens.
    """
    began, before = time.monotonic(), _reserved()
    pool = torch.cuda.graph_pool_handle()
    side = torch.cuda.Stream()
    for size in reversed(sizes.sizes):
        calls = calls_of(size)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        for call in calls:
            call.capture(pool)
        logger.info("captured CUDA graphs for %d requests", size)
    used = _reserved() - before
    logger.info(
        "captured CUDA graphs of %d batch sizes in %.1f s, %.2f GB",
        len(sizes.sizes),
        time.monotonic() - began,
        used / (1 << 30),
    )
    return used


def _reserved() -> int:
    torch.cuda.synchronize()
    return torch.cuda.memory_reserved()
