"""Launches that begin while the kernel before them ends (programmatic dependent launch).

A step of a few rows is hundreds of kernels of a few microseconds each; what a launch takes to reach the
multiprocessors is a good part of that. Compute capability 9.0 and later let the next kernel be set up
while the present one runs. Every kernel launched so begins with ``after_previous``
(`launch_overlap_kernels.py`), so that nothing is read or written before the kernel in front has ended
and its results are visible: the order of all memory accesses is that of ordinary launches.
"""

from __future__ import annotations

import torch

from sglang.kernels import triton_support

_is_wanted = True


def use_ordinary_launches() -> None:
    """From now on, launch every kernel when the one in front has ended.

    For profiles: a kernel that waits is charged for the wait. Before the first launch, so that none is
    captured or compiled the other way.
    """
    global _is_wanted
    _is_wanted = False


def is_overlapping(device: torch.device) -> bool:
    """Whether launches on ``device`` overlap."""
    return _is_wanted and triton_support.is_hopper_or_later(device)


def overlapping(tensor: torch.Tensor) -> dict[str, bool]:
    """Launch options of a kernel with an OVERLAP argument that works on ``tensor``.

    ``launch_pdl`` is left out where it is off, because AMD's compiler does not know the option.
    """
    if is_overlapping(tensor.device):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}
