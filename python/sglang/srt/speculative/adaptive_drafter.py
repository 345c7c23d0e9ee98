"""An MTP chain whose length follows acceptance and batch size."""

from __future__ import annotations

from torch import Tensor

from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    LogitsOutput,
)
from sglang.srt.speculative.adaptive import StepPolicy
from sglang.srt.speculative.drafter import DraftBatch, Proposal
from sglang.srt.speculative.mtp_drafter import MTPDrafter


class AdaptiveMTPDrafter:
    """Proposes as many tokens as ``policy`` says; pages and scratch are sized for the most it can say.

    With no steps a verify has one row, which is a plain decode; draft KV stays up to date.
    """

    is_chain = True
    capture_hidden = CaptureHiddenMode.FULL
    capture_layer_ids: tuple[int, ...] = ()

    def __init__(self, inner: MTPDrafter, policy: StepPolicy) -> None:
        if policy.max_steps >= inner.draft_token_num:
            raise ValueError(
                f"the pools hold {inner.draft_token_num} draft tokens a request; the adaptive policy "
                f"may ask for {policy.max_steps + 1}"
            )
        self._inner = inner
        self._policy = policy
        self.draft_token_num = inner.draft_token_num

    def propose(self, batch: DraftBatch) -> Proposal:
        return self._inner.propose_steps(batch, self._policy.steps_for(len(batch.rows)))

    def after_prefill(self, fb: ForwardBatch, output: LogitsOutput, next_ids: Tensor) -> None:
        self._inner.after_prefill(fb, output, next_ids)

    def after_verify(
        self, fb: ForwardBatch, output: LogitsOutput, targets: Tensor, num_correct: list[int]
    ) -> None:
        self._inner.after_verify(fb, output, targets, num_correct)
        self._policy.observe(len(num_correct), sum(num_correct) / len(num_correct))
