"""The command line of run.py."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from setups import (
    ACCEPT_LENGTH,
    ARMS,
    DEMO,
    PUBLISHED,
    SMALL_REPEATS,
    WORKLOADS,
    Workload,
    check_output,
    chosen,
    names_of,
)

LENGTHS = ("requests", "input_len", "output_len")


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


def read_arguments(argv: list[str], description: str | None) -> argparse.Namespace:
    """The command line; what follows `--` are server flags."""
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = _parser(description)
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
    if not args.accept_length >= 1:
        parser.error(f"--accept-length {args.accept_length:g}: must be at least 1, the bonus token")
    if not args.sample_s > 0:
        parser.error(f"--sample-s {args.sample_s:g}: must be above 0")
    check_output(parser, "--out", args.out)
    check_output(parser, "--markdown", args.markdown)
    return args


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
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
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: every number must be at least 1")
    return values
