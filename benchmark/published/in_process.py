"""The published workload without HTTP: scheduler and model in this process, arms in turns.

    PYTHONPATH=python python benchmark/published/in_process.py --out in_process.json --published-capacity

What run.py measures from outside, this measures from inside: no sockets, no detokenizing, and no server
to start for every arm, so all of it fits into three minutes. Prompts are all there at the start.
`--workloads published,small,sweep` adds the small set-ups and 1 to 16 requests of the published lengths.
Words after `--` are further server flags. JSON is written after every run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine_arm import EngineArm, Turn
from machine import describe_machine
from setups import (
    ACCEPT_LENGTH,
    ARMS,
    DEMO,
    DEMO_FLAGS,
    PUBLISHED_FLAGS,
    SMALL_REPEATS,
    WORKLOADS,
    Workload,
    check_output,
    chosen,
    flags_of_arm,
    in_plain_words,
    in_turn,
    is_in,
    model_directory,
    names_of,
    write_json,
)

WARM_UP = Workload("warm-up", 2, 9_000, 24, 2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the turns. 0, 1 if there was no time for a single one, 2 for what cannot run."""
    args = _parse(argv)
    return in_plain_words(lambda: _measure(args))


def _measure(args: argparse.Namespace) -> int:
    os.environ.setdefault("SGLANG_SIMULATE_ACC_LEN", str(ACCEPT_LENGTH))
    os.environ.setdefault("SGLANG_SIMULATE_ACC_TOKEN_MODE", "real-draft-token")
    common = DEMO_FLAGS if args.demo else PUBLISHED_FLAGS
    workloads = chosen(args.workloads, demo=args.demo)
    turns: list[Turn] = []
    stop = time.monotonic() + args.budget_s
    with model_directory("demo" if args.demo else args.model_path) as path:
        for number in range(args.rounds):
            for name in in_turn(args.arms, number):
                if time.monotonic() > stop:
                    break
                flags = flags_of_arm(
                    name, common, published_capacity=args.published_capacity, more=args.more
                )
                arm = EngineArm(name, ["--model-path", path, *flags])
                arm.run(DEMO if args.demo else WARM_UP)
                for workload in workloads:
                    if is_in("small", workload):
                        arm.run(replace(workload, output_len=8))
                    for _ in range(args.small_repeats if is_in("small", workload) else 1):
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
    write_json(out, record)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--model-path", help="folder of a checkpoint or of a config.json alone")
    parser.add_argument("--arms", type=names_of(ARMS), default=["off", "on"], help="off,on")
    parser.add_argument(
        "--workloads",
        type=names_of(WORKLOADS),
        default=["published"],
        help="of published,small,sweep",
    )
    parser.add_argument("--rounds", type=int, default=2, help="times that each arm has its turn")
    parser.add_argument(
        "--small-repeats",
        type=int,
        default=SMALL_REPEATS,
        help=f"runs of a small workload in each turn ({SMALL_REPEATS})",
    )
    parser.add_argument("--budget-s", type=float, default=500.0, help="start no turn after this")
    parser.add_argument("--demo", action="store_true", help="bundled model on the CPU, tiny")
    parser.add_argument(
        "--published-capacity",
        action="store_true",
        help="limit each arm's KV pool to the tokens published for its H100 run",
    )
    parser.add_argument("more", nargs="*", help="server flags, after --")
    args = parser.parse_args(argv)
    for flag, value in (("--rounds", args.rounds), ("--small-repeats", args.small_repeats)):
        if value < 1:
            parser.error(f"{flag} {value}: must be at least 1")
    check_output(parser, "--out", args.out)
    return args


if __name__ == "__main__":
    raise SystemExit(main())
