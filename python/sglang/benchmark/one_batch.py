"""A static batch in this process: all prompts at once, then decode steps until every answer is whole."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from sglang.benchmark.options import BenchError
from sglang.srt.managers.io_struct import (
    BatchTokenIDOutput,
    FromScheduler,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.scheduler_builder import build_engine
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

StepLog = Callable[[int, float, int], None]


@dataclass(frozen=True)
class Case:
    """One batch: requests, tokens of each prompt, tokens of each answer."""

    batch_size: int
    input_len: int
    output_len: int


class OneBatch:
    """The engine, and one batch at a time through it."""

    def __init__(self, args: ServerArgs, *, seed: int = 0) -> None:
        self._engine = build_engine(args, self._receive)
        self._scheduler = self._engine.scheduler
        self._device = self._engine.runner.device
        self._vocab_size = self._engine.runner.model_config.vocab_size
        self._random = random.Random(seed)
        self._num_tokens = 0
        self._failures: list[str] = []

    def close(self) -> None:
        self._engine.close()

    def _receive(self, message: FromScheduler) -> None:
        if not isinstance(message, BatchTokenIDOutput):
            return
        for item in message.items:
            self._num_tokens += len(item.new_token_ids)
            if item.finish_reason is not None and item.finish_reason.type == "abort":
                self._failures.append(item.finish_reason.message or "aborted")

    def check(self, case: Case) -> None:
        """Raises: BenchError if the batch cannot run all at once."""
        info = self._engine.info
        tokens = case.input_len + case.output_len
        if tokens > info["max_req_len"]:
            raise BenchError(
                f"--input-len {case.input_len} and --output-len {case.output_len} need {tokens} "
                f"tokens; a request holds at most {info['max_req_len']}: raise --context-length or "
                "--max-total-tokens"
            )
        if case.batch_size > info["max_running_requests"]:
            raise BenchError(
                f"--batch-size {case.batch_size} is above the {info['max_running_requests']} requests "
                "that run at once; raise --max-running-requests or memory"
            )
        if case.batch_size * tokens > info["max_total_num_tokens"]:
            raise BenchError(
                f"--batch-size {case.batch_size} of {tokens} tokens each needs "
                f"{case.batch_size * tokens} KV slots of {info['max_total_num_tokens']}; make the "
                "batch smaller or raise --mem-fraction-static or --max-total-tokens"
            )

    def run(
        self, case: Case, *, log: StepLog | None = None, trace: Path | None = None
    ) -> dict[str, Any]:
        """Run one batch and return its figures, times in seconds.

        log    called after every decode step with its number, its seconds and its new tokens
        trace  beginning of the names of two profiler traces, of the prefill and of the decode
        """
        self.check(case)
        metrics = self._scheduler.metrics
        verified, correct = metrics.verify_ct, metrics.correct_ct
        for _ in range(case.batch_size):
            self._submit(case)
        self._synchronize()
        begin = time.perf_counter()
        with self._profiled(trace, "prefill"):
            while self._scheduler.waiting or self._scheduler.prefilling:
                self._step()
            self._synchronize()
        prefill_s = time.perf_counter() - begin
        step_s: list[float] = []
        with self._profiled(trace, "decode"):
            while not self._scheduler.is_idle:
                before, had = time.perf_counter(), self._num_tokens
                self._step()
                step_s.append(time.perf_counter() - before)
                if log is not None:
                    log(len(step_s) - 1, step_s[-1], self._num_tokens - had)
            self._synchronize()
        total_s = time.perf_counter() - begin
        self._engine.memory.flush()
        figures = self._figures(case, prefill_s, step_s if case.output_len > 1 else [], total_s)
        if metrics.verify_ct > verified:
            figures["accept_length"] = 1 + (metrics.correct_ct - correct) / (
                metrics.verify_ct - verified
            )
        return figures

    def _figures(
        self, case: Case, prefill_s: float, step_s: list[float], total_s: float
    ) -> dict[str, Any]:
        decode_s = total_s - prefill_s
        decoded = case.batch_size * (case.output_len - 1)
        num_input = case.batch_size * case.input_len
        num_output = case.batch_size * case.output_len
        median = statistics.median(step_s) if step_s else None
        per_step = decoded / len(step_s) if step_s else 0.0
        return {
            "batch_size": case.batch_size,
            "input_len": case.input_len,
            "output_len": case.output_len,
            "prefill_latency": prefill_s,
            "prefill_throughput": num_input / prefill_s,
            "median_decode_latency": median,
            "median_decode_throughput": per_step / median if median else None,
            "decode_steps": len(step_s),
            "decode_throughput": decoded / decode_s if step_s else None,
            "accept_length": None,
            "total_latency": total_s,
            "overall_throughput": (num_input + num_output) / total_s,
        }

    def _submit(self, case: Case) -> None:
        params = SamplingParams(temperature=0.0, max_new_tokens=case.output_len, ignore_eos=True)
        params.normalize()
        params.verify(self._vocab_size)
        ids = self._random.choices(range(self._vocab_size), k=case.input_len)
        rid = f"batch-{self._random.getrandbits(60):x}"
        self._scheduler.handle(
            TokenizedGenerateReqInput(rid=rid, input_ids=ids, sampling_params=params)
        )
        self._check_failures()

    def _step(self) -> None:
        self._scheduler.step()
        self._check_failures()

    def _check_failures(self) -> None:
        if self._failures:
            raise BenchError(f"a request of the batch failed: {self._failures[0]}")

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _profiled(self, trace: Path | None, part: str) -> AbstractContextManager[None]:
        if trace is None:
            return nullcontext()
        kinds = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            kinds.append(ProfilerActivity.CUDA)
        return _traced(kinds, Path(f"{trace}_{part}.trace.json.gz"))


@contextmanager
def _traced(kinds: list[ProfilerActivity], path: Path) -> Iterator[None]:
    with profile(activities=kinds) as profiler:
        yield
    profiler.export_chrome_trace(str(path))
