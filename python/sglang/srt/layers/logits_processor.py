"""Token embedding and output head, which may be one tensor."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sglang.kernels.ops.cpu import gemm
from sglang.srt.layers.linear import Linear
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    LogitsOutput,
)


class VocabEmbedding(nn.Module):
    """Rows of ``table`` by token id; ``table`` is the head itself when the two are tied."""

    def __init__(self, table: Linear, *, activation_dtype: torch.dtype) -> None:
        super().__init__()
        self.table = table
        self.activation_dtype = activation_dtype

    def forward(self, ids: Tensor) -> Tensor:
        """[T] int64 -> [T, H] in the activation dtype."""
        if self.table.packed:
            return gemm.packed_rows(self.table.storage, ids).to(self.activation_dtype)
        return self.table.weight[ids].to(self.activation_dtype)


def select_outputs(
    fb: ForwardBatch, hidden: Tensor, lm_head: Linear, taps: Tensor | None
) -> LogitsOutput:
    """Logits of the wanted rows of ``hidden`` [T, H] (post-final-norm) and what the call captures."""
    wanted = hidden if fb.logits_rows is None else hidden[fb.logits_rows]
    captured = {
        CaptureHiddenMode.NULL: None,
        CaptureHiddenMode.LAST: wanted,
        CaptureHiddenMode.FULL: hidden,
    }[fb.capture_hidden]
    return LogitsOutput(scores=lm_head(wanted), hidden=captured, taps=taps)
