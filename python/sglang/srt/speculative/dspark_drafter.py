"""DSPARK: one pass over a block, then a walk in which each draft biases the next one's logits."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.srt.model_executor.decode_rows import DecodeRows
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    LogitsOutput,
)
from sglang.srt.models.dspark import DSparkDraftModel
from sglang.srt.speculative.block_drafter import BlockRunner
from sglang.srt.speculative.draft_sampling import DraftSampler
from sglang.srt.speculative.drafter import DraftBatch, Proposal


class DSparkDrafter:
    """Chains of ``draft_token_num - 1`` drafts; row i of the block predicts position L + i + 1.

    ``draws`` lets drafts of sampling requests be random, with their probabilities reported.
    """

    is_chain = True
    capture_hidden = CaptureHiddenMode.NULL

    def __init__(
        self, runner: BlockRunner, model: DSparkDraftModel, *, draft_token_num: int, draws: bool
    ) -> None:
        self._runner = runner
        self._model = model
        self._draws = draws
        self.draft_token_num = draft_token_num
        self.capture_layer_ids = model.target_layer_ids

    def propose(self, batch: DraftBatch) -> Proposal:
        width = self.draft_token_num - 1
        dropped = 0 if self._model.config.sample_from_anchor else 1
        rows, base = self._runner.run_block(batch, width + dropped, skip=dropped)
        draws = self._draws and DraftSampler.is_needed(batch)
        sampler = DraftSampler(batch, width, base.device) if draws else None
        return self._walk(batch.bonus, rows, base, sampler)

    def propose_rows(self, rows: DecodeRows) -> Tensor:
        """See ``DeviceDrafter``."""
        dropped = 0 if self._model.config.sample_from_anchor else 1
        num_rows = self.draft_token_num - 1 + dropped
        hidden, base = self._runner.run_block_rows(rows, num_rows, skip=dropped)
        return self._walk(rows.bonus, hidden, base, None).tokens

    def _walk(
        self, bonus: Tensor, rows: Tensor, base: Tensor, sampler: DraftSampler | None
    ) -> Proposal:
        """Left to right: each draft biases the logits of the next."""
        head, width = self._model.markov_head, self.draft_token_num - 1
        state = head.start(rows.shape[0], rows)
        previous, tokens, probs = bonus, [], []
        for i in range(width):
            bias, state = head.step(previous, rows[:, i], state)
            logits = base[:, i] + bias
            if sampler is None:
                previous = torch.argmax(logits, dim=-1)
            else:
                previous, chances = sampler.choose(logits, i)
                probs.append(chances)
            tokens.append(previous)
        return Proposal(
            tokens=torch.stack(tokens, dim=1), probs=torch.stack(probs, dim=1) if probs else None
        )

    def after_prefill(self, fb: ForwardBatch, output: LogitsOutput, next_ids: Tensor) -> None:
        self._runner.write_prefill(fb, output)

    def after_verify(
        self, fb: ForwardBatch, output: LogitsOutput, targets: Tensor, num_correct: list[int]
    ) -> None:
        self._runner.write_accepted(fb, output, num_correct)

    def after_verify_rows(
        self,
        rows: DecodeRows,
        fb: ForwardBatch,
        output: LogitsOutput,
        targets: Tensor,
        correct: Tensor,
    ) -> None:
        """See ``DeviceDrafter``."""
        self._runner.write_accepted_rows(fb, output, self.draft_token_num, correct)
