"""The protocol of a drafter: what it needs from the target, and when it is called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    LogitsOutput,
)


@dataclass
class DraftBatch:
    """R decoding requests before a verify.

    rows         request rows
    prefix_lens  committed lengths L; positions L .. L+D-1 have KV slots in the token table
    bonus        [R] int64, the emitted token at position L
    """

    rows: list[int]
    prefix_lens: list[int]
    bonus: Tensor


class Drafter(Protocol):
    """Proposes ``draft_token_num - 1`` tokens per request. Its state is keyed by request row."""

    draft_token_num: int
    is_chain: bool
    capture_hidden: CaptureHiddenMode
    capture_layer_ids: tuple[int, ...]

    def propose(self, batch: DraftBatch) -> Tensor:
        """Return drafts [R, D-1] int64 for positions L+1 .. L+D-1."""
        ...

    def after_prefill(self, fb: ForwardBatch, output: LogitsOutput, next_ids: Tensor) -> None:
        """The target ran prefill rows; ``next_ids`` [R] follows each request's last row."""
        ...

    def after_verify(
        self, fb: ForwardBatch, output: LogitsOutput, targets: Tensor, num_correct: list[int]
    ) -> None:
        """The target verified D rows; ``targets`` [R, D] is its token after each row."""
        ...
