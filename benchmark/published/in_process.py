"""The published workload without HTTP: scheduler and model in this process, arms in turns.

    PYTHONPATH=python python benchmark/published/in_process.py --out in_process.json --published-capacity

What run.py measures from outside, this measures from inside: no sockets, no detokenizing, and no server
to start for every arm, so all of it fits into three minutes. Prompts are all there at the start.
`--workloads published,small,sweep` adds the small set-ups and 1 to 25 requests of 8k/512. Words after
`--` are further server flags. JSON is written after every run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe_machine
from setups import (
    ACCEPT_LENGTH,
    ARMS,
    DEMO,
    DEMO_FLAGS,
    PUBLISHED,
    PUBLISHED_FLAGS,
    SMALL,
    Workload,
    check_output,
    flags_of_arm,
    in_plain_words,
    model_directory,
)

WARM_UP = Workload("warm-up", 2, 9_000, 24, 2)
WORKLOADS = {
    "published": (PUBLISHED,),
    "small": SMALL,
    "sweep": tuple(Workload(f"{n} x 8k/512", n, 8_192, 512, n) for n in (1, 4, 8, 16, 25)),
}


@dataclass
class Turn:
    """One run of one arm."""

    arm: str
    workload: str
    seconds: float
    seconds_until_all_prompts_are_in: float
    steps: int
    input_tokens: int
    output_tokens: int
    output_rate: float
    most_running: int
    accept_length: float
    retractions: int
    max_total_num_tokens: int
    verify_scratch_bytes: int


class Arm:
    """One engine. ``close`` gives its memory back before the next one is built."""

    def __init__(self, name: str, flags: Sequence[str]) -> None:
        from sglang.srt.arg_groups.pipeline import run_resolution_pipeline
        from sglang.srt.managers.scheduler_builder import build_engine
        from sglang.srt.server_args import prepare_server_args

        self.name = name
        self._engine = build_engine(
            run_resolution_pipeline(prepare_server_args(list(flags))), lambda message: None
        )
        self._random = np.random.default_rng(0)
        self._sent = 0

    def run(self, workload: Workload) -> Turn:
        scheduler, metrics = self._engine.scheduler, self._engine.scheduler.metrics
        verified, correct = metrics.verify_ct, metrics.correct_ct
        retracted = metrics.num_retracted
        began, prompts_in, steps, most = time.monotonic(), None, 0, 0
        self._submit(workload)
        while not scheduler.is_idle:
            scheduler.step()
            steps += 1
            most = max(most, len(scheduler.running) + len(scheduler.prefilling))
            if prompts_in is None and not (scheduler.waiting or scheduler.prefilling):
                prompts_in = time.monotonic()
        ended = time.monotonic()
        tokens = workload.requests * workload.output_len
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
            most_running=most,
            accept_length=1 + (metrics.correct_ct - correct) / max(1, metrics.verify_ct - verified),
            retractions=metrics.num_retracted - retracted,
            max_total_num_tokens=plan.max_total_num_tokens,
            verify_scratch_bytes=plan.verify_scratch_bytes,
        )

    def _submit(self, workload: Workload) -> None:
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        vocab = self._engine.runner.model_config.vocab_size
        params = SamplingParams(
            temperature=0.0, max_new_tokens=workload.output_len, ignore_eos=True
        )
        params.normalize()
        for _ in range(workload.requests):
            ids = self._random.integers(10, vocab - 300, workload.input_len).tolist()
            self._engine.scheduler.handle(
                TokenizedGenerateReqInput(
                    rid=f"r{self._sent}", input_ids=ids, sampling_params=params
                )
            )
            self._sent += 1

    def close(self) -> None:
        import torch

        self._engine.close()
        del self._engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the turns. 0, 1 if there was no time for a single one, 2 for what cannot run."""
    args = _parse(argv)
    return in_plain_words(lambda: _measure(args))


def _measure(args: argparse.Namespace) -> int:
    os.environ.setdefault("SGLANG_SIMULATE_ACC_LEN", str(ACCEPT_LENGTH))
    os.environ.setdefault("SGLANG_SIMULATE_ACC_TOKEN_MODE", "real-draft-token")
    common = DEMO_FLAGS if args.demo else PUBLISHED_FLAGS
    workloads = (DEMO,) if args.demo else [w for name in args.workloads for w in WORKLOADS[name]]
    turns: list[Turn] = []
    stop = time.monotonic() + args.budget_s
    with model_directory("demo" if args.demo else args.model_path) as path:
        for number in range(args.rounds):
            for name in args.arms if number % 2 == 0 else args.arms[::-1]:
                if time.monotonic() > stop:
                    break
                flags = flags_of_arm(
                    name, common, published_capacity=args.published_capacity, more=args.more
                )
                arm = Arm(name, ["--model-path", path, *flags])
                arm.run(DEMO if args.demo else WARM_UP)
                for workload in workloads:
                    turns.append(arm.run(workload))
                    _write(args.out, turns)
                    print(json.dumps(vars(turns[-1])), flush=True)
                arm.close()
    if not turns:
        print(f"error: --budget-s {args.budget_s:g} left no time for a turn", file=sys.stderr)
    return 0 if turns else 1


def _write(out: Path, turns: list[Turn]) -> None:
    record: dict[str, Any] = {
        "machine": describe_machine(),
        "acceptance": f"pretended: {os.environ['SGLANG_SIMULATE_ACC_LEN']} tokens a verify step",
        "turns": [vars(turn) for turn in turns],
    }
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _names(known: Collection[str]) -> Callable[[str], list[str]]:
    """A parser of comma-separated names, each of them known."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return names

    return parse


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--model-path", help="folder of a checkpoint or of a config.json alone")
    parser.add_argument("--arms", type=_names(ARMS), default=["off", "on"], help="off,on")
    parser.add_argument(
        "--workloads",
        type=_names(WORKLOADS),
        default=["published"],
        help="of published,small,sweep",
    )
    parser.add_argument("--rounds", type=int, default=2, help="times that each arm has its turn")
    parser.add_argument("--budget-s", type=float, default=500.0, help="start no turn after this")
    parser.add_argument("--demo", action="store_true", help="bundled model on the CPU, tiny")
    parser.add_argument(
        "--published-capacity",
        action="store_true",
        help="limit each arm's KV pool to the tokens published for its H100 run",
    )
    parser.add_argument("more", nargs="*", help="server flags, after --")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: must be at least 1")
    check_output(parser, "--out", args.out)
    return args


if __name__ == "__main__":
    raise SystemExit(main())
