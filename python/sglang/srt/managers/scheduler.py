"""The scheduler: decides what runs, and is the only one that moves a request forward.

One iteration is ``step``: admit and launch a prefill, else launch a decode, then take in what a
launched step produced, and publish. A prefill runs before a decode whenever a waiting request fits
(first tokens early); both kinds are bounded, the one by the chunk size, the other by the running set.

With overlap the step that is taken in is the one before: the device works on the new step meanwhile.
A decode is launched on an unknown outcome only if nothing but the device needs to know it; everything
else waits for the outcome first, so results are those of one step at a time. A request that turns out
to have ended is in one step more, whose rows for it are dropped; what that step writes goes to memory
that the request held, before anybody whom that memory is given to next can write.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    FinishReason,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    FromScheduler,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    HealthCheckOutput,
    HealthCheckReq,
    ShutdownReq,
    TokenizedGenerateReqInput,
    TokenLogprob,
    TokenOutput,
    ToScheduler,
)
from sglang.srt.managers.request_factory import RequestFactory
from sglang.srt.managers.schedule_batch import (
    DecodePlan,
    PrefillChunk,
    PrefillPlan,
    Req,
    StepResult,
)
from sglang.srt.managers.schedule_policy import PrefillPolicy
from sglang.srt.managers.scheduler_metrics import SchedulerMetrics
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.request_memory import RequestMemory

logger = logging.getLogger(__name__)

Send = Callable[[FromScheduler], None]


class Scheduler:
    """Owns the waiting, prefilling and running requests of one engine."""

    def __init__(
        self,
        *,
        worker: TpModelWorker,
        memory: RequestMemory,
        policy: PrefillPolicy,
        factory: RequestFactory,
        metrics: SchedulerMetrics,
        max_queued_requests: int | None,
        stream_interval: int,
        overlap: bool,
        send: Send,
        internal_state: Callable[[], dict],
    ) -> None:
        self._worker = worker
        self._memory = memory
        self._policy = policy
        self._factory = factory
        self.metrics = metrics
        self._max_queued_requests = max_queued_requests
        self._stream_interval = stream_interval
        self._overlap = overlap
        self._pending: _Launched | None = None
        self._send = send
        self._internal_state = internal_state
        self.waiting: list[Req] = []
        self.prefilling: list[Req] = []
        self.running: list[Req] = []
        self.stopping = False

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.prefilling or self.running or self._pending)

    def step(self) -> None:
        """Launch one prefill or decode step and take in one; do nothing when idle."""
        busy = bool(self.running) or self._pending is not None
        launched: _Launched | None = self._launch_prefill()
        if launched is None and self.running:
            launched = self._launch_decode()
        if launched is None and not busy:
            self._help_stuck()
        before, self._pending = self._pending, launched
        if before is not None:
            self._take_in(before)
        if not self._overlap or (launched is not None and launched.is_over):
            self._settle()

    def _settle(self) -> None:
        """Take in the step in flight, if there is one."""
        before, self._pending = self._pending, None
        if before is not None:
            self._take_in(before)

    def _take_in(self, launched: _Launched) -> None:
        for req in launched.reqs:
            req.num_in_flight -= 1
        launched.take_in()

    def _help_stuck(self) -> None:
        """Nothing runs and nothing can be launched, although requests may be there."""
        if self.prefilling:
            self._retract(self.prefilling[-1], self.prefilling)
        elif self.waiting:
            self._refuse_unservable(self.waiting[0])

    def handle(self, message: ToScheduler) -> None:
        """Act on one message of the front end."""
        match message:
            case TokenizedGenerateReqInput():
                self._enqueue(message)
            case AbortReq():
                self._abort(message)
            case FlushCacheReqInput():
                self._flush(message)
            case GetInternalStateReq():
                state = {**self._internal_state(), **self.metrics.internal_state(self)}
                self._send(GetInternalStateReqOutput(req_id=message.req_id, state=state))
            case HealthCheckReq():
                self._send(HealthCheckOutput(req_id=message.req_id))
            case ShutdownReq():
                self.stopping = True

    def check_integrity(self) -> None:
        """Raise when a pool does not add up; called when idle."""
        self._memory.check_integrity()

    def _enqueue(self, message: TokenizedGenerateReqInput) -> None:
        limit = self._max_queued_requests
        if limit is not None and len(self.waiting) >= limit:
            self._refuse(message.rid, f"the queue is full ({limit} requests); try again", 503)
            return
        try:
            req = self._factory.build(message)
        except ValueError as error:
            self._refuse(message.rid, str(error), 400)
            return
        self._policy.add(self.waiting, req)

    def _refuse(self, rid: str, message: str, status_code: int) -> None:
        reason = FinishReason(type="abort", message=message, status_code=status_code)
        output = TokenOutput(rid=rid, new_token_ids=[], finish_reason=reason)
        self._send(BatchTokenIDOutput(items=[output]))

    def _refuse_unservable(self, req: Req) -> None:
        self.waiting.remove(req)
        self._refuse(
            req.rid,
            f"the request's {req.num_tokens} tokens do not fit the KV cache even when it is alone "
            f"({self._memory.available_tokens()} tokens available); shorten the prompt or raise "
            "--mem-fraction-static / --max-total-tokens",
            400,
        )

    def _abort(self, message: AbortReq) -> None:
        def hits(group: list[Req]) -> list[Req]:
            if message.abort_all:
                return list(group)
            first = next((req for req in group if req.rid == message.rid), None)
            return [] if first is None else [first]

        reason = FinishReason(
            type="abort", message=message.reason or "aborted by the client", status_code=499
        )
        for req in hits(self.waiting):
            self.waiting.remove(req)
            self._finish_aborted(req, reason)
        for group in (self.prefilling, self.running):
            for req in hits(group):
                group.remove(req)
                self._memory.release(req)
                self._finish_aborted(req, reason)

    def _finish_aborted(self, req: Req, reason: FinishReason) -> None:
        req.finish_reason = reason
        self.metrics.num_aborted += 1
        self._publish([req])

    def _flush(self, message: FlushCacheReqInput) -> None:
        busy = len(self.waiting) + len(self.prefilling) + len(self.running)
        if busy:
            text = f"{busy} requests are running or queued; flush when the server is idle"
            self._send(FlushCacheReqOutput(req_id=message.req_id, success=False, message=text))
            return
        self._settle()  # a step may still run whose requests have all ended
        done = self._memory.flush()
        self.metrics.reset_cache_counters()
        self._send(FlushCacheReqOutput(req_id=message.req_id, success=done))

    # -- prefill -----------------------------------------------------------------------------

    def _launch_prefill(self) -> _Launched | None:
        """Start the next chunks. All but their sampled tokens is known now and takes effect now."""
        if not (self.waiting or self.prefilling):
            return None
        chunks, admitted = self._policy.plan(self.waiting, self.prefilling, self.running)
        if not chunks:
            return None
        for req in admitted:
            self.waiting.remove(req)
            self.prefilling.append(req)
            self.metrics.note_admission(req)
        plan = PrefillPlan(chunks)
        started = time.monotonic()
        step = self._worker.prefill(plan)
        for chunk, tracked in zip(chunks, step.tracked, strict=True):
            req = chunk.req
            req.num_in_flight += 1
            req.kv.committed_len = chunk.end
            if tracked >= 0:
                self._memory.note_track(req, tracked)
            self._memory.cache_unfinished(req, chunk.token_ids[: chunk.end])
            if chunk.is_last:
                self.prefilling.remove(req)
                self.running.append(req)

        def take_in() -> None:
            self._take_in_prefill(chunks, step.result())
            self.metrics.note_prefill(self, plan, admitted, time.monotonic() - started)
            self._publish([c.req for c in chunks if c.is_last and c.req in self.running])

        return _Launched([c.req for c in chunks], take_in)

    def _take_in_prefill(self, chunks: list[PrefillChunk], result: StepResult) -> None:
        for i, chunk in enumerate(chunks):
            if chunk.req.finish_reason is None:
                chunk.req.input_logprobs += result.input_logprobs[i] or []
                self._append(chunk.req, result, i)

    # -- decode ------------------------------------------------------------------------------

    def _launch_decode(self) -> _Launched | None:
        width = self._worker.draft_token_num
        is_ahead = self._pending is not None and self._worker.can_run_ahead(self.running)
        if not is_ahead or not self._reserve(width):
            self._settle()
            self._make_room(width)
        reqs = [r for r in self.running if not _ends_in_flight(r)]
        if not reqs:
            return None
        plan = DecodePlan(
            reqs=reqs,
            draft_token_num=width,
            track_slots=[
                self._memory.track_slot_for_decode(
                    r, width * (1 + r.num_in_flight), is_ahead=r.num_in_flight > 0
                )
                for r in reqs
            ],
        )
        step = self._worker.decode(plan)
        for req in reqs:
            req.num_in_flight += 1

        def take_in() -> None:
            wanted = [i for i, r in enumerate(reqs) if r.finish_reason is None]
            result, own = step.result().of(wanted), [reqs[i] for i in wanted]
            self._take_in_decode(own, result, verified=width > 1)
            self.metrics.note_decode(self, own, result)
            self._publish(own)

        return _Launched(reqs, take_in, is_over=isinstance(step, StepResult))

    def _take_in_decode(self, reqs: list[Req], result: StepResult, *, verified: bool) -> None:
        """Move requests forward by what a step produced: lengths, tracks, tokens, finish."""
        for i, req in enumerate(reqs):
            req.kv.committed_len += result.committed[i]
            if result.tracked[i] >= 0:
                self._memory.note_track(req, result.tracked[i])
            if verified:
                req.spec_verify_ct += 1
                req.spec_correct_ct += result.committed[i] - 1
            self._append(req, result, i)

    def _reserve(self, width: int) -> bool:
        """Pages for what is in flight and one more step of every running request, or none at all."""
        reqs = self.running
        return self._memory.ensure_many(reqs, [_reach(r, width) for r in reqs])

    def _make_room(self, width: int) -> None:
        """Reserve pages for one step, retracting the newest requests if needed; none is in flight."""
        if self._reserve(width):
            return
        for req in list(self.running):
            while req in self.running and not self._memory.ensure(req, _reach(req, width)):
                victim = max(self.running, key=lambda r: (-r.priority, r.arrival))
                self._retract(victim, self.running)

    def _retract(self, req: Req, group: list[Req]) -> None:
        """Take a request's memory and put it back in the queue; it loses and repeats nothing."""
        group.remove(req)
        self._memory.retract(req, req.token_ids()[: req.kv.committed_len])
        if not req.output_ids:
            req.input_logprobs.clear()  # the prompt will be scored again from the start
        req.num_retractions += 1
        self.metrics.num_retracted += 1
        logger.warning(
            "KV cache is full: request %s (%d tokens) goes back to the queue",
            req.rid,
            req.num_tokens,
        )
        self.waiting.append(req)
        self._policy.order(self.waiting)

    # -- tokens out ----------------------------------------------------------------------------

    @staticmethod
    def _append(req: Req, result: StepResult, i: int) -> None:
        """Append the new tokens of request i of a step, as far as it may go on."""
        kept = req.append(result.token_ids[i])
        logprobs = result.logprobs[i]
        if logprobs is not None:
            req.output_logprobs += logprobs[:kept]

    def _publish(self, reqs: list[Req]) -> None:
        """Send new tokens; free what has finished."""
        items = []
        for req in reqs:
            finished = req.finish_reason is not None
            pending = len(req.output_ids) - req.num_sent
            if not finished and pending < self._stream_interval:
                continue
            items.append(self._take_output(req))
            if finished and req in self.running:
                self.running.remove(req)
                self._finish(req)
        if items:
            self._send(BatchTokenIDOutput(items=items, stats=self.metrics.stats(self)))

    def _finish(self, req: Req) -> None:
        """Donate to the prefix cache what is final and visible, free the rest."""
        self.metrics.num_finished += 1
        final = min(req.kv.committed_len, req.num_tokens)
        self._memory.finish(req, req.token_ids()[:final])

    def _take_output(self, req: Req) -> TokenOutput:
        first = req.num_sent == 0
        new_ids = req.output_ids[req.num_sent :]
        req.num_sent = len(req.output_ids)
        output_logprobs, req.output_logprobs = req.output_logprobs, []
        input_logprobs = None
        if first and req.return_logprob and req.logprob_start_len >= 0:
            input_logprobs = req.input_logprobs
            if req.logprob_start_len == 0:
                head = TokenLogprob(logprob=None, token_id=req.origin_input_ids[0])
                input_logprobs = [head, *input_logprobs]
        return TokenOutput(
            rid=req.rid,
            new_token_ids=new_ids,
            finish_reason=req.finish_reason,
            prompt_tokens=len(req.origin_input_ids),
            completion_tokens=len(req.output_ids),
            cached_tokens=req.cached_tokens,
            spec_verify_ct=req.spec_verify_ct,
            spec_accepted_tokens=req.spec_correct_ct + req.spec_verify_ct,
            output_logprobs=output_logprobs if req.return_logprob else None,
            input_logprobs=input_logprobs,
            queue_time_s=req.queue_time_s if first else None,
            state_digest=self._worker.state_digest(req) if self._wants_digest(req) else None,
        )

    @staticmethod
    def _wants_digest(req: Req) -> bool:
        """True for the last output, while the request still holds its memory."""
        return req.return_state_digest and req.finish_reason is not None and req.kv.holds_mamba


@dataclass
class _Launched:
    """A step in flight: whose it is, and what to do once its outcome is wanted.

    ``is_over``: the host led it, so its outcome is at hand and the device alone does not know it.
    """

    reqs: list[Req]
    take_in: Callable[[], None]
    is_over: bool = False


def _reach(req: Req, width: int) -> int:
    """Positions below this are written at most by the steps in flight and one more."""
    return req.kv.committed_len + width * (1 + req.num_in_flight)


def _ends_in_flight(req: Req) -> bool:
    """Every step yields a token, so a request that wants no more than those in flight is done."""
    return req.num_in_flight > 0 and req.remaining_new_tokens <= req.num_in_flight
