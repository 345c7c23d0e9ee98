"""Device work that is recorded once per batch size and then replayed with one launch."""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

Outputs = tuple[Tensor, ...]
_CARRIERS = {8: (torch.int64, "<i8"), 4: (torch.int32, "<i4"), 2: (torch.int16, "<i2")}
"""Integers that bytes of an element are described as, because not every dtype has a description."""


class GraphedCall:
    """A function of nothing but fixed tensors, and the graph of it once captured."""

    def __init__(self, function: Callable[[], Outputs]) -> None:
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: Outputs = ()

    def __call__(self) -> Outputs:
        """Run or replay. Outputs of a replay are valid until the next replay of any graph."""
        if self._graph is None:
            return self._function()
        self._graph.replay()
        return self._outputs

    def capture(self, pool: tuple[int, int]) -> None:
        """Record the function; its memory comes from ``pool``."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._outputs = self._function()
        self._graph = graph

    def let_go(self) -> None:
        """Give the outputs' memory back to the pool, so that graphs captured later write there too."""
        self._outputs = tuple(unowned(tensor) for tensor in self._outputs)


class _Memory:
    """Device memory that somebody else keeps, as other libraries describe it."""

    def __init__(self, tensor: Tensor, typestr: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": typestr,
            "data": (tensor.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


def unowned(tensor: Tensor) -> Tensor:
    """A contiguous tensor at the same address that does not keep its memory alive."""
    if not tensor.is_contiguous():
        raise ValueError(f"outputs of a graph must be contiguous, got strides {tensor.stride()}")
    carrier, typestr = _CARRIERS[tensor.element_size()]
    memory = _Memory(tensor.view(carrier), typestr)
    return torch.as_tensor(memory, device=tensor.device).view(tensor.dtype)


class GraphSizes:
    """The batch sizes that steps are padded to; larger steps run as they are, uncaptured."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sorted(set(sizes))

    def padded(self, num_requests: int) -> int:
        """Smallest size that holds so many requests; that many themselves beyond the largest."""
        at = bisect.bisect_left(self.sizes, num_requests)
        return self.sizes[at] if at < len(self.sizes) else num_requests


def capture_all(sizes: GraphSizes, calls_of: Callable[[int], Sequence[GraphedCall]]) -> int:
    """Capture the calls of every size into one memory pool, the largest first, so that smaller ones
    reuse its memory. Returns the bytes that the graphs hold.

    Each size first runs once as it is: kernels compile then, which a capture does not allow. The
    caller's inputs must be padding, so that nothing happens.
    """
    began, before = time.monotonic(), _reserved()
    pool = torch.cuda.graph_pool_handle()
    side = torch.cuda.Stream()
    for done, size in enumerate(reversed(sizes.sizes)):
        calls = calls_of(size)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        for call in calls:
            call.capture(pool)
        for call in calls:
            call.let_go()
        if time.monotonic() - began > 5.0:
            logger.info("capturing CUDA graphs: %d of %d sizes", done + 1, len(sizes.sizes))
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
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()
