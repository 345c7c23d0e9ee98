"""Packed prompts, and how they are cut into chunks: once per forward call, on the host, with one upload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang.kernels.ops.attention.fla.chunk_delta_h import CHUNK_SIZE

REQUEST_FIELDS = 4
CHUNK_FIELDS = 2


@dataclass(frozen=True)
class PrefillTokens:
    """Packed prompts of one layer: q, k [T, H, K], v [T, HV, V], not normalised, any token and head stride;
    a, b [T, HV] raw gates, any token stride; A_log, dt_bias [HV]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor

    def rows(self, low: int, high: int) -> PrefillTokens:
        q, k, v, a, b = (x[low:high] for x in (self.q, self.k, self.v, self.a, self.b))
        return PrefillTokens(q, k, v, a, b, self.A_log, self.dt_bias)


@dataclass(frozen=True)
class PrefillPlan:
    """Chunks of one call's prompts, for all layers.

    lengths and cuts [N] on the host: rows of a prompt, and rows before its boundary (0: none). On the device, int32:
    requests [N, 4] first row, row of the cut, end row, first chunk; chunks [C, 2] first row, rows. No chunk
    crosses a cut, so a prompt's chunks depend on its own length and cut alone.
    """

    lengths: tuple[int, ...]
    cuts: tuple[int, ...]
    requests: torch.Tensor
    chunks: torch.Tensor

    @property
    def num_rows(self) -> int:
        return sum(self.lengths)


def plan_prefill(
    lengths: Sequence[int], track_rows: Sequence[int] | None, device: torch.device
) -> PrefillPlan:
    """Plan prompts of `lengths` rows whose states after `track_rows[i]` rows are wanted too.

    A track row outside 1..length means none. Raises: ValueError for a negative length or unequal counts.
    """
    if any(length < 0 for length in lengths):
        raise ValueError(f"lengths must not be negative, got {list(lengths)}")
    wanted = [0] * len(lengths) if track_rows is None else list(track_rows)
    if len(wanted) != len(lengths):
        raise ValueError(f"track_rows has {len(wanted)} entries for {len(lengths)} prompts")
    cuts = [cut if 0 < cut <= length else 0 for cut, length in zip(wanted, lengths)]
    requests: list[int] = []
    chunks: list[int] = []
    start = 0
    for length, cut in zip(lengths, cuts):
        end = start + length
        requests += (start, start + cut, end, len(chunks) // CHUNK_FIELDS)
        for low, high in ((start, start + cut), (start + cut, end)):
            for row in range(low, high, CHUNK_SIZE):
                chunks += (row, min(CHUNK_SIZE, high - row))
        start = end
    on_gpu = device.type == "cuda"
    table = torch.tensor(requests + chunks, dtype=torch.int32, pin_memory=on_gpu)
    table = table.to(device, non_blocking=True)
    return PrefillPlan(
        tuple(lengths),
        tuple(cuts),
        table[: len(requests)].view(-1, REQUEST_FIELDS),
        table[len(requests) :].view(-1, CHUNK_FIELDS),
    )
