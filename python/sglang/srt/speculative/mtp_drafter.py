"""Chain drafts from the checkpoint's own multi-token-prediction block (EAGLE with topk 1).

Row convention: row t pairs the target's hidden state of token t with token t+1, at position t, and
its KV goes to the slot of token t, so that draft KV is shared by the prefix cache together with the
target's. Source: docs/design/speculation.md.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sglang.kernels.ops.fused.argmax import argmax_rows
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.model_executor.batch_tensors import make_forward_batch
from sglang.srt.model_executor.decode_rows import DecodeRows
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    LogitsOutput,
)
from sglang.srt.model_executor.model_runner import DraftModelRunner
from sglang.srt.speculative.draft_sampling import DraftSampler
from sglang.srt.speculative.drafter import DraftBatch, Proposal
from sglang.srt.utils.upload import upload_ids


class MTPDrafter:
    """Owns the first draft token and the draft hidden state of every request row.

    ``draws`` lets drafts of sampling requests be random, with their probabilities reported;
    ``keeps_logits`` keeps the first draft's logits of every row, which that needs and trees need too.
    """

    is_chain = True
    capture_hidden = CaptureHiddenMode.FULL
    capture_layer_ids: tuple[int, ...] = ()

    def __init__(
        self,
        runner: DraftModelRunner,
        req_pool: HybridReqToTokenPool,
        *,
        num_steps: int,
        draws: bool = False,
        keeps_logits: bool = False,
    ) -> None:
        self._runner = runner
        self._draws = draws
        self.req_pool = req_pool
        self._num_steps = num_steps
        self.draft_token_num = num_steps + 1
        num_rows = req_pool.req_to_token.shape[0]
        device = req_pool.req_to_token.device
        self._first_draft = torch.zeros(num_rows, dtype=torch.long, device=device)
        self._hidden = torch.zeros(
            (num_rows, runner.hidden_size), dtype=runner.dtype, device=device
        )
        self._first_logits: Tensor | None = None
        if draws or keeps_logits:
            vocab_size = runner.model.config.vocab_size
            self._first_logits = torch.zeros((num_rows, vocab_size), device=device)

    def propose(self, batch: DraftBatch) -> Proposal:
        return self.propose_steps(batch, self._num_steps)

    def propose_steps(self, batch: DraftBatch, num_steps: int) -> Proposal:
        """Draft ``num_steps`` tokens, 0 .. ``draft_token_num - 1``."""
        device = self._first_draft.device
        rows = upload_ids(batch.rows, device)
        token, hidden = self._first_draft[rows], self._hidden[rows]
        if num_steps == 0:
            return Proposal(tokens=token.new_empty((len(batch.rows), 0)))
        sampler, probs = None, []
        if self._draws and DraftSampler.is_needed(batch):
            sampler = DraftSampler(batch, num_steps, device)
            token, chances = sampler.choose(self.first_step(batch.rows)[0], 0)
            probs.append(chances)
        drafts = [token]
        ones = [1] * len(batch.rows)
        for step in range(num_steps - 1):
            fb = make_forward_batch(
                ForwardMode.DECODE,
                req_pool=self.req_pool,
                rows=batch.rows,
                prefix_lens=[length + step for length in batch.prefix_lens],
                query_lens=ones,
                input_ids=token,
                spec_hidden=hidden,
                capture_hidden=CaptureHiddenMode.LAST,
                with_state=False,
            )
            output = self._runner.forward(fb)
            hidden = output.hidden
            if sampler is None:
                token = argmax_rows(output.scores)
            else:
                token, chances = sampler.choose(output.logits, step + 1)
                probs.append(chances)
            drafts.append(token)
        return Proposal(
            tokens=torch.stack(drafts, dim=1), probs=torch.stack(probs, dim=1) if probs else None
        )

    def first_step(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        """Logits [R, vocab] of the first draft and the hidden state [R, H] that it continues.

        Raises: ValueError if the drafter was not built to keep logits.
        """
        if self._first_logits is None:
            raise ValueError("this drafter keeps no logits; build it with keeps_logits=True")
        index = upload_ids(rows, self._first_draft.device)
        return self._first_logits[index], self._hidden[index]

    def forward(self, fb: ForwardBatch) -> LogitsOutput:
        """Run the draft model."""
        return self._runner.forward(fb)

    def after_prefill(self, fb: ForwardBatch, output: LogitsOutput, next_ids: Tensor) -> None:
        shifted = torch.roll(fb.input_ids, -1)
        last_rows = fb.query_start_loc[1:].long() - 1
        shifted[last_rows] = next_ids
        self._extend(
            replace(
                fb,
                forward_mode=ForwardMode.DRAFT_EXTEND,
                input_ids=shifted,
                spec_hidden=output.hidden,
                logits_rows=last_rows,
                capture_hidden=CaptureHiddenMode.LAST,
                capture_layer_ids=(),
                mamba_cache_indices=None,
                mamba_track_indices=None,
            ),
            fb.req_pool_indices,
        )

    def after_verify(
        self, fb: ForwardBatch, output: LogitsOutput, targets: Tensor, num_correct: list[int]
    ) -> None:
        width = targets.shape[1]
        kept = [correct + 1 for correct in num_correct]
        if min(kept) == width:
            ids, hidden = targets.reshape(-1), output.hidden
        else:
            index = upload_ids(
                [r * width + i for r, count in enumerate(kept) for i in range(count)],
                targets.device,
            )
            ids, hidden = targets.reshape(-1)[index], output.hidden[index]
        ends = upload_ids(kept, targets.device).cumsum(0)
        rows = fb.req_pool_indices
        self._extend(
            make_forward_batch(
                ForwardMode.DRAFT_EXTEND,
                req_pool=self.req_pool,
                rows=rows.tolist(),
                prefix_lens=fb.prefix_lens_cpu,
                query_lens=kept,
                input_ids=ids,
                spec_hidden=hidden,
                logits_rows=ends - 1,
                capture_hidden=CaptureHiddenMode.LAST,
                with_state=False,
            ),
            rows,
        )

    def propose_rows(self, rows: DecodeRows) -> Tensor:
        """See ``DeviceDrafter``."""
        token, hidden = self._first_draft[rows.safe], self._hidden[rows.safe]
        drafts = [token]
        for step in range(self._num_steps - 1):
            fb = rows.batch(
                ForwardMode.DECODE,
                offset=step,
                input_ids=token,
                spec_hidden=hidden,
                capture_hidden=CaptureHiddenMode.LAST,
                with_state=False,
            )
            output = self._runner.forward(fb)
            hidden = output.hidden
            token = argmax_rows(output.scores)
            drafts.append(token)
        return torch.stack(drafts, dim=1)

    def after_verify_rows(
        self,
        rows: DecodeRows,
        fb: ForwardBatch,
        output: LogitsOutput,
        targets: Tensor,
        correct: Tensor,
    ) -> None:
        """See ``DeviceDrafter``. Rows behind the accepted ones are computed too and never read: the
        next step writes their positions again before it attends to them."""
        width = targets.shape[1]
        first = torch.arange(0, targets.numel(), width, device=targets.device)
        self._extend(
            replace(
                fb,
                forward_mode=ForwardMode.DRAFT_EXTEND,
                input_ids=targets.reshape(-1),
                spec_hidden=output.hidden,
                logits_rows=first + correct.clamp(min=0),
                capture_hidden=CaptureHiddenMode.LAST,
                capture_layer_ids=(),
                mamba_cache_indices=None,
                draft_token_num=0,
            ),
            rows.safe,
        )

    def _extend(self, fb: ForwardBatch, rows: Tensor) -> None:
        """Write draft KV for the batch's rows and keep the next first draft of request rows [R]."""
        output = self._runner.forward(fb)
        self._first_draft[rows] = argmax_rows(output.scores)
        self._hidden[rows] = output.hidden.to(self._hidden.dtype)
        if self._first_logits is not None:
            self._first_logits[rows] = output.logits
