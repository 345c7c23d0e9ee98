"""Turns of the comparison: a server of one arm answers every workload, and what came out is kept."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from arm_server import ArmServer
from report import ratios
from sampler import LoadSampler
from setups import (
    DEMO_FLAGS,
    PUBLISHED_FLAGS,
    Workload,
    flags_of_arm,
    is_in,
    write_json,
)

from sglang.benchmark.options import BenchError, LengthOptions, ServingOptions
from sglang.benchmark.serving import run_serving_benchmark

SECONDS_TO_STOP = 15
WARM_UP_INPUT, WARM_UP_OUTPUT = 9_000, 96
SHAPE_INPUT, SHAPE_OUTPUT = 4_096, 32
WARM_UP_NAME = "warm-up of "
DROPPED = ("server_info", "generated_texts", "input_lens", "output_lens", "itls", "errors")
"""Parts of a run's figures that the results leave out or hold once."""


@dataclass
class Session:
    """What has been run so far, and the clock."""

    args: argparse.Namespace
    model_path: str
    workloads: list[Workload]
    started: float = field(default_factory=time.monotonic)
    document: dict[str, Any] = field(default_factory=dict)
    longest_s: dict[str, float] = field(default_factory=dict)
    least_start_s: float = 0.0

    def left_s(self) -> float:
        """Seconds left of the budget, less what stopping takes."""
        return float(self.args.budget_s) - (time.monotonic() - self.started) - SECONDS_TO_STOP

    def has_time_for(self, what: str) -> bool:
        """Whether ``what`` fits if it takes as long as the longest of its kind so far."""
        return self._has_time(what, 1.1 * self.longest_s.get(what, 0.0))

    def has_time_for_a_server(self) -> bool:
        """Whether a start and a first run fit: as fast as the fastest, because the first compiles."""
        return self._has_time("a server's start and first run", 1.2 * self.least_start_s)

    def _has_time(self, what: str, wanted: float) -> bool:
        if self.left_s() > max(wanted, 1.0):
            return True
        self.stop(f"no time for {what}: {self.left_s():.0f} s left of --budget-s")
        return False

    def took(self, what: str, seconds: float) -> None:
        self.longest_s[what] = max(seconds, self.longest_s.get(what, 0.0))

    def started_in(self, seconds: float) -> None:
        """Note how long a server's start, warm-up and first measured run took."""
        self.least_start_s = min(seconds, self.least_start_s or seconds)

    def stop(self, why: str) -> None:
        self.document["stopped"] = why
        say(why)

    def write(self) -> None:
        self.document["on_over_off"] = ratios(self.document)
        write_json(self.args.out, self.document)


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def run_arm(session: Session, arm: str, round_index: int) -> None:
    """Start the arm's server, warm it up, run every workload, stop it."""
    args = session.args
    if not session.has_time_for_a_server():
        return
    common = DEMO_FLAGS if args.demo else PUBLISHED_FLAGS
    flags = flags_of_arm(
        arm, common, published_capacity=args.published_capacity, more=args.server_flags
    )
    if args.demo:
        flags = ["--model-path", "demo", *flags]
    else:
        flags = ["--model-path", session.model_path, *flags]
    say(f"round {round_index}, arm {arm}: starting a server")
    begin = time.monotonic()
    with ArmServer(
        flags,
        environment=session.document["environment"],
        log=args.out.with_suffix(f".{arm}{round_index}.log"),
        timeout_s=session.left_s(),
    ) as server:
        say(f"ready after {server.start_s:.1f} s; warm-up")
        session.document["servers"].append(
            {"arm": arm, "round": round_index, "start_s": server.start_s, "flags": flags}
        )
        for number, workload in enumerate(session.workloads):
            if is_in("sweep", workload) and round_index >= args.sweep_rounds:
                continue
            warm_up(session, server, (arm, round_index), workload, is_first=number == 0)
            for repeat in range(args.small_repeats if is_in("small", workload) else args.repeats):
                if not session.has_time_for(workload.name):
                    return
                one_run(session, server, (arm, round_index, repeat), workload, measured=True)
                if number == repeat == 0:
                    session.started_in(time.monotonic() - begin)


def warm_up(
    session: Session,
    server: ArmServer,
    turn: tuple[str, int],
    workload: Workload,
    *,
    is_first: bool,
) -> None:
    """Compile and touch everything once, discarded: a whole run, or a shorter one of as many requests.

    The first of a server is the longer one; those of further workloads only meet their shape.
    """
    place = (*turn, -1)
    if session.args.warmup == "full":
        one_run(session, server, place, workload, measured=False)
        return
    most_in, most_out = (WARM_UP_INPUT, WARM_UP_OUTPUT) if is_first else (SHAPE_INPUT, SHAPE_OUTPUT)
    short = replace(
        workload,
        name=WARM_UP_NAME + workload.name,
        input_len=min(workload.input_len, most_in),
        output_len=min(workload.output_len, most_out),
    )
    if session.has_time_for(short.name):
        one_run(session, server, place, short, measured=False, ratio=0.25 if is_first else 1.0)


def one_run(
    session: Session,
    server: ArmServer,
    place: tuple[str, int, int],
    workload: Workload,
    *,
    measured: bool,
    ratio: float = 1.0,
) -> None:
    """Send the workload, watch the server, keep and write what came out."""
    arm, round_index, repeat = place
    # Both arms get the same prompts; no two runs of a server do.
    number = [w.name for w in session.workloads].index(workload.name.removeprefix(WARM_UP_NAME))
    seed = 1 + 1000 * (100 * round_index + number) + repeat + 1
    options = ServingOptions(
        backend="sglang",
        base_url=server.url,
        dataset_name="random-ids",
        num_prompts=workload.requests,
        lengths=LengthOptions(
            random_input_len=workload.input_len,
            random_output_len=workload.output_len,
            random_range_ratio=ratio,
        ),
        tokenize_prompt=True,
        max_concurrency=workload.concurrency,
        warmup_requests=0,
        flush_cache=True,
        disable_tqdm=True,
        output_details=True,
        seed=seed,
        ready_check_timeout_sec=10,
    )
    sampler = LoadSampler(server.url, period_s=0.02 if session.args.demo else session.args.sample_s)
    begin = time.monotonic()
    try:
        figures = asyncio.run(
            asyncio.wait_for(run_serving_benchmark(options, during=sampler), session.left_s())
        )
    except TimeoutError:
        session.stop(f"{workload.name} did not end within --budget-s")
        session.document["unfinished"] = {"arm": arm, "samples": sampler.samples}
        return
    except BenchError as error:
        raise BenchError(f"{error}\n{server.log_tail()}") from error
    session.took(workload.name, time.monotonic() - begin)
    info = figures["server_info"] or {}
    session.document["runs"].append(
        {
            "arm": arm,
            "round": round_index,
            "repeat": repeat,
            "measured": measured,
            "workload": asdict(workload),
            "figures": {k: v for k, v in figures.items() if k not in DROPPED},
            "capacity": capacity_of(info),
            "max_running_seen": sampler.peak("num_running_reqs"),
            "max_queue_seen": sampler.peak("num_waiting_reqs"),
            "num_retracted": (info.get("internal_states") or [{}])[0].get("num_retracted"),
            "samples": sampler.samples,
        }
    )
    session.write()
    say(
        f"{arm} {workload.name}: {figures['duration']:.2f} s, "
        f"{figures['output_throughput']:.1f} tok/s out, TTFT {figures['mean_ttft_ms'] / 1000:.2f} s, "
        f"TPOT {figures['mean_tpot_ms']:.2f} ms, {figures['failed']} failed"
    )


def capacity_of(info: dict[str, Any]) -> dict[str, Any]:
    """What the server's plan holds."""
    plan = info.get("memory_plan", {})
    return {
        "verify_scratch_bytes": info.get("verify_scratch_bytes"),
        "verify_ssm_scratch_bytes": plan.get("verify_ssm_scratch_bytes"),
        "max_total_num_tokens": info.get("max_total_num_tokens"),
        "max_running_requests": info.get("max_running_requests"),
        "num_state_slots": info.get("num_state_slots"),
    }
