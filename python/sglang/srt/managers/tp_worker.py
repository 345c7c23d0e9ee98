"""Executes the scheduler's plans: builds batches, samples, verifies, commits.

The worker decides nothing about requests. It returns what happened as a StepResult, and only
``_commit_verify`` makes a verify permanent in the pools.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang.srt.constrained.bitmask import forbid
from sglang.srt.layers.sampler import sample, token_logprobs
from sglang.srt.managers.io_struct import TokenLogprob
from sglang.srt.managers.schedule_batch import (
    DecodePlan,
    PrefillChunk,
    PrefillPlan,
    Req,
    StepResult,
)
from sglang.srt.mem_cache.state_digest import state_digest
from sglang.srt.mem_cache.track import crossing_step
from sglang.srt.model_executor.batch_tensors import make_forward_batch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    LogitsOutput,
)
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampling_batch import SamplingBatch
from sglang.srt.speculative.accept_rule import AcceptRule, MatchRule, Verdict, VerifyRows
from sglang.srt.speculative.drafter import DraftBatch, Drafter, Proposal, TokenHistory
from sglang.srt.speculative.tree import compact_output, flat_rows, kv_moves, place_tree


class TpModelWorker:
    """One rank's executor. ``drafter`` None means one token per request and step."""

    def __init__(
        self,
        runner: ModelRunner,
        drafter: Drafter | None,
        *,
        track_grid_tokens: int,
        accept_rule: AcceptRule | None = None,
    ) -> None:
        self._runner = runner
        self._drafter = drafter
        self._accept_rule = accept_rule or MatchRule()
        self._track_grid_tokens = track_grid_tokens
        self._device = runner.device

    @property
    def draft_token_num(self) -> int:
        return 1 if self._drafter is None else self._drafter.draft_token_num

    def replace_drafter(self, drafter: Drafter) -> None:
        """Use another drafter of the same width from the next step on.

        Raises: ValueError if the widths differ, because the pools were built for one.
        """
        if drafter.draft_token_num != self.draft_token_num:
            raise ValueError(
                f"the pools hold {self.draft_token_num} draft tokens a request; "
                f"the new drafter proposes {drafter.draft_token_num}"
            )
        self._drafter = drafter

    def state_digest(self, req: Req) -> str | None:
        """Digest of the request's recurrent state as of the last step; waits for the device."""
        return state_digest(self._runner.req_pool.mamba_pool, req.kv)

    @torch.inference_mode()
    def prefill(self, plan: PrefillPlan) -> StepResult:
        """Run prompt rows; sample the first token of every request whose last chunk this is."""
        chunks = plan.chunks
        row_index, spans = _wanted_rows(chunks)
        fb = make_forward_batch(
            ForwardMode.EXTEND,
            req_pool=self._runner.req_pool,
            rows=[c.req.req_pool_idx for c in chunks],
            prefix_lens=[c.start for c in chunks],
            query_lens=[c.end - c.start for c in chunks],
            input_ids=self._ids([t for c in chunks for t in c.token_ids[c.start : c.end]]),
            logits_rows=self._ids(row_index),
            track_slots=[c.track_slot for c in chunks],
            track_rows=[c.track_rows for c in chunks],
            **self._capture(),
        )
        output = self._runner.forward(fb)
        input_logprobs = [
            self._prompt_logprobs(c, output.logits, span)
            for c, span in zip(chunks, spans, strict=True)
        ]
        last = [i for i, c in enumerate(chunks) if c.is_last]
        reqs = [chunks[i].req for i in last]
        logits = output.logits[[spans[i].stop - 1 for i in last]]
        raw = logits.clone() if any(r.return_logprob for r in reqs) else logits
        ids = self._sample(reqs, logits)
        next_ids = [c.next_token or 0 for c in chunks]
        for i, token in zip(last, ids.tolist(), strict=True):
            next_ids[i] = token
        if self._drafter is not None:
            self._drafter.after_prefill(fb, output, self._ids(next_ids))
        own = dict(zip(last, range(len(last)), strict=True))
        return StepResult(
            token_ids=[[next_ids[i]] if c.is_last else [] for i, c in enumerate(chunks)],
            committed=[c.end - c.start for c in chunks],
            tracked=[c.start + c.track_rows if c.track_slot >= 0 else -1 for c in chunks],
            logprobs=[
                self._output_logprobs(c.req, raw[own[i] : own[i] + 1], [next_ids[i]])
                if i in own
                else None
                for i, c in enumerate(chunks)
            ],
            input_logprobs=input_logprobs,
        )

    @torch.inference_mode()
    def decode(self, plan: DecodePlan) -> StepResult:
        """Advance every request by one token, or by what the target accepts of its drafts."""
        if self._drafter is None:
            return self._decode_one(plan)
        return self._decode_speculative(plan, self._drafter)

    def _decode_one(self, plan: DecodePlan) -> StepResult:
        reqs = plan.reqs
        fb = make_forward_batch(
            ForwardMode.DECODE,
            req_pool=self._runner.req_pool,
            rows=[r.req_pool_idx for r in reqs],
            prefix_lens=[r.kv.committed_len for r in reqs],
            query_lens=[1] * len(reqs),
            input_ids=self._ids([r.output_ids[-1] for r in reqs]),
            track_slots=plan.track_slots,
            track_rows=[1 if slot >= 0 else -1 for slot in plan.track_slots],
        )
        logits = self._runner.forward(fb).logits
        raw = logits.clone() if any(r.return_logprob for r in reqs) else logits
        ids = self._sample(reqs, logits).tolist()
        return StepResult(
            token_ids=[[token] for token in ids],
            committed=[1] * len(reqs),
            tracked=[
                r.kv.committed_len + 1 if slot >= 0 else -1
                for r, slot in zip(reqs, plan.track_slots, strict=True)
            ],
            logprobs=[
                self._output_logprobs(r, raw[i : i + 1], [ids[i]]) for i, r in enumerate(reqs)
            ],
            input_logprobs=[None] * len(reqs),
        )

    def _decode_speculative(self, plan: DecodePlan, drafter: Drafter) -> StepResult:
        reqs = plan.reqs
        rows = [r.req_pool_idx for r in reqs]
        prefix_lens = [r.kv.committed_len for r in reqs]
        bonus = self._ids([r.output_ids[-1] for r in reqs])
        proposal = drafter.propose(
            DraftBatch(
                rows=rows,
                prefix_lens=prefix_lens,
                bonus=bonus,
                sampling=[r.sampling for r in reqs],
                histories=[TokenHistory(r.rid, r.origin_input_ids, r.output_ids) for r in reqs],
            )
        )
        candidates = torch.cat([bonus.unsqueeze(1), proposal.tokens], dim=1)
        width = candidates.shape[1]
        fb = make_forward_batch(
            ForwardMode.TARGET_VERIFY,
            req_pool=self._runner.req_pool,
            rows=rows,
            prefix_lens=prefix_lens,
            query_lens=[width] * len(reqs),
            input_ids=candidates.reshape(-1),
            **self._capture(),
        )
        if proposal.tree is not None:
            place_tree(fb, proposal.tree)
        output = self._runner.forward(fb)
        logits = output.logits
        raw = logits.clone() if any(r.return_logprob for r in reqs) else logits
        self._edit_verify_logits(reqs, logits, proposal)
        verdict = self._accept_rule.accept(
            VerifyRows(
                candidates=candidates,
                logits=logits,
                states=[r.sampling for r in reqs],
                positions=[r.num_tokens for r in reqs],
                proposal=proposal,
            )
        )
        tracked = self._commit_verify(plan, fb, verdict)
        if verdict.paths is not None:
            output = self._compact(fb, output, verdict.paths)
        drafter.after_verify(fb, output, verdict.targets, verdict.num_correct)
        return StepResult(
            token_ids=verdict.token_ids,
            committed=[count + 1 for count in verdict.num_correct],
            tracked=tracked,
            logprobs=[
                self._output_logprobs(
                    r, raw[[i * width + row for row in verdict.rows_of(i)]], verdict.token_ids[i]
                )
                if r.return_logprob
                else None
                for i, r in enumerate(reqs)
            ],
            input_logprobs=[None] * len(reqs),
            num_drafts=width - 1,
        )

    def _edit_verify_logits(self, reqs: Sequence[Req], logits: Tensor, proposal: Proposal) -> None:
        """Penalties, bias, minimum length and grammar, each row after the drafts that lead to it."""
        tree, width = proposal.tree, proposal.tokens.shape[1] + 1
        for i, req in enumerate(reqs):
            if not req.edits_logits:
                continue
            drafts = proposal.tokens[i].tolist()
            own = logits[i * width : (i + 1) * width]
            if tree is None:
                req.sampling.edit_logits(own, req.output_ids, drafts)
                if req.grammar is not None:
                    forbid(own, req.grammar.mask_chain(drafts))
                continue
            paths = [[drafts[n - 1] for n in tree.path_to(i, node)[1:]] for node in range(width)]
            for node, ahead in enumerate(paths):
                req.sampling.edit_logits(own[node : node + 1], req.output_ids + ahead, ())
            if req.grammar is not None:
                forbid(own, req.grammar.mask_tree(paths))

    def _compact(
        self, fb: ForwardBatch, output: LogitsOutput, paths: list[list[int]]
    ) -> LogitsOutput:
        """Bring a tree's accepted rows to the front: their KV in the pool, and the output's rows."""
        width = fb.query_lens_cpu[0]
        moves = kv_moves(fb.out_cache_loc, paths, width)
        if moves is not None:
            self._runner.kv_pool.move_slots(*moves)
        return compact_output(output, self._ids(flat_rows(paths, width)))

    def _commit_verify(self, plan: DecodePlan, fb: ForwardBatch, verdict: Verdict) -> list[int]:
        """Make the accepted rows permanent; return the lengths of stored boundary states."""
        steps, tracked = [], []
        grid = self._track_grid_tokens
        for i, (pre, count, slot) in enumerate(
            zip(fb.prefix_lens_cpu, verdict.num_correct, plan.track_slots, strict=True)
        ):
            step = crossing_step(pre, count + 1, grid) if slot >= 0 else -1
            steps.append(verdict.rows_of(i)[step] if step >= 0 else -1)
            tracked.append(pre + step + 1 if step >= 0 else -1)
        tracking = any(step >= 0 for step in steps)
        self._runner.attn_backend.update_mamba_state_after_mtp_verify(
            last_correct_step_indices=verdict.last_row,
            mamba_track_indices=self._ids(plan.track_slots) if tracking else None,
            mamba_steps_to_track=self._ids(steps) if tracking else None,
            model=self._runner.model,
            req_pool_indices=fb.req_pool_indices,
        )
        return tracked

    def _sample(self, reqs: Sequence[Req], logits: Tensor) -> Tensor:
        """Edit logits [R, vocab] in place, then choose a token per request. Returns [R] int64."""
        for i, req in enumerate(reqs):
            if req.edits_logits:
                req.sampling.edit_logits(logits[i : i + 1], req.output_ids, ())
            if req.grammar is not None:
                forbid(logits[i : i + 1], req.grammar.mask_chain(()))
        batch = SamplingBatch.build(
            [r.sampling for r in reqs], [r.num_tokens for r in reqs], 1, self._device
        )
        return sample(logits, batch)

    def _prompt_logprobs(
        self, chunk: PrefillChunk, logits: Tensor, span: range
    ) -> list[TokenLogprob] | None:
        first = _first_scored_position(chunk)
        if first is None:
            return None
        ids = chunk.token_ids[first : min(chunk.end + 1, len(chunk.token_ids))]
        return self._output_logprobs(chunk.req, logits[span.start : span.start + len(ids)], ids)

    def _output_logprobs(
        self, req: Req, logits: Tensor, ids: list[int]
    ) -> list[TokenLogprob] | None:
        if not req.return_logprob:
            return None
        rows = token_logprobs(logits, self._ids(ids), req.top_logprobs_num, req.token_ids_logprob)
        return [
            TokenLogprob(logprob=own, token_id=token, top=top, selected=named)
            for token, (own, top, named) in zip(ids, rows, strict=True)
        ]

    def _capture(self) -> dict:
        if self._drafter is None:
            return {"capture_hidden": CaptureHiddenMode.NULL}
        return {
            "capture_hidden": self._drafter.capture_hidden,
            "capture_layer_ids": self._drafter.capture_layer_ids,
        }

    def _ids(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)


def _first_scored_position(chunk: PrefillChunk) -> int | None:
    """First prompt position whose log probability this chunk can give, or None."""
    req = chunk.req
    if not req.return_logprob or req.logprob_start_len < 0 or req.output_ids:
        return None
    first = max(req.logprob_start_len, chunk.start + 1)
    return first if first <= min(chunk.end, len(chunk.token_ids) - 1) else None


def _wanted_rows(chunks: Sequence[PrefillChunk]) -> tuple[list[int], list[range]]:
    """Rows of the batch whose logits are needed, and each chunk's span in that list."""
    wanted: list[int] = []
    spans: list[range] = []
    offset = 0
    for chunk in chunks:
        begin = len(wanted)
        first = _first_scored_position(chunk)
        if first is not None:
            wanted += range(offset + first - 1 - chunk.start, offset + chunk.end - chunk.start)
        elif chunk.is_last:
            wanted.append(offset + chunk.end - chunk.start - 1)
        spans.append(range(begin, len(wanted)))
        offset += chunk.end - chunk.start
    return wanted, spans
