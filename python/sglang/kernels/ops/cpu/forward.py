"""One compiled call for a whole forward pass; csrc/model.h describes what it computes."""

from __future__ import annotations

import ctypes

from sglang.kernels.ops.cpu.library import declare, library
from sglang.kernels.ops.cpu.structs import BatchArgs, ModelArgs

MAX_HEAD_DIM = 256
MAX_GROUP = 16


@declare
def _signatures(lib: ctypes.CDLL) -> None:
    lib.sgl_forward.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    lib.sgl_forward.restype = ctypes.c_int64


def run(model: ModelArgs, batch: BatchArgs) -> None:
    """Run ``batch`` through ``model``; outputs are written where ``batch`` points.

    Raises:
        IndexError: a token id or KV slot is out of range; names the row.
    """
    lib = library()
    if lib is None:
        raise RuntimeError("the compiled CPU kernels are not available")
    bad = lib.sgl_forward(ctypes.addressof(model), ctypes.addressof(batch))
    if bad:
        raise IndexError(f"row {bad - 1} of the batch has a token id or KV slot out of range")
