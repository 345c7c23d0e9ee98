"""Tokenizes requests, hands them to the scheduler and routes its outputs back."""

from __future__ import annotations

import asyncio
import collections
import json
import logging
import re
import time
import uuid
from typing import Any, Protocol

import msgspec

from sglang.srt.managers import io_struct
from sglang.srt.managers.errors import RequestError, unavailable
from sglang.srt.managers.front_end_config import FrontEndConfig
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    FromScheduler,
    SchedulerStats,
    TokenizedGenerateReqInput,
    TokenOutput,
    ToScheduler,
)
from sglang.srt.managers.metrics import ServerMetrics
from sglang.srt.managers.request_preparer import RequestPreparer
from sglang.srt.managers.request_state import GenerateReqInput, ReqState, RequestGroup
from sglang.srt.managers.tokenizer import NoTokenizer, Tokenizer
from sglang.srt.sampling.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_FIRST_WORD = re.compile(r"\w+")
_NAMED_FIELDS = frozenset(
    {*SamplingParams.__struct_fields__, *TokenizedGenerateReqInput.__struct_fields__}
)


class Link(Protocol):
    """The way to the scheduler."""

    def send(self, message: ToScheduler) -> None:
        """Queue one message; never blocks."""


def new_rid() -> str:
    """A fresh request id."""
    return uuid.uuid4().hex


class TokenizerManager:
    """Owner of the table of running requests. All methods belong to the event-loop thread.

    `info` is the scheduler's ReadyOutput, {} until then; `stats` its latest figures.
    """

    def __init__(
        self, config: FrontEndConfig, tokenizer: Tokenizer | NoTokenizer, link: Link
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.metrics = ServerMetrics(config.served_model_name)
        self.info: dict[str, Any] = {}
        self.stats = SchedulerStats()
        self.last_seen = time.monotonic()
        self.refusal: RequestError | None = unavailable("the model is still loading")
        self._preparer = RequestPreparer(config, tokenizer)
        self._link = link
        self._running: dict[str, tuple[ReqState, RequestGroup]] = {}
        self._leaving: collections.Counter[str] = collections.Counter()
        self._calls: dict[str, asyncio.Future[Any]] = {}

    # --- requests -------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Sequences not yet ended."""
        return len(self._running)

    def sampling_params(
        self, given: dict[str, Any], *, field_names: dict[str, str] | None = None
    ) -> SamplingParams:
        """Parameters from native names and values; the model's defaults fill what is unset.

        Raises: RequestError 400 for a wrong type, naming the field as the client knows it.
        """
        merged = {**self.config.sampling_defaults, **given}
        try:
            return msgspec.convert(merged, SamplingParams)
        except msgspec.ValidationError as error:
            raise _type_error(str(error), field_names or {}) from error

    def is_running(self, rid: str) -> bool:
        """Whether a sequence with this id has not ended."""
        return rid in self._running

    async def start(self, rid: str, inputs: list[GenerateReqInput]) -> RequestGroup:
        """Check all, then send all: a fault in one means that none has started.

        Raises: RequestError.
        """
        if self.refusal is None:
            await self._preparer.encode_long_texts(inputs)
        if self.refusal is not None:
            raise self.refusal
        self._check_queue(len(inputs))
        self._check_rids([obj.rid for obj in inputs])
        prepared = [self._preparer.prepare(obj, at) for at, obj in enumerate(inputs)]
        group = RequestGroup(rid, [state for state, _ in prepared], abandon=self._abandon)
        for state, _ in prepared:
            self._running[state.rid] = (state, group)
        for _, message in prepared:
            self._link.send(message)
        return group

    def abort(self, *, rid: str = "", abort_all: bool = False) -> None:
        """Ask the scheduler to end requests; they end with finish type "abort"."""
        if abort_all:
            self._link.send(AbortReq(abort_all=True, reason="aborted by request"))
            return
        for state, group in list(self._running.values()):
            if rid in (state.rid, group.rid):
                self._link.send(AbortReq(state.rid, reason="aborted by request"))

    def _abandon(self, group: RequestGroup) -> None:
        """Forget the group's sequences; those still running are aborted."""
        for state in group.states:
            if self._running.pop(state.rid, None) is not None and not state.is_done:
                self._send_abort(state.rid, "the client went away")
                self._report_end(state)

    def _send_abort(self, rid: str, reason: str) -> None:
        """Abort a sequence that is no longer in the table. What the scheduler still says of it, up
        to its end, must not reach a new request with the same rid."""
        self._leaving[rid] += 1
        self._link.send(AbortReq(rid, reason=reason))

    def fail_all(self, error: RequestError) -> None:
        """End every request and call with `error`, and refuse new ones with it."""
        self.refusal = error
        running, self._running = self._running, {}
        for state, group in running.values():
            state.error = error
            group.notify(state)
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.done():
                call.set_exception(error)

    def _check_rids(self, rids: list[str]) -> None:
        if len(set(rids)) != len(rids):
            raise RequestError("the rids of one request must differ", param="rid")
        taken = next((rid for rid in rids if rid in self._running), None)
        if taken is not None:
            raise RequestError(f"rid {taken!r} is already running", param="rid")

    def _check_queue(self, num_new: int) -> None:
        limit = self.config.max_queued_requests
        if limit is None:
            return
        capacity = limit + int(self.info.get("max_running_requests", 0))
        if self.num_running + num_new > capacity:
            raise unavailable(
                f"the queue is full: {self.num_running} requests are running or waiting, "
                f"--max-queued-requests allows {capacity} in total",
                code="queue_full",
                retry_after_s=1,
            )

    # --- the scheduler's side -------------------------------------------------------------

    async def call(self, kind: type, *, timeout_s: float) -> Any:
        """Send `kind(req_id)` and wait for the answer with that id.

        Raises: RequestError 503 when there is none in time.
        """
        if self.refusal is not None and not self.info:
            raise self.refusal
        req_id = new_rid()
        future = asyncio.get_running_loop().create_future()
        self._calls[req_id] = future
        try:
            self._link.send(kind(req_id))
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise unavailable(f"the scheduler gave no answer within {timeout_s:g} s") from None
        finally:
            self._calls.pop(req_id, None)

    def handle(self, message: FromScheduler) -> None:
        """Take one message from the scheduler."""
        self.last_seen = time.monotonic()
        if isinstance(message, BatchTokenIDOutput):
            for out in message.items:
                try:
                    self._handle_output(out, self.last_seen)
                except Exception:  # a fault in one request must not reach the others
                    logger.exception("request %r failed in the front end", out.rid)
                    self._fail(out)
            if message.stats is not None:
                self.stats = message.stats
                self.metrics.on_stats(message.stats)
        elif isinstance(message, io_struct.ReadyOutput):
            self.info = message.info
            self._preparer.limit_prompt(int(message.info["max_req_input_len"]))
            self.refusal = None
        elif isinstance(message, io_struct.FatalErrorOutput):
            self.fail_all(unavailable(f"the scheduler stopped: {message.message}"))
        else:
            future = self._calls.pop(message.req_id, None)
            if future is not None and not future.done():
                future.set_result(message)

    def _handle_output(self, out: TokenOutput, now: float) -> None:
        if self._is_of_one_that_left(out):
            return
        entry = self._running.get(out.rid)
        if entry is None:
            return
        state, group = entry
        state.update(out)
        if out.new_token_ids and not (state.scoring_only or state.is_probe):
            self._measure(state, out, now)
        if state.finish_reason is not None:
            state.finished_at = now
            state.error = _refused(state)
            self._report_end(state)
            del self._running[out.rid]
        group.notify(state)

    def _is_of_one_that_left(self, out: TokenOutput) -> bool:
        left = self._leaving.get(out.rid, 0)
        if left and out.finish_reason is not None:
            self._leaving[out.rid] = left - 1
            if left == 1:
                del self._leaving[out.rid]
        return left > 0

    def _report_end(self, state: ReqState) -> None:
        """Count and log a request that ended, or that its client left."""
        if state.is_probe:
            return
        reason = state.finish_reason
        aborted = reason is None or reason.type == "abort"
        self.metrics.on_end(seconds=state.e2e_latency_s, aborted=aborted)
        if self.config.log_requests:
            logger.info("request %s", json.dumps(_summary(state)))

    def _fail(self, out: TokenOutput) -> None:
        """End the request of `out` with a 500, here and in the scheduler."""
        state, group = self._running.pop(out.rid)
        state.error = RequestError("internal error; the server's log has the details", status=500)
        if out.finish_reason is None:
            self._send_abort(out.rid, "internal error")
        group.notify(state)

    def _measure(self, state: ReqState, out: TokenOutput, now: float) -> None:
        num_new = len(out.new_token_ids)
        if state.last_token_at is None:
            state.first_token_at = now
            self.metrics.on_first_token(
                seconds=now - state.created,
                queue_seconds=out.queue_time_s,
                prompt_tokens=state.prompt_tokens,
                cached_tokens=state.cached_tokens,
            )
            self.metrics.on_tokens(num_new, None)
        else:
            self.metrics.on_tokens(num_new, (now - state.last_token_at) / num_new)
        state.last_token_at = now


def _refused(state: ReqState) -> RequestError | None:
    """The error of a request that the scheduler refused before its first token."""
    reason = state.finish_reason
    if reason is None or reason.type != "abort" or reason.status_code in (None, 499):
        return None
    if state.output_ids and reason.status_code < 500:
        return None
    message = reason.message or "the scheduler refused the request"
    native = _FIRST_WORD.match(message)
    param = None
    if native is not None and native.group() in _NAMED_FIELDS:
        param = state.field_names.get(native.group(), native.group())
        message = param + message[native.end() :]
    return RequestError(
        message,
        status=reason.status_code,
        code="refused" if reason.status_code < 500 else "unavailable",
        param=param,
        retry_after_s=1 if reason.status_code in (429, 503) else None,
    )


def _summary(state: ReqState) -> dict[str, Any]:
    """One finished request for the log: sizes, times and how it ended; never its text."""
    reason = state.finish_reason
    first = state.first_token_at
    return {
        "rid": state.rid,
        "prompt_tokens": state.prompt_tokens,
        "completion_tokens": state.completion_tokens,
        "cached_tokens": state.cached_tokens,
        "finish_reason": None if reason is None else reason.type,
        "matched": None if reason is None else reason.matched,
        "first_token_s": None if first is None else round(first - state.created, 6),
        "e2e_s": round(state.e2e_latency_s, 6),
        "spec_verify_ct": state.spec_verify_ct,
        "spec_accepted_tokens": state.spec_accepted_tokens,
    }


def _type_error(text: str, field_names: dict[str, str]) -> RequestError:
    """msgspec says what is wrong and, as `$.name`, where."""
    what, _, where = text.partition(" - at `$.")
    native = where.rstrip("`").split("[")[0].split(".")[0]
    if not native and "`" in what:
        native = what.split("`")[1]
    name = field_names.get(native, native)
    return RequestError(f"{name}: {what}" if name else what, param=name or None)
