"""What a drafter offers beside ``Drafter`` when its chains can be drafted without the host."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from sglang.srt.model_executor.decode_rows import DecodeRows
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    LogitsOutput,
)


@runtime_checkable
class DeviceDrafter(Protocol):
    """Both methods launch kernels of fixed shapes, so that they can be captured, and never wait."""

    draft_token_num: int
    capture_hidden: CaptureHiddenMode
    capture_layer_ids: tuple[int, ...]

    def propose_rows(self, rows: DecodeRows) -> Tensor:
        """The best chain of each request: [R, draft_token_num - 1] int64."""
        ...

    def after_verify_rows(
        self,
        rows: DecodeRows,
        fb: ForwardBatch,
        output: LogitsOutput,
        targets: Tensor,
        correct: Tensor,
    ) -> None:
        """``targets`` [R, D] and ``correct`` [R] as in ``Drafter.after_verify``; of nobody, -1."""
        ...
