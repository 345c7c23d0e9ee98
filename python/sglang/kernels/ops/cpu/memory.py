"""Memory for weights that kernels stream: taken from large anonymous maps on huge pages.

A one-row matmul reads weights faster than 4 KiB pages can be translated; on 2 virtual cores with
17 MB matrices huge pages took 473 instead of 587 us a call.
"""

from __future__ import annotations

import contextlib
import mmap
from math import prod

import torch
from torch import Tensor

_CHUNK_BYTES = 64 << 20
_ALIGN = 64


class _Arena:
    """Hands out parts of the current map in order; a map lives as long as tensors in it do."""

    def __init__(self) -> None:
        self._chunk: Tensor | None = None
        self._used = 0

    def take(self, num_bytes: int) -> Tensor:
        rounded = -(-num_bytes // _ALIGN) * _ALIGN
        if self._chunk is None or self._used + rounded > self._chunk.shape[0]:
            self._chunk = huge_map(max(_CHUNK_BYTES, rounded))
            self._used = 0
        part = self._chunk[self._used : self._used + num_bytes]
        self._used += rounded
        return part


def huge_map(num_bytes: int) -> Tensor:
    """A zeroed private map of bytes, on huge pages where the system has them; pages appear when they are written.

    The map lives as long as tensors in it. Raises: OSError if there is no address space for it.
    """
    area = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if _HAS_HUGE_PAGES:
        with contextlib.suppress(OSError):  # a system built without them: small pages serve as well
            area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=torch.uint8)


_arena = _Arena()
_HAS_HUGE_PAGES = hasattr(mmap, "MADV_HUGEPAGE")


def weight_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU, 64-byte aligned, on huge pages where the system has them."""
    if not _HAS_HUGE_PAGES or prod(shape) == 0:
        return torch.zeros(shape, dtype=dtype)
    return _arena.take(prod(shape) * dtype.itemsize).view(dtype).view(shape)
