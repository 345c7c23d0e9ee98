"""Which rows of a commit are carried out, in plain PyTorch; the kernels apply the same rules.

A row is skipped, silently and on every device, if its step is negative or not below the number of
recorded steps, if its destination is outside the pool, or if its scratch row is outside the scratch.
A track destination that is also the working slot of a row committed in the same call is skipped too:
the working slot keeps the committed state.
"""

from __future__ import annotations

import torch


def valid_rows(
    steps: torch.Tensor,
    dests: torch.Tensor,
    src_rows: torch.Tensor,
    *,
    num_steps: int,
    num_slots: int,
    num_src_rows: int,
) -> torch.Tensor:
    """Boolean [n]: rows to carry out. All inputs [n], any integer dtype."""
    return (
        (steps >= 0)
        & (steps < num_steps)
        & (dests >= 0)
        & (dests < num_slots)
        & (src_rows >= 0)
        & (src_rows < num_src_rows)
    )


def drop_committed_targets(
    track_steps: torch.Tensor,
    track_dests: torch.Tensor,
    steps: torch.Tensor,
    slots: torch.Tensor,
    *,
    num_steps: int,
) -> torch.Tensor:
    """`track_steps` with -1 where the destination is a slot that `steps`/`slots` commit."""
    committed = torch.where((steps >= 0) & (steps < num_steps), slots.long(), -1)
    clash = (track_dests.long()[:, None] == committed[None, :]).any(dim=1)
    return torch.where(clash, torch.full_like(track_steps, -1), track_steps)


def check_index_vectors(*, device: torch.device, **vectors: torch.Tensor) -> int:
    """Length n of the index vectors. Raises: ValueError if one is not 1-D, not on `device`, or not n long."""
    length: int | None = None
    for name, vector in vectors.items():
        if vector.dim() != 1:
            raise ValueError(f"{name} must be 1-D, got shape {tuple(vector.shape)}")
        if vector.device != device:
            raise ValueError(f"{name} is on {vector.device}, the state is on {device}")
        if length is not None and vector.numel() != length:
            raise ValueError(f"{name} has {vector.numel()} rows, the others have {length}")
        length = vector.numel()
    return length or 0
