"""The published comparison in one command: lossless verify off against on, everything else equal.

    PYTHONPATH=python python benchmark/published/run.py --out results.json     # one GPU of 80 GB or more
    PYTHONPATH=python python benchmark/published/run.py --out all.json --workloads published,small,sweep
    PYTHONPATH=python python benchmark/published/run.py --out demo.json --demo # bundled model, CPU

Each arm starts a server of its own with random weights, which answers a warm-up and then every workload:
`published` is 25 requests of 26k/2k, `small` 8 and 1 of 4k/512, `sweep` 1, 4, 8 and 16 of 26k/2k, in the
first round only. Arms take turns, in the other order every second round. Acceptance is pretended
(SGLANG_SIMULATE_ACC_LEN), because random weights accept nothing: the text is meaningless, the work is not.
Words after `--` are further server flags. Results are written after every run, so that one which is cut
short keeps what it has.
"""

from __future__ import annotations

import argparse
import math
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from arm_server import ServerFailed
from machine import describe_machine
from report import markdown, text_table
from served_turn import (
    SHAPE_INPUT,
    SHAPE_OUTPUT,
    WARM_UP_INPUT,
    WARM_UP_OUTPUT,
    Session,
    run_arm,
)
from setups import (
    ACCEPT_LENGTH,
    ARMS,
    DEMO,
    PUBLISHED,
    SMALL_REPEATS,
    VERIFY_ROWS,
    WORKLOADS,
    Workload,
    check_output,
    chosen,
    in_turn,
    model_directory,
    names_of,
)

from sglang.benchmark.options import BenchError

LENGTHS = ("requests", "input_len", "output_len")


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. 0 if every arm has a measured run, else 1."""
    args = read_arguments(sys.argv[1:] if argv is None else list(argv))
    # `timeout` ends a program so; the server of the turn must not outlive it.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    with model_directory(args.model_path) as model_path:
        session = Session(args, model_path, chosen_workloads(args))
        session.document = head(session)
        try:
            for round_index in range(args.rounds):
                for arm in in_turn(args.arms, round_index):
                    if "stopped" not in session.document:
                        run_arm(session, arm, round_index)
        except (ServerFailed, BenchError) as error:
            session.stop(f"failed: {error}")
        except KeyboardInterrupt:
            session.stop("interrupted")
        finally:
            signal.signal(signal.SIGTERM, before)
    session.document["seconds"] = time.monotonic() - session.started
    session.write()
    print(text_table(session.document))
    if args.markdown is not None:
        args.markdown.write_text(markdown(session.document))
    measured = {run["arm"] for run in session.document["runs"] if run["measured"]}
    return 0 if measured == set(args.arms) else 1


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
        f"of at most {WARM_UP_OUTPUT}, before further workloads {SHAPE_INPUT} and {SHAPE_OUTPUT}; "
        "discarded",
        "model": "demo" if args.demo else args.model_path or "geometry of Qwen3.6-35B-A3B-FP8",
        "weights": "trained" if args.demo else "random (--load-format dummy)",
        "machine": describe_machine(),
        "environment": environment,
        "arms": {arm: ARMS[arm] for arm in args.arms},
        "servers": [],
        "runs": [],
    }


def chosen_workloads(args: argparse.Namespace) -> list[Workload]:
    """The workloads of the command line, in order."""
    if args.workloads is not None:
        return chosen(args.workloads, demo=args.demo)
    given = {name: value for name in LENGTHS if (value := vars(args)[name]) is not None}
    base = replace(DEMO if args.demo else PUBLISHED, **given)
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
    parser = _parser()
    args = parser.parse_args(argv[:cut])
    args.server_flags = argv[cut + 1 :]
    for name in (*LENGTHS, "rounds", "repeats", "small_repeats", "sweep_rounds", "waves"):
        value = vars(args)[name]
        if value is not None and value < 1:
            parser.error(f"{_flag(name)} {value}: must be at least 1")
    for name in (*LENGTHS, "concurrency"):
        if args.workloads is not None and vars(args)[name] is not None:
            parser.error(
                f"{_flag(name)} makes a workload of its own; leave out --workloads or {_flag(name)}"
            )
    if not 1 <= args.accept_length < math.inf:
        parser.error(
            f"--accept-length {args.accept_length:g}: must be a number of at least 1, the bonus token"
        )
    if args.accept_length > VERIFY_ROWS and not args.server_flags:
        parser.error(
            f"--accept-length {args.accept_length:g}: a verify has {VERIFY_ROWS} rows; name at most that, or "
            "other --speculative-* flags after --"
        )
    if args.demo and args.model_path is not None:
        parser.error(
            f"--model-path {args.model_path}: --demo runs the bundled model; leave one out"
        )
    if not args.sample_s > 0:
        parser.error(f"--sample-s {args.sample_s:g}: must be above 0")
    check_output(parser, "--out", args.out)
    check_output(parser, "--markdown", args.markdown)
    return args


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file; logs go beside it")
    parser.add_argument("--markdown", type=Path, help="write the tables there, too")
    parser.add_argument("--model-path", help="folder of a checkpoint or of a config.json alone")
    parser.add_argument(
        "--workloads",
        type=names_of(WORKLOADS),
        help="what each server answers, of published,small,sweep (published)",
    )
    parser.add_argument("--requests", type=int, help="other requests than 25")
    parser.add_argument("--input-len", type=int, help="other prompts than 26000 tokens")
    parser.add_argument("--output-len", type=int, help="other answers than 2000 tokens")
    parser.add_argument("--concurrency", type=numbers, help="a sweep of one's own: 1,4,8,16,25")
    parser.add_argument("--waves", type=int, default=1, help="its requests for each one in flight")
    parser.add_argument("--arms", type=names_of(ARMS), default=["off", "on"], help="off,on")
    parser.add_argument(
        "--rounds", type=int, default=1, help="times that each arm has its turn; order alternates"
    )
    parser.add_argument(
        "--repeats", type=int, default=2, help="measured runs of a workload in each turn (2)"
    )
    parser.add_argument(
        "--small-repeats",
        type=int,
        default=SMALL_REPEATS,
        help=f"the same for the small workloads, which take seconds ({SMALL_REPEATS})",
    )
    parser.add_argument(
        "--sweep-rounds", type=int, default=1, help="rounds in which the sweep is run, too (1)"
    )
    parser.add_argument(
        "--warmup", choices=("short", "full"), default="short", help="what is run and discarded"
    )
    parser.add_argument("--budget-s", type=float, default=570.0, help="stop in time for this")
    parser.add_argument(
        "--accept-length", type=float, default=ACCEPT_LENGTH, help="pretended (3.5)"
    )
    parser.add_argument("--sample-s", type=float, default=0.5, help="seconds between two looks")
    parser.add_argument(
        "--demo", action="store_true", help="bundled model on the CPU, tiny workloads"
    )
    parser.add_argument(
        "--published-capacity",
        action="store_true",
        help="limit each arm's KV pool to the tokens published for its H100 run",
    )
    return parser


def numbers(text: str) -> list[int]:
    """Numbers of at least 1, separated by commas."""
    try:
        values = [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write numbers such as 1,4,8") from None
    if min(values) < 1 or len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(
            f"{text!r}: every number must be at least 1 and be there once"
        )
    return values


if __name__ == "__main__":
    raise SystemExit(main())
