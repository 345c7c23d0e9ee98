"""Small host values for the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def upload(values: np.ndarray, device: torch.device | str) -> Tensor:
    """A device tensor of ``values``, ordered after earlier work on the device's stream.

    A copy from ordinary memory would make the host wait for all that work; pinned memory does not.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_ids(
    values: Sequence[int] | Sequence[Sequence[int]], device: torch.device | str
) -> Tensor:
    """``values``, [n] or a table of equal rows, as int64 on the device."""
    return upload(np.asarray(values, dtype=np.int64), device)
