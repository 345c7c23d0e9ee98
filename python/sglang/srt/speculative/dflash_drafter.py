"""DFLASH and DFlash2: one pass fills a block of masks, row i predicting its own position."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.srt.model_executor.decode_rows import DecodeRows
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    LogitsOutput,
)
from sglang.srt.models.dflash2 import DFlash2DraftModel
from sglang.srt.speculative.block_drafter import BlockRunner
from sglang.srt.speculative.draft_sampling import DraftSampler
from sglang.srt.speculative.drafter import DraftBatch, Proposal


class DFlashDrafter:
    """Chains of ``draft_token_num - 1`` drafts. DFlash2 walks its selector over the block.

    ``draws`` lets DFlash2 draw drafts of sampling requests at random and report their probabilities;
    plain DFLASH always drafts the best token of each row.
    """

    is_chain = True
    capture_hidden = CaptureHiddenMode.NULL

    def __init__(self, runner: BlockRunner, *, draft_token_num: int, draws: bool) -> None:
        self._runner = runner
        self._model = runner.model
        self._draws = draws
        self.draft_token_num = draft_token_num
        self.capture_layer_ids = runner.model.target_layer_ids

    def propose(self, batch: DraftBatch) -> Proposal:
        rows, logits = self._runner.run_block(batch, self.draft_token_num, skip=1)
        draws = self._draws and DraftSampler.is_needed(batch)
        sampler = DraftSampler(batch, rows.shape[1], logits.device) if draws else None
        return self._choose(batch.bonus, rows, logits, sampler)

    def propose_rows(self, rows: DecodeRows) -> Tensor:
        """See ``DeviceDrafter``."""
        hidden, logits = self._runner.run_block_rows(rows, self.draft_token_num, skip=1)
        return self._choose(rows.bonus, hidden, logits, None).tokens

    def _choose(
        self, bonus: Tensor, rows: Tensor, logits: Tensor, sampler: DraftSampler | None
    ) -> Proposal:
        if isinstance(self._model, DFlash2DraftModel):
            return self._walk(self._model, bonus, rows, logits, sampler)
        return Proposal(tokens=torch.argmax(logits, dim=-1))

    @staticmethod
    def _walk(
        model: DFlash2DraftModel,
        bonus: Tensor,
        rows: Tensor,
        logits: Tensor,
        sampler: DraftSampler | None,
    ) -> Proposal:
        """Left to right: a candidate's own logit plus its score after the token just chosen."""
        selector, width = model.candidate_selector, rows.shape[1]
        top_k = min(model.config.selector_top_k, logits.shape[-1])
        unary, candidates = logits.topk(top_k, dim=-1)
        projected = selector.hidden_projection(rows.reshape(-1, rows.shape[-1]))
        projected = projected.view(rows.shape[0], width, -1)
        probs = None if sampler is None else torch.zeros_like(logits)
        previous, tokens = bonus, []
        for i in range(width):
            own = candidates[:, i]
            scores = unary[:, i] + selector.pair_scores(projected[:, i], previous, own)
            if sampler is None:
                index = torch.argmax(scores, dim=-1)
            else:
                index, chances = sampler.choose(scores, i)
                probs[:, i].scatter_(-1, own, chances)
            previous = own.gather(-1, index.unsqueeze(-1)).squeeze(-1)
            tokens.append(previous)
        return Proposal(tokens=torch.stack(tokens, dim=1), probs=probs)

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
