"""Decode and verify batches whose shapes are fixed: built on the device, padded, never waiting.

One padding rule: a request row of -1 is nobody. Its slots are -1 too, every kernel skips it, and what
is computed for it is never read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)

NOBODY = -1
FROM_DEVICE = -1
"""In place of a length or a bonus: the host does not know it yet, the device does."""
NUM_STAGES = 4
"""Pinned buffers that steps take in turn. Two would do: a step is launched when the one before the last
has been waited for."""


class RequestState:
    """What the device knows of every request row: tokens committed, and the bonus that follows them.

    lens, bonus  [rows] int64; row 0 stands for padding and stays 0
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.lens = torch.zeros(num_rows, dtype=torch.long, device=device)
        self.bonus = torch.zeros(num_rows, dtype=torch.long, device=device)

    def set(self, rows: Tensor, lens: Tensor, bonus: Tensor) -> None:
        """Rows [n], all real."""
        self.lens[rows] = lens
        self.bonus[rows] = bonus


class StepInputs:
    """Four int64 columns per request of a step: row, length, bonus, track slot.

    They live in one device block at a fixed address, filled by one asynchronous copy from pinned
    memory. ``FROM_DEVICE`` as a length or bonus keeps the device's own value.
    """

    def __init__(self, max_requests: int, device: torch.device) -> None:
        self._block = torch.full((4 * max_requests,), NOBODY, dtype=torch.long, device=device)
        pinned = device.type == "cuda"
        self._stages = [
            torch.empty(4 * max_requests, dtype=torch.long, pin_memory=pinned)
            for _ in range(NUM_STAGES)
        ]
        self._turn = 0

    def fill(
        self,
        padded: int,
        rows: list[int],
        lens: list[int],
        bonus: list[int],
        track_slots: list[int],
    ) -> None:
        """Upload the columns of ``len(rows)`` requests, padded to ``padded``."""
        self._turn = (self._turn + 1) % NUM_STAGES
        stage = self._stages[self._turn][: 4 * padded]
        table = stage.numpy().reshape(4, padded)
        table.fill(NOBODY)
        for column, values in zip(table, (rows, lens, bonus, track_slots), strict=True):
            column[: len(rows)] = np.asarray(values, dtype=np.int64)
        self._block[: 4 * padded].copy_(stage, non_blocking=True)

    def columns(self, padded: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows, lengths, bonus and track slots [padded] each, views of the block."""
        rows, lens, bonus, track_slots = self._block[: 4 * padded].view(4, padded)
        return rows, lens, bonus, track_slots


@dataclass
class DecodeRows:
    """R padded requests of one step; tensors only, so that building batches can be captured.

    rows         [R] int64 request rows, -1 nobody
    safe         [R] int64, row 0 in place of nobody, for reads
    valid        [R] bool
    prefix       [R] int64 committed lengths
    bonus        [R] int64, the token at position ``prefix``
    track_slots  [R] int64, slot for a boundary state, -1 none
    positions    [W, R] int64, positions ``prefix + w``
    slots        [W, R] int64, their KV slots, -1 for nobody
    state_slots  [R] int32 working state slots, -1 for nobody
    """

    rows: Tensor
    safe: Tensor
    valid: Tensor
    prefix: Tensor
    bonus: Tensor
    track_slots: Tensor
    positions: Tensor
    slots: Tensor
    state_slots: Tensor

    @classmethod
    def read(
        cls,
        columns: tuple[Tensor, Tensor, Tensor, Tensor],
        state: RequestState,
        req_pool: HybridReqToTokenPool,
        width: int,
    ) -> DecodeRows:
        """Rows of a step that covers positions ``prefix .. prefix + width - 1``."""
        rows, lens, bonus, track_slots = columns
        valid = rows >= 0
        safe = rows.clamp(min=0)
        prefix = torch.where(lens >= 0, lens, state.lens[safe])
        prefix = torch.where(valid, prefix, 0)
        token = torch.where(bonus >= 0, bonus, state.bonus[safe])
        steps = torch.arange(width, device=rows.device)
        positions = prefix + steps.unsqueeze(1)
        slots = req_pool.req_to_token[safe, positions].long()
        state_slots = req_pool.get_mamba_indices(safe).to(torch.int32)
        return cls(
            rows=rows,
            safe=safe,
            valid=valid,
            prefix=prefix,
            bonus=token,
            track_slots=track_slots,
            positions=positions,
            slots=torch.where(valid, slots, NOBODY),
            state_slots=torch.where(valid, state_slots, NOBODY),
        )

    @property
    def num_requests(self) -> int:
        return self.rows.shape[0]

    def batch(
        self,
        mode: ForwardMode,
        *,
        input_ids: Tensor,
        offset: int = 0,
        width: int = 1,
        logits_rows: Tensor | None = None,
        spec_hidden: Tensor | None = None,
        capture_hidden: CaptureHiddenMode = CaptureHiddenMode.NULL,
        capture_layer_ids: tuple[int, ...] = (),
        with_state: bool = True,
    ) -> ForwardBatch:
        """The batch of positions ``prefix + offset .. prefix + offset + width - 1``.

        input_ids  [R * width], requests one after the other
        """
        count, device = self.num_requests, self.rows.device
        span = slice(offset, offset + width)
        prefix = self.prefix + offset if offset else self.prefix
        return ForwardBatch(
            forward_mode=mode,
            input_ids=input_ids,
            positions=self.positions[span].t().reshape(-1),
            req_pool_indices=self.rows,
            prefix_lens=prefix,
            query_lens=torch.full((count,), width, dtype=torch.long, device=device),
            query_start_loc=torch.arange(
                0, count * width + 1, width, dtype=torch.int32, device=device
            ),
            out_cache_loc=self.slots[span].t().reshape(-1),
            mamba_cache_indices=self.state_slots if with_state else None,
            logits_rows=logits_rows,
            capture_hidden=capture_hidden,
            capture_layer_ids=capture_layer_ids,
            draft_token_num=width if mode.is_target_verify() else 0,
            spec_hidden=spec_hidden,
            # Where the device is the host, its lengths are at hand; elsewhere nobody may ask.
            prefix_lens_cpu=prefix.tolist() if device.type == "cpu" else [],
            query_lens_cpu=[width] * count,
        )

    def advance(self, state: RequestState, correct: Tensor, targets: Tensor) -> None:
        """Commit ``correct`` [R] + 1 tokens of every request; ``targets`` [R, D] holds the next bonus."""
        after = self.prefix + correct + 1
        bonus = targets.gather(1, correct.clamp(min=0).unsqueeze(1)).squeeze(1)
        state.set(self.safe, torch.where(self.valid, after, 0), torch.where(self.valid, bonus, 0))
