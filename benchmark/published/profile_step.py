"""Where a step's time goes: kernels of a verify step at a long context and of a prefill chunk, each by
itself, and where the GPU waits while the scheduler works as in service.

    PYTHONPATH=python python benchmark/published/profile_step.py --out profile.json --markdown profile.md
    PYTHONPATH=python python benchmark/published/profile_step.py --from-json profile.json --out again.json

The engine runs in this process, with the published flags. To get to the context cheaply, each request
runs one real prefill chunk, is then told that all but the last tokens of its prompt are computed, and
runs the rest; the KV that was skipped holds random numbers. Lengths, pages, addresses, states and
kernels are those of a real run; only the values are not. "In service" nothing is waited for between
steps: whole prompts whose chunks queue ahead, and decode steps with their messages encoded; both are
timed without the profiler, too. Words after `--` are further server flags. `--from-json` measures
nothing: it sorts a stored profile's kernels into families anew.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from floors import StepShape, floors, prompts_floors
from kernel_table import markdown_of, reclassified
from machine import describe_machine
from setups import (
    ACCEPT_LENGTH,
    ARMS,
    check_output,
    in_plain_words,
    model_directory,
    write_json,
)
from step_bench import TAIL_TOKENS, PromptsShape, StepBench


def main(argv: Sequence[str] | None = None) -> int:
    """Build the engine, reach the context, profile, write. 0, or 2 for what cannot run."""
    args = read_arguments(sys.argv[1:] if argv is None else list(argv))
    return in_plain_words(lambda: write_again(args) if args.from_json else measure(args))


def measure(args: argparse.Namespace) -> int:
    os.environ.setdefault("SGLANG_SIMULATE_ACC_LEN", str(ACCEPT_LENGTH))
    if args.ordinary_launches:
        from sglang.kernels.launch_overlap import use_ordinary_launches

        use_ordinary_launches()
    with model_directory("demo" if args.demo else args.model_path) as model_path:
        bench = StepBench(args, model_path)
        document: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": shlex.join(sys.argv),
            "machine": describe_machine(),
            "server_flags": bench.flags,
            "acceptance": f"pretended: {os.environ['SGLANG_SIMULATE_ACC_LEN']}",
            "steps": {},
        }
        tables = []
        for title, record, shape in bench.run():
            floors_us = {}
            if isinstance(shape, StepShape) and not args.demo:
                floors_us = floors(bench.config, shape)
            elif isinstance(shape, PromptsShape) and not args.demo:
                floors_us = prompts_floors(
                    bench.config, shape.prompts, shape.tokens, shape.chunk, num_steps=shape.steps
                )
            record["floors_us"] = floors_us
            document["steps"][title] = record
            tables.append(markdown_of(title, record, floors_us))
            print(tables[-1], flush=True)
            write_json(args.out, document)
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
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"--from-json {args.from_json} is no profile that this script wrote "
            f"({type(error).__name__}: {error}); give its --out file"
        ) from error
    write_json(args.out, document)
    if args.markdown is not None:
        args.markdown.write_text("\n".join(tables))
    return 0


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
    parser.add_argument(
        "--service-prompts", type=int, default=4, help="prompts in service; 0 leaves them out (4)"
    )
    parser.add_argument(
        "--service-steps", type=int, default=30, help="decode steps in service; 0: none (30)"
    )
    parser.add_argument(
        "--ordinary-launches",
        action="store_true",
        help="launch no kernel before the one in front has ended: the table then charges none for waiting",
    )
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
    for name in ("prefill_chunks", "service_prompts", "service_steps"):
        if vars(args)[name] < 0:
            parser.error(f"--{name.replace('_', '-')} {vars(args)[name]}: must be at least 0")
    check_output(parser, "--out", args.out)
    check_output(parser, "--markdown", args.markdown)
    return args


if __name__ == "__main__":
    raise SystemExit(main())
