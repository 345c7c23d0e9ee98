"""Host memory that a GPU copies to and from by itself."""

from __future__ import annotations

import os
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch

from sglang.kernels.ops.cpu.memory import huge_map

_STRETCH_BYTES = 256 << 20
_PAGE_BYTES = 4096
_MOST_THREADS = 8


class PinnedRows:
    """``rows`` [R, B] uint8 in pinned host memory.

    torch's own pinned memory comes from one thread on small pages: 1.6 GB/s on an H200's host, and as long
    again when the process ends. Huge pages that several threads touch and the driver then registers came
    at 16 GB/s there. Until ``close``, or the end of this object, nothing may unmap them.

    Raises: RuntimeError if the system or the driver refuses, with the flags that ask for less.
    """

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        size = max(1, num_rows * row_bytes)
        try:
            memory = huge_map(size)
            _touch(memory)
            _check(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0))
        except (OSError, _Refused) as error:
            raise RuntimeError(
                f"cannot pin {size / (1 << 30):.2f} GiB of host memory ({error}); lower --hicache-size or "
                "--hicache-ratio, or raise the limit of locked memory (ulimit -l)"
            ) from error
        self.rows = memory[: num_rows * row_bytes].view(num_rows, row_bytes)
        self._end = weakref.finalize(self, _unregister, memory)
        self._end.atexit = False

    def close(self) -> None:
        """Give it back. The device must have finished with it, and ``rows`` is not pinned any more."""
        self._end()


class _Refused(Exception):
    """The driver's answer to a registration."""


def _check(status: object) -> None:
    if int(status) != 0:  # type: ignore[call-overload]
        raise _Refused(f"cudaHostRegister: {status}")


def _touch(memory: torch.Tensor) -> None:
    """Make every page appear: a byte written in each, by several threads at once."""
    pages = memory.numpy()

    def write(start: int) -> None:
        pages[start : start + _STRETCH_BYTES : _PAGE_BYTES].fill(0)

    workers = max(1, min(_MOST_THREADS, os.cpu_count() or 1))
    with ThreadPoolExecutor(workers, thread_name_prefix="touch-pages") as pool:
        list(pool.map(write, range(0, len(pages), _STRETCH_BYTES)))


def _unregister(memory: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
