"""Decode steps that never wait for the host: fixed shapes, captured once per batch size.

A step is two device calls with the choice of tokens between them: *forward* (read the requests'
lengths, draft, run the target) and *commit* (make the accepted rows permanent, catch the drafter up,
advance the lengths). Lengths and bonus tokens live on the device, so a step can be launched while the
one before it still runs; the host learns what came out of it later, from pinned memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang.srt.managers.schedule_batch import DecodePlan, Req, StepResult
from sglang.srt.managers.step_output import edit_and_accept, output_logprobs, unedited
from sglang.srt.model_executor.cuda_graph_runner import (
    GraphedCall,
    GraphSizes,
    Outputs,
    capture_all,
)
from sglang.srt.model_executor.decode_rows import (
    FROM_DEVICE,
    NOBODY,
    NUM_STAGES,
    DecodeRows,
    RequestState,
    StepInputs,
)
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    LogitsOutput,
)
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.speculative.accept_rule import AcceptRule
from sglang.srt.speculative.device_drafter import DeviceDrafter
from sglang.srt.speculative.drafter import Proposal

NO_GRID = 1
"""The track grid of an engine that stores no boundary states."""


@dataclass
class _Forward:
    """What *forward* leaves for *commit*."""

    rows: DecodeRows
    candidates: Tensor
    fb: ForwardBatch
    output: LogitsOutput


class _SizedStep:
    """The two calls of one batch size, and the tensors between them.

    correct [R] int64, -1 for nobody; targets [R, D] int64
    """

    def __init__(self, decode: DeviceDecode, size: int) -> None:
        self._decode = decode
        self._size = size
        device, width = decode.device, decode.width
        self.correct = torch.full((size,), NOBODY, dtype=torch.long, device=device)
        self.targets = torch.zeros((size, width), dtype=torch.long, device=device)
        self._current: _Forward | None = None
        self.forward = GraphedCall(self._forward)
        self.commit = GraphedCall(self._commit)

    def _forward(self) -> Outputs:
        self._current = self._decode.forward(self._size)
        return self._current.candidates, self._current.output.scores

    def _commit(self) -> Outputs:
        current, self._current = self._current, None
        if current is None:
            raise RuntimeError("a step was committed before it ran")
        return (self._decode.commit(current, self.correct, self.targets),)


class DeviceStep:
    """A launched step. ``result`` waits for it."""

    def __init__(
        self, reqs: list[Req], table: Tensor, width: int, raw: Tensor | None, fence: Fence
    ) -> None:
        self._reqs = reqs
        self._table = table
        self._width = width
        self._raw = raw
        self._fence = fence

    def result(self) -> StepResult:
        self._fence.wait()
        rows = self._table.tolist()
        correct = [row[0] for row in rows]
        token_ids = [row[2 : 3 + count] for row, count in zip(rows, correct, strict=True)]
        return StepResult(
            token_ids=token_ids,
            committed=[count + 1 for count in correct],
            tracked=[row[1] for row in rows],
            logprobs=[self._logprobs(i, token_ids[i]) for i in range(len(rows))],
            input_logprobs=[None] * len(rows),
            num_drafts=self._width - 1,
        )

    def _logprobs(self, i: int, ids: list[int]) -> list | None:
        if self._raw is None:
            return None
        first = i * self._width
        return output_logprobs(self._reqs[i], self._raw[first : first + len(ids)], ids)


class Fence:
    """The point in the device's work that a result is ready at."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


def _only_best(req: Req) -> bool:
    """Whether the best token of each row is all that the request wants to know."""
    return req.sampling.is_greedy and not (req.edits_logits or req.return_logprob)


class DeviceDecode:
    """Launches decode and verify steps of chains.

    ``drafter`` None means one token per request and step. Steps of at most the largest of ``sizes``
    requests are padded to one of them.
    """

    def __init__(
        self,
        runner: ModelRunner,
        drafter: DeviceDrafter | None,
        accept_rule: AcceptRule,
        *,
        track_grid_tokens: int,
        sizes: GraphSizes,
    ) -> None:
        self._runner = runner
        self._drafter = drafter
        self._accept_rule = accept_rule
        self._grid = track_grid_tokens
        self._sizes = sizes
        self.device = runner.device
        self.width = 1 if drafter is None else drafter.draft_token_num
        req_pool = runner.req_pool
        most = max(sizes.padded(req_pool.size), req_pool.size)
        self.state = RequestState(req_pool.req_to_token.shape[0], self.device)
        self._inputs = StepInputs(most, self.device)
        self._steps: dict[int, _SizedStep] = {}
        self._results = [
            torch.empty(
                (most, 2 + self.width), dtype=torch.long, pin_memory=self.device.type == "cuda"
            )
            for _ in range(NUM_STAGES)
        ]
        self._turn = 0

    def covers(self, reqs: list[Req]) -> bool:
        """Whether these requests can be advanced here: no draft has to be drawn at random."""
        if self._drafter is None or not self._accept_rule.wants_probs:
            return True
        return all(r.sampling.is_greedy for r in reqs)

    def can_run_ahead(self, reqs: list[Req]) -> bool:
        """Whether their next step needs nothing of the one before it but what the device has."""
        has_room = self._grid == NO_GRID or self._grid >= 2 * self.width
        if not has_room or not self.covers(reqs):
            return False
        fixed = not self._accept_rule.reads_sampling
        return all(
            (fixed or r.sampling.is_greedy)
            and not (r.edits_logits or r.return_logprob or r.return_state_digest)
            for r in reqs
        )

    @torch.inference_mode()
    def capture(self) -> int:
        """Capture every size; the bytes it took. Requests must not run yet."""
        return capture_all(self._sizes, self._calls_of)

    def _calls_of(self, size: int) -> tuple[GraphedCall, GraphedCall]:
        step = self._step(size)
        return step.forward, step.commit

    def _step(self, size: int) -> _SizedStep:
        if size not in self._steps:
            self._steps[size] = _SizedStep(self, size)
        return self._steps[size]

    def launch(self, plan: DecodePlan) -> DeviceStep:
        """Start one step of ``plan.reqs``; of those in flight the device knows length and bonus."""
        reqs, width = plan.reqs, self.width
        count = len(reqs)
        padded = self._sizes.padded(count)
        self._inputs.fill(
            padded,
            [r.req_pool_idx for r in reqs],
            [FROM_DEVICE if r.num_in_flight else r.kv.committed_len for r in reqs],
            [FROM_DEVICE if r.num_in_flight else r.output_ids[-1] for r in reqs],
            plan.track_slots,
        )
        step = self._step(padded)
        candidates, scores = step.forward()
        candidates, logits = candidates[:count], scores[: count * width]
        if not all(_only_best(r) for r in reqs):
            logits = logits.float()
        raw = unedited(reqs, logits)
        proposal = Proposal(tokens=candidates[:, 1:])
        verdict = edit_and_accept(self._accept_rule, reqs, candidates, logits, proposal)
        if count < padded:
            step.correct.fill_(NOBODY)
        step.correct[:count].copy_(verdict.correct)
        step.targets[:count].copy_(verdict.targets)
        (packed,) = step.commit()
        self._turn = (self._turn + 1) % NUM_STAGES
        table = self._results[self._turn][:count]
        table.copy_(packed[:count], non_blocking=True)
        asked = any(r.return_logprob for r in reqs)
        return DeviceStep(reqs, table, width, raw if asked else None, Fence(self.device))

    def forward(self, size: int) -> _Forward:
        """Draft and run the target over the rows that the inputs name."""
        drafter = self._drafter
        rows = DecodeRows.read(
            self._inputs.columns(size), self.state, self._runner.req_pool, self.width
        )
        bonus = rows.bonus.unsqueeze(1)
        if drafter is None:
            candidates, mode = bonus, ForwardMode.DECODE
            capture, taps = CaptureHiddenMode.NULL, ()
        else:
            candidates = torch.cat([bonus, drafter.propose_rows(rows)], dim=1)
            mode = ForwardMode.TARGET_VERIFY
            capture, taps = drafter.capture_hidden, drafter.capture_layer_ids
        fb = rows.batch(
            mode,
            width=self.width,
            input_ids=candidates.reshape(-1),
            capture_hidden=capture,
            capture_layer_ids=taps,
        )
        if drafter is None:
            # A plain decode advances the state in the call itself, and stores boundaries there.
            ends = (rows.prefix + 1) % self._grid == 0
            fb.mamba_track_indices = torch.where(ends, rows.track_slots, NOBODY)
            fb.mamba_track_rows = torch.where(fb.mamba_track_indices >= 0, 1, -1)
        return _Forward(rows, candidates, fb, self._runner.forward(fb))

    def commit(self, forward: _Forward, correct: Tensor, targets: Tensor) -> Tensor:
        """Make the accepted rows permanent, boundary states first.

        Returns [R, 2 + D] int64: correct, length of the boundary state stored or -1, targets.
        """
        rows = forward.rows
        step = self._grid - 1 - rows.prefix % self._grid
        crosses = (step <= correct) & (rows.track_slots >= 0)
        steps = torch.where(crosses, step, NOBODY)
        if self._drafter is not None:
            self._runner.attn_backend.update_mamba_state_after_mtp_verify(
                last_correct_step_indices=correct,
                mamba_track_indices=rows.track_slots,
                mamba_steps_to_track=steps,
                model=self._runner.model,
                req_pool_indices=rows.rows,
            )
            self._drafter.after_verify_rows(rows, forward.fb, forward.output, targets, correct)
        rows.advance(self.state, correct, targets)
        tracked = torch.where(crosses, rows.prefix + step + 1, NOBODY)
        return torch.cat([correct.unsqueeze(1), tracked.unsqueeze(1), targets], dim=1)
