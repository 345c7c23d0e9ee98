"""Where a step's time goes: kernels of a verify step at a long context and of a prefill chunk.

    PYTHONPATH=python python benchmark/published/profile_step.py --out profile.json --markdown profile.md
    PYTHONPATH=python python benchmark/published/profile_step.py --from-json profile.json --out again.json

The engine runs in this process, with the published flags. To get to the context cheaply, each request
runs one real prefill chunk, is then told that all but the last tokens of its prompt are computed, and
runs the rest; the KV that was skipped holds random numbers. Lengths, pages, addresses, states and
kernels are those of a real run; only the values are not. Words after `--` are further server flags.
`--from-json` measures nothing: it sorts a stored profile's kernels into families anew.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from floors import StepShape, floors
from kernel_table import (
    DEVICE_CATEGORIES,
    HOST_CATEGORIES,
    markdown_of,
    profile_record,
    read_trace,
    reclassified,
)
from machine import describe_machine
from setups import (
    ACCEPT_LENGTH,
    ARMS,
    DEMO_FLAGS,
    PUBLISHED_FLAGS,
    check_output,
    in_plain_words,
    model_directory,
)

TAIL_TOKENS = 65
"""Tokens of a prompt that are computed after the jump: at least one must be, and a page is 64."""


def main(argv: Sequence[str] | None = None) -> int:
    """Build the engine, reach the context, profile, write. 0, or 2 for what cannot run."""
    args = read_arguments(sys.argv[1:] if argv is None else list(argv))
    return in_plain_words(lambda: write_again(args) if args.from_json else measure(args))


def measure(args: argparse.Namespace) -> int:
    os.environ.setdefault("SGLANG_SIMULATE_ACC_LEN", str(ACCEPT_LENGTH))
    with model_directory("demo" if args.demo else args.model_path) as model_path:
        bench = StepBench(args, model_path)
        document = {
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": shlex.join(sys.argv),
            "machine": describe_machine(),
            "server_flags": bench.flags,
            "acceptance": f"pretended: {os.environ['SGLANG_SIMULATE_ACC_LEN']}",
            "steps": {},
        }
        tables = []
        for title, record, shape in bench.run():
            floors_us = {} if args.demo else floors(bench.config, shape)
            record["floors_us"] = floors_us
            document["steps"][title] = record
            tables.append(markdown_of(title, record, floors_us))
            print(tables[-1], flush=True)
            args.out.write_text(json.dumps(document, indent=1) + "\n")
        bench.close()
    if args.markdown is not None:
        args.markdown.write_text("\n".join(tables))
    return 0


def write_again(args: argparse.Namespace) -> int:
    """A stored profile with families as they are sorted today; times and floors stay."""
    try:
        document = json.loads(args.from_json.read_text())
        document["steps"] = {title: reclassified(r) for title, r in document["steps"].items()}
        tables = [markdown_of(title, r, r["floors_us"]) for title, r in document["steps"].items()]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--from-json {args.from_json} is no profile that this script wrote "
            f"({type(error).__name__}: {error}); give its --out file"
        ) from error
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    if args.markdown is not None:
        args.markdown.write_text("\n".join(tables))
    return 0


class StepBench:
    """One engine and the steps that are profiled in it."""

    def __init__(self, args: argparse.Namespace, model_path: str) -> None:
        import torch

        from sglang.srt.arg_groups.pipeline import run_resolution_pipeline
        from sglang.srt.managers.scheduler_builder import build_engine
        from sglang.srt.server_args import prepare_server_args

        self._torch = torch
        self._args = args
        common = DEMO_FLAGS if args.demo else PUBLISHED_FLAGS
        self.flags = ["--model-path", model_path, *common, *ARMS[args.arm], *args.server_flags]
        begin = time.monotonic()
        resolved = run_resolution_pipeline(prepare_server_args(self.flags))
        self._engine = build_engine(resolved, lambda message: None)
        self._scheduler = self._engine.scheduler
        self._random = random.Random(0)
        self.config = self._engine.runner.model_config
        self._chunk = resolved.chunked_prefill_size
        self.is_cuda = self._engine.runner.device.type == "cuda"
        say(f"engine ready after {time.monotonic() - begin:.1f} s")

    def close(self) -> None:
        self._engine.close()

    def run(self) -> Any:
        """Yield (title, record, shape) of each kind of step."""
        args = self._args
        width = self._engine.worker.draft_token_num
        self._fill_pools()
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
        wall = self._wall(args.steps)
        record = self._profile(self._scheduler.step, args.steps)
        busy = record["gpu_busy_us_per_step"]
        record |= wall
        record["gpu_idle_share_of_wall"] = 1 - busy / wall["wall_us_per_step"]
        record["notes"] = [
            f"Without the profiler a step takes {wall['wall_us_per_step'] / 1000:.2f} ms of wall time, "
            f"so the GPU idles {100 * record['gpu_idle_share_of_wall']:.1f} % of it.",
        ]
        requests = len(self._scheduler.running)
        title = f"verify step of {requests} x {width} rows after about {args.context}"
        yield title, record, StepShape(requests, width, args.context, width - 1)

    def _submit(self) -> None:
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        vocab = self.config.vocab_size
        params = SamplingParams(
            temperature=0.0, max_new_tokens=self._args.output_len, ignore_eos=True
        )
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
            yield at, self._profile(scheduler.step, 1)

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

    def _profile(self, step: Callable[[], None], steps: int) -> dict[str, Any]:
        from torch.profiler import ProfilerActivity, profile

        kinds = [ProfilerActivity.CUDA] if self.is_cuda else [ProfilerActivity.CPU]
        self._synchronize()
        with profile(activities=kinds) as profiler:
            for _ in range(steps):
                step()
            self._synchronize()
        with tempfile.TemporaryDirectory(prefix="profile-step-") as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            events = read_trace(path, DEVICE_CATEGORIES if self.is_cuda else HOST_CATEGORIES)
        return profile_record(events, num_steps=steps)


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def read_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line; what follows `--` are server flags."""
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--markdown", type=Path, help="write the tables there, too")
    parser.add_argument("--from-json", type=Path, help="stored profile to write again")
    parser.add_argument("--model-path", help="folder of a checkpoint or of a config.json alone")
    parser.add_argument("--arm", choices=ARMS, default="on", help="which verify")
    parser.add_argument("--requests", type=int, help="requests that decode (25)")
    parser.add_argument("--context", type=int, help="tokens before the verify step (26500)")
    parser.add_argument("--output-len", type=int, default=2000, help="longest answer")
    parser.add_argument("--steps", type=int, default=10, help="verify steps in the profile")
    parser.add_argument("--warmup-steps", type=int, default=10, help="verify steps before it")
    parser.add_argument("--prefill-chunks", type=int, default=3, help="prefill chunks to profile")
    parser.add_argument("--demo", action="store_true", help="bundled model on the CPU, tiny")
    args = parser.parse_args(argv[:cut])
    args.server_flags = argv[cut + 1 :]
    defaults = {"requests": 4, "context": 700} if args.demo else {"requests": 25, "context": 26_500}
    for name, value in defaults.items():
        if vars(args)[name] is None:
            vars(args)[name] = value
    for name in ("requests", "context", "output_len", "steps", "warmup_steps"):
        if vars(args)[name] < 1:
            parser.error(f"--{name.replace('_', '-')} {vars(args)[name]}: must be at least 1")
    if args.context <= TAIL_TOKENS:
        parser.error(f"--context {args.context}: must be above {TAIL_TOKENS}")
    if args.prefill_chunks < 0:
        parser.error(f"--prefill-chunks {args.prefill_chunks}: must be at least 0")
    check_output(parser, "--out", args.out)
    check_output(parser, "--markdown", args.markdown)
    return args


if __name__ == "__main__":
    raise SystemExit(main())
