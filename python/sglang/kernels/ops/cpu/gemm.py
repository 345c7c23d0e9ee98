"""Matmuls over weights packed in panels: few rows or many, one fixed summation order per output.

Output element ``[t, n]`` is the sum over k in ascending order, one fused multiply-add each, so a row
does not depend on the other rows of the call.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from sglang.kernels.ops.cpu.library import declare, library

PANEL_ROWS = 64
WEIGHT_DTYPES = (torch.float32, torch.bfloat16)

_PTR, _INT = ctypes.c_void_p, ctypes.c_int64


@declare
def _signatures(lib: ctypes.CDLL) -> None:
    lib.sgl_pack.argtypes = (_PTR, _INT, _INT, _INT)
    lib.sgl_pack.restype = None
    lib.sgl_linear.argtypes = (_PTR, _INT, _INT, _PTR, _INT, _INT, _INT, _PTR)
    lib.sgl_linear.restype = None
    lib.sgl_packed_rows.argtypes = (_PTR, _INT, _INT, _PTR, _INT, _PTR)
    lib.sgl_packed_rows.restype = None
    lib.sgl_set_threads.argtypes = (ctypes.c_int,)
    lib.sgl_set_threads.restype = None


def can_pack(weight: Tensor) -> bool:
    """Whether ``weight`` [rows, in] may be packed here."""
    return library() is not None and weight.device.type == "cpu" and weight.dtype in WEIGHT_DTYPES


def pack_inplace(storage: Tensor) -> None:
    """Reorder [N, K] into panels [N / 64, K, 64] within the same memory.

    Raises:
        ValueError: N is no multiple of 64, or the tensor is not contiguous fp32 or bf16.
    """
    rows, cols = storage.shape
    ok = rows % PANEL_ROWS == 0 and storage.is_contiguous() and storage.dtype in WEIGHT_DTYPES
    if not ok:
        raise ValueError(
            f"cannot pack {tuple(storage.shape)} {storage.dtype}: needs contiguous fp32 or bf16 "
            f"with rows a multiple of {PANEL_ROWS}"
        )
    _native().sgl_pack(storage.data_ptr(), rows, cols, storage.element_size())


def packed_linear(x: Tensor, storage: Tensor, out_features: int) -> Tensor:
    """x [T, K] fp32 times a packed weight -> [T, out_features] fp32."""
    x = x.float().contiguous()
    num_rows, cols = x.shape
    out = torch.empty((num_rows, out_features))
    is_bf16 = storage.dtype == torch.bfloat16
    args = (storage.data_ptr(), out_features, cols, x.data_ptr(), cols, num_rows)
    _native().sgl_linear(*args, int(is_bf16), out.data_ptr())
    return out


def packed_rows(storage: Tensor, ids: Tensor) -> Tensor:
    """Rows ``ids`` [T] int64 of a packed weight -> [T, K] fp32."""
    cols = storage.shape[1]
    ids = ids.contiguous()
    out = torch.empty((ids.shape[0], cols))
    is_bf16 = storage.dtype == torch.bfloat16
    _native().sgl_packed_rows(
        storage.data_ptr(), cols, int(is_bf16), ids.data_ptr(), ids.shape[0], out.data_ptr()
    )
    return out


def set_threads(count: int) -> None:
    """Threads that one kernel call may use, this one included."""
    _native().sgl_set_threads(count)


def _native() -> ctypes.CDLL:
    lib = library()
    if lib is None:
        raise RuntimeError("packed weights need the compiled CPU kernels")
    return lib
