"""`python -m sglang.bench_one_batch`: latency of one static batch, without a server.

    python -m sglang.bench_one_batch --model-path demo --batch-size 1 8 --input-len 256 --output-len 32

Every combination of the three lists is a case. The flags of a server apply as well; a short case is run
and thrown away first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang.benchmark.options import COUNTS, COUNTS_OR_NONE, BenchError, check_range
from sglang.srt.arg_groups.pipeline import run_resolution_pipeline
from sglang.srt.mem_cache.plan_inputs import MemoryPlanError
from sglang.srt.server_args import ServerArgs, prepare_server_args

WARM_UP_TOKENS = 16


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang.bench_one_batch",
        description="Measure prefill and decode latency of a static batch in this process.",
        allow_abbrev=False,
    )
    _add_own_flags(parser)
    ServerArgs.add_cli_args(parser)
    return parser


def _add_own_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Batch")
    group.add_argument("--batch-size", type=int, nargs="+", default=[1], help="requests of a batch")
    group.add_argument("--input-len", type=int, nargs="+", default=[1024], help="prompt tokens")
    group.add_argument("--output-len", type=int, nargs="+", default=[16], help="answer tokens")
    group.add_argument("--run-name", default="default", help="word to find the run by")
    group.add_argument(
        "--result-filename", default="result.jsonl", help="JSONL to append to; empty for none"
    )
    group.add_argument(
        "--log-decode-step",
        type=int,
        default=0,
        help="print every so many decode steps; 0 prints none",
    )
    group.add_argument(
        "--profile", action="store_true", help="write profiler traces of prefill and decode"
    )
    group.add_argument(
        "--profile-filename-prefix", default="profile", help="beginning of the traces' names"
    )


def read_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, ServerArgs]:
    """Own flags, and the server's. Unknown words print usage and exit with 2. Raises: BenchError."""
    build_parser().parse_args(argv)
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_own_flags(own)
    options, words = own.parse_known_args(argv)
    for name in ("batch_size", "input_len", "output_len"):
        for value in vars(options)[name]:
            check_range(f"--{name.replace('_', '-')}", value, COUNTS)
    check_range("--log-decode-step", options.log_decode_step, COUNTS_OR_NONE)
    args = prepare_server_args(words)
    if args.max_running_requests is None:
        args = replace(args, max_running_requests=max(options.batch_size))
    return options, args


def run(options: argparse.Namespace, args: ServerArgs) -> list[dict[str, Any]]:
    """Run every case; print its lines, append its results, return them. Raises: BenchError."""
    from sglang.benchmark.one_batch import Case, OneBatch

    cases = [
        Case(*numbers)
        for numbers in itertools.product(options.batch_size, options.input_len, options.output_len)
    ]
    batch = OneBatch(run_resolution_pipeline(args))
    results = []
    try:
        for case in cases:
            batch.check(case)
        first = cases[0]
        batch.run(replace(first, output_len=min(first.output_len, WARM_UP_TOKENS)))
        for case in cases:
            print(
                f"Batch size {case.batch_size}, input {case.input_len}, output {case.output_len}",
                flush=True,
            )
            trace = None
            if options.profile:
                shape = f"batch{case.batch_size}_input{case.input_len}_output{case.output_len}"
                trace = Path(f"{options.profile_filename_prefix}_{shape}")
            figures = batch.run(case, log=_step_log(options.log_decode_step, case), trace=trace)
            results.append({"run_name": options.run_name, "device": args.device, **figures})
            _print(figures)
            _append(options.result_filename, results[-1])
    finally:
        batch.close()
    return results


def _step_log(every: int, case: Any) -> Any:
    if every < 1:
        return None

    def log(number: int, seconds: float, num_tokens: int) -> None:
        if number % every == 0:
            print(
                f"Decode {number}. Batch size: {case.batch_size}, latency: {seconds:6.5f} s, "
                f"throughput: {num_tokens / seconds:9.2f} token/s"
            )

    return log


def _print(figures: dict[str, Any]) -> None:
    print(
        f"Prefill. latency: {figures['prefill_latency']:6.5f} s, "
        f"throughput: {figures['prefill_throughput']:9.2f} token/s"
    )
    if figures["median_decode_latency"] is not None:
        accept = figures["accept_length"]
        shown = "" if accept is None else f", accept length: {accept:.2f}"
        print(
            f"Decode.  median latency: {figures['median_decode_latency']:6.5f} s, median throughput: "
            f"{figures['median_decode_throughput']:9.2f} token/s, steps: {figures['decode_steps']}{shown}"
        )
    print(
        f"Total. latency: {figures['total_latency']:6.3f} s, "
        f"throughput: {figures['overall_throughput']:9.2f} token/s",
        flush=True,
    )


def _append(filename: str, result: dict[str, Any]) -> None:
    if filename:
        with Path(filename).open("a", encoding="utf-8") as out:
            out.write(json.dumps(result) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. 0, or 2 for what cannot run."""
    try:
        options, args = read_arguments(sys.argv[1:] if argv is None else argv)
        if options.result_filename:
            try:
                Path(options.result_filename).open("a", encoding="utf-8").close()
            except OSError as error:
                raise BenchError(
                    f"--result-filename {options.result_filename}: cannot be written "
                    f"({error.strerror}); name a file in a folder that is there"
                ) from error
        run(options, args)
    except (BenchError, MemoryPlanError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
