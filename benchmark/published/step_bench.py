"""An engine in this process, brought to a long context cheaply, and what ran on its device in a step."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from floors import StepShape
from kernel_table import (
    DEVICE_CATEGORIES,
    HOST_CATEGORIES,
    Event,
    profile_record,
    read_trace,
    service_notes,
    service_record,
)
from setups import ARMS, DEMO_FLAGS, PUBLISHED_FLAGS

TAIL_TOKENS = 65
"""Tokens of a prompt that are computed after the jump: at least one must be, and a page is 64."""

OVERLAP_NOTE = (
    "On compute capability 9.0 launches overlap, and a kernel's time includes its wait for the one in "
    "front: families add up to more than the GPU is busy. --ordinary-launches charges none for waiting."
)


@dataclass(frozen=True)
class PromptsShape:
    """Whole prompts of ``tokens`` each, computed in ``steps`` steps of at most ``chunk`` tokens."""

    prompts: int
    tokens: int
    chunk: int
    steps: int


class StepBench:
    """One engine and the steps that are profiled in it."""

    def __init__(self, args: argparse.Namespace, model_path: str) -> None:
        import torch

        from sglang.srt.arg_groups.pipeline import run_resolution_pipeline
        from sglang.srt.managers.io_struct import FromScheduler, encode_message
        from sglang.srt.managers.scheduler_builder import build_engine
        from sglang.srt.server_args import prepare_server_args

        self._torch = torch
        self._args = args
        common = DEMO_FLAGS if args.demo else PUBLISHED_FLAGS
        self.flags = ["--model-path", model_path, *common, *ARMS[args.arm], *args.server_flags]
        begin = time.monotonic()
        resolved = run_resolution_pipeline(prepare_server_args(self.flags))

        def send(message: FromScheduler) -> None:
            encode_message(message)  # as in service, but for the socket

        self._engine = build_engine(resolved, send)
        self._scheduler = self._engine.scheduler
        self._random = random.Random(0)
        self.config = self._engine.runner.model_config
        self._chunk = resolved.chunked_prefill_size or args.context
        self.is_cuda = self._engine.runner.device.type == "cuda"
        say(f"engine ready after {time.monotonic() - begin:.1f} s")

    def close(self) -> None:
        self._engine.close()

    def run(self) -> Any:
        """Yield (title, record, shape) of each kind of step; the shape says what its floors are."""
        args = self._args
        width = self._engine.worker.draft_token_num
        self._fill_pools()
        if args.service_prompts:
            yield self._prompts_in_service()
        for _ in range(args.requests - 1):
            self._submit()
        self._reach_context()
        self._submit()
        for at, record in self._prefill_chunks():
            title = f"prefill chunk of {self._chunk} tokens after {at}"
            yield title, record, StepShape(1, self._chunk, at)
        self._reach_context()
        say(f"{len(self._scheduler.running)} requests decode; warm-up of {args.warmup_steps} steps")
        for _ in range(args.warmup_steps):
            self._scheduler.step()
        requests = self._still_running()
        wall = self._wall(args.steps)
        record = self._profile(args.steps)
        busy = record["gpu_busy_us_per_step"]
        record |= wall
        record["gpu_idle_share_of_wall"] = 1 - busy / wall["wall_us_per_step"]
        record["notes"] = [
            f"Without the profiler a step takes {wall['wall_us_per_step'] / 1000:.2f} ms of wall time, "
            f"so the GPU idles {100 * record['gpu_idle_share_of_wall']:.1f} % of it.",
            *([] if self._args.ordinary_launches else [OVERLAP_NOTE]),
        ]
        self._still_running(requests)
        title = f"verify step of {requests} x {width} rows after about {args.context}"
        shape = StepShape(requests, width, args.context, width - 1)
        yield title, record, shape
        if args.service_steps:
            decode = self._decode_in_service(requests, width)
            self._still_running(requests)
            yield *decode, shape

    def _still_running(self, before: int | None = None) -> int:
        """Requests that decode. Raises: ValueError for none, or others than ``before``: steps were idle."""
        running = len(self._scheduler.running)
        if not running or running != (before or running):
            raise ValueError(
                f"{running} of {before or self._args.requests} requests still decode: the others were "
                "refused, or ended before the steps did; lower --context or --steps, or raise --output-len"
            )
        return running

    def _prompts_in_service(self) -> tuple[str, dict[str, Any], PromptsShape]:
        """Whole prompts, one after the other, each step launched as soon as the one before has been."""
        prompts, context = self._args.service_prompts, self._args.context
        for count in (min(2, prompts), prompts):  # the first is a warm-up
            self._submit_prompts(count)
            begin = time.perf_counter()
            steps = self._compute_prompts()
            self._synchronize()
            wall_us = 1e6 * (time.perf_counter() - begin)
            self._engine.memory.flush()
        if not steps:
            raise ValueError(f"prompts of --context {context} tokens are refused; lower it")
        self._submit_prompts(prompts)
        events = self._events(self._compute_prompts)
        self._engine.memory.flush()
        record = service_record(events, num_steps=steps, wall_us=wall_us)
        record["notes"] = [
            f"{prompts} prompts of {context:,} tokens in {steps} steps, none waited for. Without the "
            f"profiler they take {wall_us / 1e6:.3f} s, "
            f"{1e6 * prompts * context / wall_us:,.0f} tokens per second.",
            *service_notes(record),
        ]
        title = f"prompts in service: {prompts} x {context}"
        return title, record, PromptsShape(prompts, context, self._chunk, steps)

    def _submit_prompts(self, count: int) -> None:
        """Prompts whose answers are one token, so that no decode step runs."""
        for _ in range(count):
            self._submit(output_len=1)

    def _compute_prompts(self) -> int:
        """Step until all is answered; return the steps that computed prompts."""
        scheduler, steps = self._scheduler, 0
        while not scheduler.is_idle:
            steps += bool(scheduler.waiting or scheduler.prefilling)
            scheduler.step()
        return steps

    def _decode_in_service(self, requests: int, width: int) -> tuple[str, dict[str, Any]]:
        """Decode steps under the scheduler, and how long the GPU waits between them."""
        steps = self._args.service_steps
        wall = self._wall(steps)
        events = self._events(lambda: self._run_steps(steps))
        record = service_record(events, num_steps=steps, wall_us=steps * wall["wall_us_per_step"])
        record |= wall
        record["notes"] = [
            f"{steps} steps. Without the profiler a step takes "
            f"{wall['wall_us_per_step'] / 1000:.2f} ms of wall time.",
            *service_notes(record),
        ]
        return (
            f"decode in service: {requests} x {width} rows after about {self._args.context}",
            record,
        )

    def _run_steps(self, steps: int) -> None:
        for _ in range(steps):
            self._scheduler.step()

    def _submit(self, output_len: int | None = None) -> None:
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        vocab = self.config.vocab_size
        wanted = self._args.output_len if output_len is None else output_len
        params = SamplingParams(temperature=0.0, max_new_tokens=wanted, ignore_eos=True)
        params.normalize()
        ids = self._random.choices(range(vocab), k=self._args.context)
        rid = f"p{self._random.getrandbits(48):x}"
        self._scheduler.handle(
            TokenizedGenerateReqInput(rid=rid, input_ids=ids, sampling_params=params)
        )

    def _fill_pools(self) -> None:
        """Random keys and values everywhere, so that skipped prompts are not zeros."""
        pools = (self._engine.pools.kv_pool, self._engine.pools.draft_kv_pool)
        for pool in pools:
            if pool is not None:
                for buffer in (*pool.k_buffer, *pool.v_buffer):
                    buffer.normal_()

    def _reach_context(self) -> None:
        """Prefill all that waits: one real chunk each, a jump, and the rest."""
        scheduler = self._scheduler
        while scheduler.waiting or scheduler.prefilling:
            scheduler.step()
            self._synchronize()
            for req in scheduler.prefilling:
                target = (req.num_tokens - TAIL_TOKENS) // 64 * 64
                if req.kv.committed_len < target and self._engine.memory.ensure(req, target):
                    req.kv.committed_len = target

    def _prefill_chunks(self) -> Any:
        """Profile whole chunks of the request that waits, as many as asked for."""
        scheduler = self._scheduler
        for _ in range(self._args.prefill_chunks):
            at = scheduler.prefilling[0].kv.committed_len if scheduler.prefilling else 0
            if at + self._chunk >= self._args.context:
                return
            yield at, self._profile(1)

    def _synchronize(self) -> None:
        if self.is_cuda:
            self._torch.cuda.synchronize()

    def _wall(self, steps: int) -> dict[str, float]:
        """Wall time a step, and the part of it that the host spends inside ``step``."""
        self._synchronize()
        inside = []
        begin = time.perf_counter()
        for _ in range(steps):
            before = time.perf_counter()
            self._scheduler.step()
            inside.append(time.perf_counter() - before)
        self._synchronize()
        wall = time.perf_counter() - begin
        return {
            "wall_us_per_step": 1e6 * wall / steps,
            "host_us_in_step_median": 1e6 * statistics.median(inside),
        }

    def _profile(self, steps: int) -> dict[str, Any]:
        return profile_record(self._events(lambda: self._run_steps(steps)), num_steps=steps)

    def _events(self, work: Callable[[], object]) -> list[Event]:
        """What ran on the device while ``work`` did; on a CPU, its operators."""
        from torch.profiler import ProfilerActivity, profile

        kinds = [ProfilerActivity.CUDA] if self.is_cuda else [ProfilerActivity.CPU]
        self._synchronize()
        with profile(activities=kinds) as profiler:
            work()
            self._synchronize()
        with tempfile.TemporaryDirectory(prefix="profile-step-") as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            return read_trace(path, DEVICE_CATEGORIES if self.is_cuda else HOST_CATEGORIES)


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)
