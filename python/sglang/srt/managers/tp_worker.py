"""Executes the scheduler's plans: launches prefill chunks and decode steps, and reads what came out.

The worker decides nothing about requests. Decode steps are led by the device where it can
(``DeviceDecode``), else by the host (``HostDecode``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang.srt.managers.device_decode import DeviceDecode, Fence
from sglang.srt.managers.host_decode import HostDecode
from sglang.srt.managers.io_struct import TokenLogprob
from sglang.srt.managers.schedule_batch import (
    DecodePlan,
    PendingStep,
    PrefillChunk,
    PrefillPlan,
    Req,
    StepResult,
)
from sglang.srt.managers.step_output import output_logprobs, sample_next
from sglang.srt.mem_cache.state_digest import state_digest
from sglang.srt.model_executor.batch_tensors import make_forward_batch
from sglang.srt.model_executor.cuda_graph_runner import GraphSizes
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.speculative.accept_rule import AcceptRule, MatchRule
from sglang.srt.speculative.device_drafter import DeviceDrafter
from sglang.srt.speculative.drafter import Drafter
from sglang.srt.utils.upload import upload_ids


class TpModelWorker:
    """One rank's executor. ``drafter`` None means one token per request and step.

    device_steps  let the device lead decode steps, where drafter and requests allow it; such steps are
                  padded to ``graph_sizes``
    """

    def __init__(
        self,
        runner: ModelRunner,
        drafter: Drafter | None,
        *,
        track_grid_tokens: int,
        accept_rule: AcceptRule | None = None,
        device_steps: bool = False,
        graph_sizes: Sequence[int] = (),
    ) -> None:
        self._runner = runner
        self._drafter = drafter
        self._accept_rule = accept_rule or MatchRule()
        self._track_grid_tokens = track_grid_tokens
        self._device = runner.device
        self._device_decode: DeviceDecode | None = None
        if device_steps and (drafter is None or isinstance(drafter, DeviceDrafter)):
            self._device_decode = DeviceDecode(
                runner,
                drafter,
                self._accept_rule,
                track_grid_tokens=track_grid_tokens,
                sizes=GraphSizes(graph_sizes),
            )
        self._host_decode = self._make_host_decode()

    def _make_host_decode(self) -> HostDecode:
        return HostDecode(
            self._runner,
            self._drafter,
            self._accept_rule,
            track_grid_tokens=self._track_grid_tokens,
        )

    @property
    def draft_token_num(self) -> int:
        return 1 if self._drafter is None else self._drafter.draft_token_num

    def replace_drafter(self, drafter: Drafter) -> None:
        """Use another drafter of the same width from the next step on, led by the host.

        Raises: ValueError if the widths differ, because the pools were built for one.
        """
        if drafter.draft_token_num != self.draft_token_num:
            raise ValueError(
                f"the pools hold {self.draft_token_num} draft tokens a request; "
                f"the new drafter proposes {drafter.draft_token_num}"
            )
        self._drafter = drafter
        self._device_decode = None
        self._host_decode = self._make_host_decode()

    def capture_graphs(self) -> int:
        """Capture decode steps of every size; returns the bytes they hold."""
        return 0 if self._device_decode is None else self._device_decode.capture()

    def can_run_ahead(self, reqs: list[Req]) -> bool:
        """Whether a decode step of ``reqs`` may be launched before the last step's result is known."""
        return self._device_decode is not None and self._device_decode.can_run_ahead(reqs)

    def state_digest(self, req: Req) -> str | None:
        """Digest of the request's recurrent state as of the last step; waits for the device."""
        return state_digest(self._runner.req_pool.mamba_pool, req.kv)

    @torch.inference_mode()
    def decode(self, plan: DecodePlan) -> PendingStep:
        """Advance every request by one token, or by what the target accepts of its drafts."""
        if self._device_decode is not None and self._device_decode.covers(plan.reqs):
            return self._device_decode.launch(plan)
        return self._host_decode.run(plan)

    @torch.inference_mode()
    def prefill(self, plan: PrefillPlan) -> PrefillStep:
        """Run prompt rows; sample the first token of every request whose last chunk this is."""
        chunks, device = plan.chunks, self._device
        row_index, spans = _wanted_rows(chunks)
        capture, taps = CaptureHiddenMode.NULL, ()
        if self._drafter is not None:
            capture, taps = self._drafter.capture_hidden, self._drafter.capture_layer_ids
        fb = make_forward_batch(
            ForwardMode.EXTEND,
            req_pool=self._runner.req_pool,
            rows=[c.req.req_pool_idx for c in chunks],
            prefix_lens=[c.start for c in chunks],
            query_lens=[c.end - c.start for c in chunks],
            input_ids=upload_ids([t for c in chunks for t in c.token_ids[c.start : c.end]], device),
            logits_rows=upload_ids(row_index, device),
            track_slots=[c.track_slot for c in chunks],
            track_rows=[c.track_rows for c in chunks],
            capture_hidden=capture,
            capture_layer_ids=taps,
        )
        output = self._runner.forward(fb)
        next_ids = upload_ids([c.next_token or 0 for c in chunks], device)
        last = [i for i, c in enumerate(chunks) if c.is_last]
        if last:
            # Indexing copies, so the edits before a choice leave the rows to score alone.
            ends = upload_ids([spans[i].stop - 1 for i in last], device)
            own = output.scores[ends].float()
            sampled = sample_next([chunks[i].req for i in last], own)
            next_ids[upload_ids(last, device)] = sampled
        if self._drafter is not None:
            self._drafter.after_prefill(fb, output, next_ids)
        if self._device_decode is not None:
            self._device_decode.state.set(
                fb.req_pool_indices, fb.prefix_lens + fb.query_lens, next_ids
            )
        return PrefillStep(
            chunks=chunks,
            spans=spans,
            next_ids=_to_host(next_ids) if last else None,
            logits=output.logits if any(c.req.return_logprob for c in chunks) else None,
            fence=Fence(device),
        )


@dataclass
class PrefillStep:
    """A launched prefill. All but sampled tokens and log probabilities is known from the plan."""

    chunks: list[PrefillChunk]
    spans: list[range]
    next_ids: Tensor | None
    logits: Tensor | None
    fence: Fence

    @property
    def tracked(self) -> list[int]:
        """Length of the boundary state that each chunk stores, or -1."""
        return [c.start + c.track_rows if c.track_slot >= 0 else -1 for c in self.chunks]

    def result(self) -> StepResult:
        """Waits for the device, also where nothing was sampled: that bounds the chunks in its queue."""
        self.fence.wait()
        sampled = self.next_ids.tolist() if self.next_ids is not None else []
        pairs = list(zip(self.chunks, self.spans, strict=True))
        return StepResult(
            token_ids=[[sampled[i]] if c.is_last else [] for i, c in enumerate(self.chunks)],
            committed=[c.end - c.start for c in self.chunks],
            tracked=self.tracked,
            logprobs=[
                self._token_logprobs(c, span, sampled[i]) if c.is_last else None
                for i, (c, span) in enumerate(pairs)
            ],
            input_logprobs=[self._prompt_logprobs(c, span) for c, span in pairs],
        )

    def _token_logprobs(
        self, chunk: PrefillChunk, span: range, token: int
    ) -> list[TokenLogprob] | None:
        if self.logits is None:
            return None
        return output_logprobs(chunk.req, self.logits[span.stop - 1 : span.stop], [token])

    def _prompt_logprobs(self, chunk: PrefillChunk, span: range) -> list[TokenLogprob] | None:
        first = _first_scored_position(chunk)
        if first is None or self.logits is None:
            return None
        ids = chunk.token_ids[first : min(chunk.end + 1, len(chunk.token_ids))]
        return output_logprobs(chunk.req, self.logits[span.start : span.start + len(ids)], ids)


def _to_host(values: Tensor) -> Tensor:
    """A copy in pinned memory, complete once the device has come this far."""
    if values.device.type != "cuda":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


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
