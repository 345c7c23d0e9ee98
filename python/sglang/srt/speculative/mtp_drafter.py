"""Chain drafts from the checkpoint's own multi-token-prediction block (EAGLE with topk 1).

Row convention: row t pairs the target's hidden state of token t with token t+1, at position t, and
its KV goes to the slot of token t, so that draft KV is shared by the prefix cache together with the
target's. Source: docs/design/speculation.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.model_executor.batch_tensors import make_forward_batch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    LogitsOutput,
)
from sglang.srt.model_executor.model_runner import DraftModelRunner
from sglang.srt.speculative.draft_sampling import DraftSampler
from sglang.srt.speculative.drafter import DraftBatch, Proposal


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
        rows = torch.tensor(batch.rows, device=device)
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
                token = torch.argmax(output.logits, dim=-1)
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
        index = torch.tensor(rows, device=self._first_draft.device)
        return self._first_logits[index], self._hidden[index]

    def forward(self, fb: ForwardBatch) -> LogitsOutput:
        """Run the draft model."""
        return self._runner.forward(fb)

    def after_prefill(self, fb: ForwardBatch, output: LogitsOutput, next_ids: Tensor) -> None:
        shifted = torch.roll(fb.input_ids, -1)
        last_rows = fb.query_start_loc[1:].long() - 1
        shifted[last_rows] = next_ids
        self._extend(
            fb.req_pool_indices.tolist(),
            fb.prefix_lens_cpu,
            fb.query_lens_cpu,
            input_ids=shifted,
            hidden=output.hidden,
        )

    def after_verify(
        self, fb: ForwardBatch, output: LogitsOutput, targets: Tensor, num_correct: list[int]
    ) -> None:
        width = targets.shape[1]
        kept = [correct + 1 for correct in num_correct]
        if min(kept) == width:
            ids, hidden = targets.reshape(-1), output.hidden
        else:
            index = torch.tensor(
                [r * width + i for r, count in enumerate(kept) for i in range(count)],
                device=targets.device,
            )
            ids, hidden = targets.reshape(-1)[index], output.hidden[index]
        self._extend(
            fb.req_pool_indices.tolist(), fb.prefix_lens_cpu, kept, input_ids=ids, hidden=hidden
        )

    def _extend(
        self,
        rows: list[int],
        prefix_lens: list[int],
        query_lens: list[int],
        *,
        input_ids: Tensor,
        hidden: Tensor,
    ) -> None:
        """Write draft KV for these rows and keep each request's next first draft."""
        ends = torch.tensor(query_lens, device=input_ids.device).cumsum(0)
        fb = make_forward_batch(
            ForwardMode.DRAFT_EXTEND,
            req_pool=self.req_pool,
            rows=rows,
            prefix_lens=prefix_lens,
            query_lens=query_lens,
            input_ids=input_ids,
            spec_hidden=hidden,
            logits_rows=ends - 1,
            capture_hidden=CaptureHiddenMode.LAST,
            with_state=False,
        )
        output = self._runner.forward(fb)
        index = torch.tensor(rows, device=input_ids.device)
        self._first_draft[index] = torch.argmax(output.logits, dim=-1)
        self._hidden[index] = output.hidden.to(self._hidden.dtype)
        if self._first_logits is not None:
            self._first_logits[index] = output.logits
