"""A scheduler without a model, for tests of the front end: ids come from a rule.

Run as `python -m sglang.test.fake_scheduler`; it speaks the protocol of the real one. The k-th id
of a request is the k-th prompt id, again and again ("echo"). SGLANG_FAKE_SCHEDULER holds options
as JSON: see `FakeOptions`. Special prompts are none; special behaviour is chosen by `priority`:
    priority -7  the process dies (exit code 3) when the request arrives
    priority -8  the request is refused with status 400 and a reason that names `json_schema`
    priority -9  the request is refused with status 503
    priority -10 the process stops answering anything (it hangs)
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field

import zmq

from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import (
    BatchTokenIDOutput,
    FinishReason,
    SchedulerStats,
    TokenizedGenerateReqInput,
    TokenLogprob,
    TokenOutput,
    decode_to_scheduler,
    encode_message,
)
from sglang.srt.managers.parent_watch import die_with_parent
from sglang.srt.managers.tokenizer import Tokenizer


@dataclass
class FakeOptions:
    """load_s: seconds before ready; step_s: seconds a step takes; width: ids per step and request;
    max_req_input_len: longest prompt; fail: a message to die with instead of getting ready;
    script: ids to answer with instead of the echo."""

    load_s: float = 0.0
    step_s: float = 0.0
    width: int = 1
    max_req_input_len: int = 63
    fail: str = ""
    script: list[int] = field(default_factory=list)


@dataclass
class _Running:
    message: TokenizedGenerateReqInput
    produced: list[int] = field(default_factory=list)


class FakeScheduler:
    """Runs everything it gets at once; counts what it was asked."""

    def __init__(self, options: FakeOptions, tokenizer: Tokenizer, recv: str, send: str) -> None:
        self.options = options
        self.tokenizer = tokenizer
        self.running: dict[str, _Running] = {}
        self.counts = {"requests": 0, "aborts": 0, "finished": 0, "flushes": 0, "steps": 0}
        self.seen: list[dict] = []
        context = zmq.Context()
        self.inbox = context.socket(zmq.PULL)
        self.outbox = context.socket(zmq.PUSH)
        self.outbox.setsockopt(zmq.LINGER, 1000)
        self.inbox.connect(recv)
        self.outbox.connect(send)

    def send(self, message: io_struct.FromScheduler) -> None:
        self.outbox.send(encode_message(message))

    def serve(self) -> None:
        """Answer until asked to leave."""
        while True:
            timeout_ms = 0 if self.running else 1000
            while self.inbox.poll(timeout_ms):
                timeout_ms = 0
                if not self.take(decode_to_scheduler(self.inbox.recv())):
                    return
            if self.running:
                self.step()

    def take(self, message: io_struct.ToScheduler) -> bool:
        """Handle one message; False to leave."""
        if isinstance(message, TokenizedGenerateReqInput):
            self.admit(message)
        elif isinstance(message, io_struct.AbortReq):
            rids = list(self.running) if message.abort_all else [message.rid]
            for rid in rids:
                self.abort(rid)
        elif isinstance(message, io_struct.FlushCacheReqInput):
            self.counts["flushes"] += 1
            busy = bool(self.running)
            text = f"{len(self.running)} requests are running" if busy else ""
            self.send(io_struct.FlushCacheReqOutput(message.req_id, not busy, text))
        elif isinstance(message, io_struct.GetInternalStateReq):
            state = {**self.counts, "num_running": len(self.running), "seen": self.seen[-8:]}
            self.send(io_struct.GetInternalStateReqOutput(message.req_id, state))
        elif isinstance(message, io_struct.HealthCheckReq):
            self.send(io_struct.HealthCheckOutput(message.req_id))
        else:
            return False
        return True

    def admit(self, message: TokenizedGenerateReqInput) -> None:
        self.counts["requests"] += 1
        params = message.sampling_params
        self.seen.append(json.loads(io_struct.msgspec.json.encode(params)))
        if message.priority == -7:
            os._exit(3)
        if message.priority == -10:
            time.sleep(3600)
        refusals = {
            -8: FinishReason("abort", None, "json_schema is not supported here", 400),
            -9: FinishReason("abort", None, "the queue is full", 503),
        }
        if message.priority in refusals:
            reason = refusals[message.priority]
            self.send(BatchTokenIDOutput([TokenOutput(message.rid, [], reason)]))
            return
        self.running[message.rid] = _Running(message)

    def abort(self, rid: str) -> None:
        job = self.running.pop(rid, None)
        if job is not None:
            self.counts["aborts"] += 1
            reason = FinishReason("abort", None, "aborted")
            self.send(BatchTokenIDOutput([self.output(job, [], reason)]))

    def step(self) -> None:
        """One step: `width` ids for each request."""
        time.sleep(self.options.step_s)
        self.counts["steps"] += 1
        items = []
        for rid, job in list(self.running.items()):
            new, reason = self.advance(job)
            items.append(self.output(job, new, reason))
            if reason is not None:
                self.counts["finished"] += 1
                del self.running[rid]
        stats = SchedulerStats(
            num_running_reqs=len(self.running), max_total_num_tokens=4096, gen_throughput=1.0
        )
        self.send(BatchTokenIDOutput(items, stats))

    def advance(self, job: _Running) -> tuple[list[int], FinishReason | None]:
        new: list[int] = []
        for _ in range(self.options.width):
            source = self.options.script or job.message.input_ids
            new.append(source[len(job.produced) % len(source)])
            job.produced.append(new[-1])
            reason = self.finish_reason(job)
            if reason is not None:
                return new, reason
        return new, None

    def finish_reason(self, job: _Running) -> FinishReason | None:
        params = job.message.sampling_params
        if len(job.produced) >= params.min_new_tokens:
            if job.produced[-1] in (params.stop_token_ids or ()):
                return FinishReason("stop", job.produced[-1])
            text = self.tokenizer.decode(job.produced, params.skip_special_tokens)
            for stop in params.stop or ():
                if stop in text:
                    return FinishReason("stop", stop)
        if len(job.produced) >= (params.max_new_tokens or 1):
            return FinishReason("length", params.max_new_tokens)
        return None

    def output(self, job: _Running, new: list[int], reason: FinishReason | None) -> TokenOutput:
        message, count = job.message, len(job.produced)
        out = TokenOutput(
            rid=message.rid,
            new_token_ids=new,
            finish_reason=reason,
            prompt_tokens=len(message.input_ids),
            completion_tokens=count,
            cached_tokens=1 if len(message.input_ids) > 4 else 0,
            spec_verify_ct=count - 1 if self.options.width > 1 else 0,
            spec_accepted_tokens=count - 1 if self.options.width > 1 else 0,
            queue_time_s=0.001,
        )
        if message.return_logprob:
            out.output_logprobs = [self.logprob(message, token, -0.5) for token in new]
            if message.logprob_start_len >= 0 and count == len(new):
                prompt = message.input_ids
                out.input_logprobs = [
                    self.logprob(message, prompt[at], None if at == 0 else -1.0)
                    for at in range(message.logprob_start_len, len(prompt))
                ]
        return out

    def logprob(
        self, message: TokenizedGenerateReqInput, token: int, value: float | None
    ) -> TokenLogprob:
        num_top = message.top_logprobs_num if value is not None else 0
        top = [(-0.5 - rank, (token + rank) % 256) for rank in range(num_top)]
        wanted = message.token_ids_logprob
        selected = None if wanted is None else [(-2.0, token_id) for token_id in wanted]
        return TokenLogprob(value, token, top or None, selected)


def main() -> None:
    """Read the first line, get ready, serve."""
    first = json.loads(sys.stdin.readline())
    die_with_parent(first["parent_pid"])
    options = FakeOptions(**json.loads(os.environ.get("SGLANG_FAKE_SCHEDULER", "{}")))
    args = first["server_args"]
    tokenizer = Tokenizer(args["tokenizer_path"] or args["model_path"])
    scheduler = FakeScheduler(options, tokenizer, first["recv_endpoint"], first["send_endpoint"])
    time.sleep(options.load_s)
    if options.fail:
        scheduler.send(io_struct.FatalErrorOutput(options.fail))
        time.sleep(0.2)
        raise SystemExit(4)
    info = {
        "max_req_input_len": options.max_req_input_len,
        "max_total_num_tokens": 4096,
        "max_running_requests": 8,
        "context_length": 128,
    }
    scheduler.send(io_struct.ReadyOutput(info))
    scheduler.serve()


if __name__ == "__main__":
    main()
