"""Decode steps that the host leads: compact batches, any drafter, results at once.

This is how the CPU decodes, and a GPU when a step needs the host in its middle (trees, n-gram drafts,
drafts drawn at random).
"""

from __future__ import annotations

from torch import Tensor

from sglang.srt.managers.schedule_batch import DecodePlan, StepResult
from sglang.srt.managers.step_output import (
    edit_and_accept,
    output_logprobs,
    sample_next,
    unedited,
)
from sglang.srt.mem_cache.track import crossing_step
from sglang.srt.model_executor.batch_tensors import make_forward_batch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode, LogitsOutput
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.speculative.accept_rule import AcceptRule, Verdict
from sglang.srt.speculative.drafter import DraftBatch, Drafter, TokenHistory
from sglang.srt.speculative.tree import compact_output, flat_rows, kv_moves, place_tree
from sglang.srt.utils.upload import upload_ids


class HostDecode:
    """Advances requests by one token, or by what the target accepts of their drafts."""

    def __init__(
        self,
        runner: ModelRunner,
        drafter: Drafter | None,
        accept_rule: AcceptRule,
        *,
        track_grid_tokens: int,
    ) -> None:
        self._runner = runner
        self._drafter = drafter
        self._accept_rule = accept_rule
        self._track_grid_tokens = track_grid_tokens

    def run(self, plan: DecodePlan) -> StepResult:
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
        raw = unedited(reqs, logits)
        ids = sample_next(reqs, logits).tolist()
        return StepResult(
            token_ids=[[token] for token in ids],
            committed=[1] * len(reqs),
            tracked=[
                r.kv.committed_len + 1 if slot >= 0 else -1
                for r, slot in zip(reqs, plan.track_slots, strict=True)
            ],
            logprobs=[output_logprobs(r, raw[i : i + 1], [ids[i]]) for i, r in enumerate(reqs)],
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
        candidates = proposal.with_bonus(bonus)
        width = candidates.shape[1]
        fb = make_forward_batch(
            ForwardMode.TARGET_VERIFY,
            req_pool=self._runner.req_pool,
            rows=rows,
            prefix_lens=prefix_lens,
            query_lens=[width] * len(reqs),
            input_ids=candidates.reshape(-1),
            capture_hidden=drafter.capture_hidden,
            capture_layer_ids=drafter.capture_layer_ids,
        )
        if proposal.tree is not None:
            place_tree(fb, proposal.tree)
        output = self._runner.forward(fb)
        logits = output.logits
        raw = unedited(reqs, logits)
        verdict = edit_and_accept(self._accept_rule, reqs, candidates, logits, proposal)
        tracked = self._commit_verify(plan, fb, verdict)
        if verdict.paths is not None:
            output = self._compact(fb, output, verdict.paths)
        drafter.after_verify(fb, output, verdict.targets, verdict.num_correct)
        return StepResult(
            token_ids=verdict.token_ids,
            committed=[count + 1 for count in verdict.num_correct],
            tracked=tracked,
            logprobs=[
                output_logprobs(
                    r, raw[[i * width + row for row in verdict.rows_of(i)]], verdict.token_ids[i]
                )
                if r.return_logprob
                else None
                for i, r in enumerate(reqs)
            ],
            input_logprobs=[None] * len(reqs),
            num_drafts=width - 1,
        )

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

    def _ids(self, values: list[int]) -> Tensor:
        return upload_ids(values, self._runner.device)
