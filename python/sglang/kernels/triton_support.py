"""Whether Triton kernels can run here, and why not.

Kernel modules import Triton only behind `AVAILABLE`, so that everything above them imports on a
machine without it.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch

AVAILABLE: bool = importlib.util.find_spec("triton") is not None
REASON: str = "" if AVAILABLE else "the package 'triton' is not installed (extra: [cuda])"
INTERPRETING: bool = AVAILABLE and os.environ.get("TRITON_INTERPRET", "0") == "1"


def runs_on(tensor: torch.Tensor) -> bool:
    """Whether the Triton form of an op serves `tensor`; CPU tensors take the PyTorch form.

    Under TRITON_INTERPRET=1 the kernels serve CPU tensors too.
    Raises: RuntimeError for an accelerator tensor when Triton is missing.
    """
    if tensor.device.type == "cpu":
        return INTERPRETING
    if not AVAILABLE:
        raise RuntimeError(f"no kernel for a tensor on {tensor.device}: {REASON}")
    return True


def runs_on_hopper(device: torch.device) -> bool:
    """Whether kernels written for compute capability 9.0 in Triton's Gluon can be compiled and run there."""
    if not AVAILABLE or INTERPRETING or device.type != "cuda" or torch.version.hip is not None:
        return False
    if importlib.util.find_spec("triton.experimental") is None:
        return False
    if importlib.util.find_spec("triton.experimental.gluon") is None:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


@cache
def is_hopper_or_later(device: torch.device) -> bool:
    """Whether kernels for ``device`` may use what compute capability 9.0 brought; never under the interpreter."""
    if device.type != "cuda" or torch.version.hip is not None or INTERPRETING:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def use_inline_ptx() -> bool:
    """Whether arithmetic is pinned with PTX (NVIDIA) and not with an explicit fma (ROCm, interpreter)."""
    return torch.version.hip is None and not INTERPRETING
