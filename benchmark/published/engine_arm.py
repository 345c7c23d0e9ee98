"""One arm as an engine in this process: scheduler and model without sockets."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from setups import Workload

from sglang.srt.managers.io_struct import BatchTokenIDOutput, FromScheduler


@dataclass
class Turn:
    """One run of one arm. TTFT and TPOT are means over requests, which all start together."""

    arm: str
    workload: str
    seconds: float
    seconds_until_all_prompts_are_in: float
    steps: int
    input_tokens: int
    output_tokens: int
    output_rate: float
    mean_ttft_s: float
    mean_tpot_ms: float
    most_running: int
    accept_length: float
    retractions: int
    max_total_num_tokens: int
    verify_scratch_bytes: int
    verify_ssm_scratch_bytes: int


@dataclass
class _Received:
    """What the requests of a run have been sent, by request id; times on the monotonic clock."""

    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)

    def note(self, message: FromScheduler) -> None:
        if not isinstance(message, BatchTokenIDOutput):
            return
        now = time.monotonic()
        for item in message.items:
            self.first.setdefault(item.rid, now)
            self.last[item.rid] = now
            self.tokens[item.rid] = self.tokens.get(item.rid, 0) + len(item.new_token_ids)
            if item.finish_reason is not None and item.finish_reason.type == "abort":
                self.refusals.append(str(item.finish_reason.message))

    def check(self, workload: Workload) -> None:
        """Raises: ValueError if a request was refused or did not get all of its tokens."""
        if self.refusals:
            raise ValueError(f"{workload.name}: {len(self.refusals)} refused: {self.refusals[0]}")
        wrong = [n for n in self.tokens.values() if n != workload.output_len]
        if wrong or len(self.tokens) != workload.requests:
            raise ValueError(
                f"{workload.name}: {len(self.tokens)} of {workload.requests} requests answered, "
                f"{len(wrong)} of them not with {workload.output_len} tokens"
            )

    def tpot_ms(self) -> float:
        each = [
            (self.last[rid] - self.first[rid]) / (count - 1)
            for rid, count in self.tokens.items()
            if count > 1
        ]
        return 1000 * statistics.fmean(each) if each else 0.0


class EngineArm:
    """One engine. ``close`` gives its memory back before the next one is built.

    start_s  seconds that planning, weights, and graphs took
    Raises: what the engine raises for flags or a model that cannot be used.
    """

    def __init__(self, name: str, flags: Sequence[str]) -> None:
        from sglang.srt.arg_groups.pipeline import run_resolution_pipeline
        from sglang.srt.managers.scheduler_builder import build_engine
        from sglang.srt.server_args import prepare_server_args

        self.name = name
        self._received = _Received()
        began = time.monotonic()
        args = run_resolution_pipeline(prepare_server_args(list(flags)))
        self._engine = build_engine(args, lambda message: self._received.note(message))
        self.start_s = time.monotonic() - began
        self._random = np.random.default_rng(0)
        self._sent = 0

    def run(self, workload: Workload) -> Turn:
        """Send the workload at once and step until it is answered. Raises: ValueError if it is not."""
        scheduler, metrics = self._engine.scheduler, self._engine.scheduler.metrics
        verified, correct = metrics.verify_ct, metrics.correct_ct
        retracted = metrics.num_retracted
        received = self._received = _Received()
        prompts_in, steps, most = None, 0, 0
        messages = self._messages(workload)
        began = time.monotonic()
        for message in messages:
            scheduler.handle(message)
        while not scheduler.is_idle:
            scheduler.step()
            steps += 1
            most = max(most, len(scheduler.running) + len(scheduler.prefilling))
            if prompts_in is None and not (scheduler.waiting or scheduler.prefilling):
                prompts_in = time.monotonic()
        ended = time.monotonic()
        received.check(workload)
        tokens = sum(received.tokens.values())
        plan = self._engine.plan
        self._engine.memory.flush()
        return Turn(
            arm=self.name,
            workload=workload.name,
            seconds=ended - began,
            seconds_until_all_prompts_are_in=(prompts_in or ended) - began,
            steps=steps,
            input_tokens=workload.requests * workload.input_len,
            output_tokens=tokens,
            output_rate=tokens / (ended - began),
            mean_ttft_s=statistics.fmean(received.first.values()) - began,
            mean_tpot_ms=received.tpot_ms(),
            most_running=most,
            accept_length=1 + (metrics.correct_ct - correct) / max(1, metrics.verify_ct - verified),
            retractions=metrics.num_retracted - retracted,
            max_total_num_tokens=plan.max_total_num_tokens,
            verify_scratch_bytes=plan.verify_scratch_bytes,
            verify_ssm_scratch_bytes=plan.verify_ssm_scratch_bytes,
        )

    def _messages(self, workload: Workload) -> list:
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        vocab = self._engine.runner.model_config.vocab_size
        params = SamplingParams(
            temperature=0.0, max_new_tokens=workload.output_len, ignore_eos=True
        )
        params.normalize()
        messages = []
        for _ in range(workload.requests):
            ids = self._random.integers(10, vocab - 300, workload.input_len).tolist()
            messages.append(
                TokenizedGenerateReqInput(
                    rid=f"r{self._sent}", input_ids=ids, sampling_params=params
                )
            )
            self._sent += 1
        return messages

    def close(self) -> None:
        """End it and free the device's memory."""
        self._engine.close()
        del self._engine
        free_memory()


def free_memory() -> None:
    """Give back what engines that are no longer referred to held on the device."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
