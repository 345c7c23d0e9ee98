"""The scheduler with a mistake planted in its replay, to show that comparisons find it.

SGLANG_TEST_FAULT names the mistake:
    ulp    one element of each advanced state is off by one unit in the last place
    order  the working state advances before the boundary state is taken from it
    none   no mistake: the control
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import torch
from torch import Tensor

from sglang.kernels.ops.mamba.tuple_replay import commit_tuples, replay_tuples
from sglang.srt.layers.attention import hybrid_linear_attn_backend
from sglang.srt.managers import scheduler_process

FAULT_VARIABLE = "SGLANG_TEST_FAULT"


def commit_off_by_one_ulp(
    states: Tensor,
    u: Tensor,
    k: Tensor,
    g: Tensor,
    rows: Tensor,
    slots: Tensor,
    steps: Tensor,
    track_dests: Tensor | None,
    track_steps: Tensor | None,
) -> None:
    """As `commit_tuples`, then the first element of each advanced state moves to its neighbour."""
    commit_tuples(states, u, k, g, rows, slots, steps, track_dests, track_steps)
    moved = slots[(steps >= 0) & (slots >= 0)].long()
    first = states[0, moved, 0, 0, 0]
    states[0, moved, 0, 0, 0] = torch.nextafter(first, torch.full_like(first, math.inf))


def commit_in_place_first(
    states: Tensor,
    u: Tensor,
    k: Tensor,
    g: Tensor,
    rows: Tensor,
    slots: Tensor,
    steps: Tensor,
    track_dests: Tensor | None,
    track_steps: Tensor | None,
) -> None:
    """As `commit_tuples` in the wrong order: the boundary state starts from the advanced state."""
    replay_tuples(states, u, k, g, rows, slots, steps)
    if track_dests is not None and track_steps is not None:
        replay_tuples(states, u, k, g, rows, slots, track_steps, track_dests)


FAULTS: dict[str, Callable[..., None]] = {
    "ulp": commit_off_by_one_ulp,
    "order": commit_in_place_first,
    "none": commit_tuples,
}


def main() -> int:
    """Plant the mistake, then run the scheduler. Raises: KeyError for an unknown name."""
    hybrid_linear_attn_backend.commit_tuples = FAULTS[os.environ[FAULT_VARIABLE]]
    return scheduler_process.main()


if __name__ == "__main__":
    raise SystemExit(main())
