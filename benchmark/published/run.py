"""The published comparison in one command: lossless verify off against on, everything else equal.

    PYTHONPATH=python python benchmark/published/run.py --out results.json                # one GPU of 80 GB or more
    PYTHONPATH=python python benchmark/published/run.py --out small.json --small          # 8 and 1 requests of 4k/512
    PYTHONPATH=python python benchmark/published/run.py --out sweep.json --concurrency 1,4,8,16,25
    PYTHONPATH=python python benchmark/published/run.py --out demo.json --demo            # bundled model, CPU

Each arm starts a server of its own with random weights, answers a warm-up, then the workload; arms take
turns. Acceptance is pretended (SGLANG_SIMULATE_ACC_LEN), because random weights accept nothing: the text
is meaningless, the work is not. Words after `--` are further server flags. Results are written after
every run, so that a run which is cut short keeps what it has.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from arm_server import ArmServer, ServerFailed
from machine import describe_machine
from report import markdown, text_table
from sampler import LoadSampler
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
    model_directory,
)

from sglang.benchmark.options import BenchError, LengthOptions, ServingOptions
from sglang.benchmark.serving import run_serving_benchmark

SECONDS_TO_STOP = 15
WARM_UP_INPUT, WARM_UP_OUTPUT = 9_000, 96
WARM_UP_NAME = "warm-up of "
DROPPED = ("server_info", "generated_texts")
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

    def left_s(self) -> float:
        """Seconds left of the budget, less what stopping takes."""
        return float(self.args.budget_s) - (time.monotonic() - self.started) - SECONDS_TO_STOP

    def has_time_for(self, what: str) -> bool:
        """Whether ``what`` fits if it takes as long as the longest of its kind so far."""
        wanted = 1.1 * self.longest_s.get(what, 0.0)
        if self.left_s() > max(wanted, 1.0):
            return True
        self.stop(f"no time for {what}: {self.left_s():.0f} s left of --budget-s")
        return False

    def took(self, what: str, seconds: float) -> None:
        self.longest_s[what] = max(seconds, self.longest_s.get(what, 0.0))

    def stop(self, why: str) -> None:
        self.document["stopped"] = why
        say(why)

    def write(self) -> None:
        self.args.out.write_text(json.dumps(self.document, indent=1) + "\n")


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. 0 if every arm has a measured run, else 1."""
    args = read_arguments(sys.argv[1:] if argv is None else list(argv))
    with model_directory(args.model_path) as model_path:
        session = Session(args, model_path, chosen_workloads(args))
        session.document = head(session)
        try:
            for round_index in range(args.rounds):
                for arm in args.arms:
                    if "stopped" not in session.document:
                        run_arm(session, arm, round_index)
        except (ServerFailed, BenchError) as error:
            session.stop(f"failed: {error}")
        except KeyboardInterrupt:
            session.stop("interrupted")
    session.document["seconds"] = time.monotonic() - session.started
    session.write()
    print(text_table(session.document))
    if args.markdown is not None:
        args.markdown.write_text(markdown(session.document))
    measured = {run["arm"] for run in session.document["runs"] if run["measured"]}
    return 0 if measured == set(args.arms) else 1


def run_arm(session: Session, arm: str, round_index: int) -> None:
    """Start the arm's server, warm it up, run every workload, stop it."""
    args = session.args
    if not session.has_time_for(f"the start of a server and a run ({arm})"):
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
        for workload in session.workloads:
            warm_up(session, server, arm, round_index, workload)
            for repeat in range(args.repeats):
                if not session.has_time_for(workload.name):
                    return
                one_run(session, server, (arm, round_index, repeat), workload, measured=True)
    session.took(f"the start of a server and a run ({arm})", time.monotonic() - begin)


def warm_up(
    session: Session, server: ArmServer, arm: str, round_index: int, workload: Workload
) -> None:
    """Compile and touch everything once: a discarded run, or a shorter one of as many requests."""
    if session.args.warmup == "full":
        one_run(session, server, (arm, round_index, -1), workload, measured=False)
        return
    short = replace(
        workload,
        name=WARM_UP_NAME + workload.name,
        input_len=min(workload.input_len, WARM_UP_INPUT),
        output_len=min(workload.output_len, WARM_UP_OUTPUT),
    )
    one_run(session, server, (arm, round_index, -1), short, measured=False, ratio=0.25)


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
    place_of = [w.name for w in session.workloads].index(workload.name.removeprefix(WARM_UP_NAME))
    seed = 1 + 1000 * round_index + 100 * place_of + repeat + 1
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


def head(session: Session) -> dict[str, Any]:
    """What the results say before the first run."""
    args = session.args
    environment = {
        "SGLANG_SIMULATE_ACC_LEN": str(args.accept_length),
        "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
        "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
    }
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(sys.argv),
        "acceptance": f"pretended: {args.accept_length} tokens a verify step on average, bonus "
        "included; outputs are not the model's",
        "warm_up": "a whole run, discarded"
        if args.warmup == "full"
        else f"a run of as many requests with prompts of at most {WARM_UP_INPUT} tokens and answers "
        f"of at most {WARM_UP_OUTPUT}, discarded",
        "model": "demo" if args.demo else args.model_path or "geometry of Qwen3.6-35B-A3B-FP8",
        "weights": "trained" if args.demo else "random (--load-format dummy)",
        "machine": describe_machine(),
        "environment": environment,
        "arms": {arm: ARMS[arm] for arm in args.arms},
        "servers": [],
        "runs": [],
    }


def chosen_workloads(args: argparse.Namespace) -> list[Workload]:
    """The workloads of the command line."""
    if args.small:
        return list(SMALL)
    base = DEMO if args.demo else PUBLISHED
    given = {
        name: value
        for name in ("requests", "input_len", "output_len")
        if (value := vars(args)[name]) is not None
    }
    base = replace(base, **given)
    if given:
        base = replace(base, name=f"{base.requests} x {base.input_len}/{base.output_len}")
    if args.concurrency is None:
        return [replace(base, concurrency=base.requests)]
    return [
        replace(base, name=f"{base.name}, concurrency {c}", requests=c * args.waves, concurrency=c)
        for c in args.concurrency
    ]


def read_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line; what follows `--` are server flags."""
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file; logs go beside it")
    parser.add_argument("--markdown", type=Path, help="write the table there, too")
    parser.add_argument("--model-path", help="folder of a checkpoint or of a config.json alone")
    parser.add_argument("--requests", type=int, help="requests of a run (25)")
    parser.add_argument("--input-len", type=int, help="tokens of a prompt (26000)")
    parser.add_argument("--output-len", type=int, help="tokens of an answer (2000)")
    parser.add_argument("--arms", type=words_of(ARMS), default=["off", "on"], help="off,on")
    parser.add_argument("--rounds", type=int, default=1, help="times that each arm has its turn")
    parser.add_argument("--repeats", type=int, default=2, help="measured runs in each turn")
    parser.add_argument("--warmup", choices=("short", "full"), default="short")
    parser.add_argument("--budget-s", type=float, default=570.0, help="stop in time for this")
    parser.add_argument("--accept-length", type=float, default=ACCEPT_LENGTH)
    parser.add_argument("--sample-s", type=float, default=0.5, help="seconds between two looks")
    parser.add_argument("--small", action="store_true", help="8 x 4k/512 and 1 x 4k/512 instead")
    parser.add_argument("--concurrency", type=numbers, help="sweep, such as 1,4,8,16,25")
    parser.add_argument("--waves", type=int, default=1, help="requests a place, in a sweep")
    parser.add_argument(
        "--demo", action="store_true", help="bundled model on the CPU, tiny workload"
    )
    parser.add_argument(
        "--published-capacity",
        action="store_true",
        help="limit each arm's KV pool to the tokens published for its H100 run",
    )
    args = parser.parse_args(argv[:cut])
    args.server_flags = argv[cut + 1 :]
    for name in ("requests", "input_len", "output_len", "rounds", "repeats", "waves"):
        value = vars(args)[name]
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if args.small and (args.demo or args.concurrency):
        parser.error("--small is a workload of its own; leave out --demo and --concurrency")
    if not args.accept_length >= 1:
        parser.error(f"--accept-length {args.accept_length:g}: must be at least 1, the bonus token")
    if not args.sample_s > 0:
        parser.error(f"--sample-s {args.sample_s:g}: must be above 0")
    check_output(parser, "--out", args.out)
    check_output(parser, "--markdown", args.markdown)
    return args


def words_of(known: dict[str, list[str]]) -> Any:
    def read(text: str) -> list[str]:
        words = text.split(",")
        if unknown := [word for word in words if word not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return words

    return read


def numbers(text: str) -> list[int]:
    try:
        values = [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write numbers such as 1,4,8") from None
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: every number must be at least 1")
    return values


if __name__ == "__main__":
    raise SystemExit(main())
