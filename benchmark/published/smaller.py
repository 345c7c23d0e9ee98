"""The smaller published set-ups, run: 8 requests, 40 state slots, four models and drafters.

    PYTHONPATH=python python benchmark/published/smaller.py --out smaller.json --markdown smaller.md
    PYTHONPATH=python python benchmark/published/smaller.py --out demo.json --demo    # tiny models, CPU

35B with MTP (4 rows) and DFlash (16), 27B with DFlash 2 (8) and DSpark (8), target and drafter in the
published geometry with random weights. Each arm of each is an engine in this process, without HTTP and
without a host tier; it runs a warm-up, then 8 and 1 requests of 4k/512. Acceptance is pretended, with a
fixed length for each width that the output names: the text is meaningless, the work is not. Words after
`--` are further server flags. Results are written after every run; a set-up that fails is named in them,
and the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from capacity import CONFIGS, SETUPS, SetUp
from engine_arm import EngineArm, Turn, free_memory
from machine import describe_machine
from report import markdown, ratios, text_table
from setups import (
    ARMS,
    SMALL,
    SPECULATION,
    Workload,
    check_output,
    geometry_folder,
    in_turn,
    names_of,
    write_json,
)

from sglang.bundled import resolve_model_path

KINDS = dict(zip(("mtp", "dflash", "dflash2", "dspark"), SETUPS[1:], strict=True))
ACCEPT_LENGTHS = {4: 3.5, 8: 5.0, 16: 6.0}
"""Rows of a verify -> tokens that a step is pretended to yield on average, bonus included."""

FLAGS = (
    "--load-format dummy --skip-tokenizer-init --device-memory-gb 80 --mem-fraction-static 0.8 "
    "--kv-cache-dtype bf16 --page-size 64"
).split()
DEMO_FLAGS = (
    "--load-format dummy --skip-tokenizer-init --device cpu --cpu-threads 1 --page-size 64 "
    "--max-total-tokens 4096"
).split()
DEMO_SMALL = (Workload("8 x 40/8", 8, 40, 8, 8), Workload("1 x 40/8", 1, 40, 8, 1))
DEMO_KINDS = {
    "mtp": replace(KINDS["mtp"], model="demo"),
    "dflash": replace(KINDS["dflash"], model="demo", draft="demo-dflash", draft_tokens=8),
    "dflash2": replace(KINDS["dflash2"], model="demo", draft="demo-dflash"),
    "dspark": replace(KINDS["dspark"], model="demo", draft="demo-dspark"),
}
DEMO_DFLASH2 = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 16,
    "selector_top_k": 4,
}
"""What makes a DFlash 2 drafter of the bundled DFlash one, as far as shapes go."""


@dataclass
class Comparison:
    """What has been run so far, and the clock."""

    args: argparse.Namespace
    document: dict[str, Any]
    started: float = field(default_factory=time.monotonic)
    longest_s: float = 0.0

    def has_time(self) -> bool:
        """Whether a turn fits if it takes as long as the longest so far."""
        left = self.args.budget_s - (time.monotonic() - self.started)
        if left > max(1.1 * self.longest_s, 1.0):
            return True
        self.document["stopped"] = f"{left:.0f} s left of --budget-s, too few for another turn"
        return False

    def keep(self, setup: SetUp, workload: Workload, place: tuple[int, int], turn: Turn) -> None:
        """Add a measured run, in the form that run.py's have."""
        self.document["runs"].append(
            {
                "arm": turn.arm,
                "round": place[0],
                "repeat": place[1],
                "measured": True,
                "workload": asdict(replace(workload, name=f"{setup.name}, {workload.name}")),
                "figures": {
                    "duration": turn.seconds,
                    "output_throughput": turn.output_rate,
                    "input_throughput": turn.input_tokens / turn.seconds,
                    "mean_ttft_ms": 1000 * turn.mean_ttft_s,
                    "mean_tpot_ms": turn.mean_tpot_ms,
                    "p99_itl_ms": None,
                    "accept_length": turn.accept_length,
                    "failed": 0,
                },
                "capacity": {
                    "verify_scratch_bytes": turn.verify_scratch_bytes,
                    "verify_ssm_scratch_bytes": turn.verify_ssm_scratch_bytes,
                    "max_total_num_tokens": turn.max_total_num_tokens,
                },
                "max_running_seen": turn.most_running,
                "num_retracted": turn.retractions,
                "samples": [],
            }
        )
        self.write()

    def write(self) -> None:
        self.document["on_over_off"] = ratios(self.document)
        write_json(self.args.out, self.document)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the turns. 0 if every set-up asked for has a run of every arm, else 1."""
    args = read_arguments(sys.argv[1:] if argv is None else list(argv))
    kinds = DEMO_KINDS if args.demo else KINDS
    setups = [kinds[name] for name in args.setups]
    comparison = Comparison(args, head(args, setups))
    os.environ["SGLANG_SIMULATE_ACC_METHOD"] = "match-expected"
    os.environ["SGLANG_SIMULATE_ACC_TOKEN_MODE"] = "real-draft-token"
    done = run_turns(comparison, setups)
    comparison.write()
    brief = summary(comparison.document, setups, DEMO_SMALL if args.demo else SMALL)
    print(f"{text_table(comparison.document)}\n\n{brief}")
    if args.markdown is not None:
        args.markdown.write_text(f"{brief}\n\n{markdown(comparison.document)}")
    wanted = {(setup.name, arm) for setup in setups for arm in args.arms}
    return 0 if done == wanted and not comparison.document["failures"] else 1


def run_turns(comparison: Comparison, setups: Sequence[SetUp]) -> set[tuple[str, str]]:
    """Every arm of every set-up, as often as asked for; return which (set-up, arm) were measured."""
    done = set()
    turns = [
        (number, setup, arm)
        for number in range(comparison.args.rounds)
        for setup in setups
        for arm in in_turn(comparison.args.arms, number)
    ]
    for number, setup, arm in turns:
        if not comparison.has_time():
            break
        begin = time.monotonic()
        try:
            run_turn(comparison, setup, arm, number)
            done.add((setup.name, arm))
        except KeyboardInterrupt:
            comparison.document["stopped"] = "interrupted"
            break
        except Exception as error:  # one set-up that cannot run must not cost the others
            traceback.print_exc()
            why = f"{type(error).__name__}: {error}"
            comparison.document["failures"].append({"setup": setup.name, "arm": arm, "why": why})
            comparison.write()
        free_memory()
        comparison.longest_s = max(comparison.longest_s, time.monotonic() - begin)
    return done


def run_turn(comparison: Comparison, setup: SetUp, arm: str, number: int) -> None:
    """Build the arm's engine, warm it up, measure both workloads, close it."""
    args = comparison.args
    os.environ["SGLANG_SIMULATE_ACC_LEN"] = str(ACCEPT_LENGTHS[setup.draft_tokens])
    with tempfile.TemporaryDirectory(prefix="published-geometry-") as folder:
        flags = flags_of(setup, Path(folder), arm, demo=args.demo) + args.server_flags
        say(f"{setup.name}, {arm}: building")
        engine = EngineArm(arm, flags)
        try:
            say(f"{setup.name}, {arm}: ready after {engine.start_s:.1f} s")
            for workload in DEMO_SMALL if args.demo else SMALL:
                engine.run(replace(workload, output_len=min(workload.output_len, 64)))
                for repeat in range(args.repeats):
                    turn = engine.run(workload)
                    comparison.keep(setup, workload, (number, repeat), turn)
                    say(
                        f"{setup.name}, {arm}, {workload.name}: {turn.seconds:.2f} s, "
                        f"{turn.output_rate:.1f} tok/s out, TPOT {turn.mean_tpot_ms:.2f} ms, "
                        f"{turn.max_total_num_tokens} tokens"
                    )
        finally:
            engine.close()


def flags_of(setup: SetUp, folder: Path, arm: str, *, demo: bool) -> list[str]:
    """Server flags of one arm; models are made in ``folder``, as config.json without weights."""

    def config_of(name: str) -> Path:
        return Path(resolve_model_path(name)) / "config.json" if demo else CONFIGS / f"{name}.json"

    target = geometry_folder(config_of(setup.model), folder / setup.model)
    flags = [*("--model-path", target), *(DEMO_FLAGS if demo else FLAGS)]
    flags += ["--max-running-requests", str(setup.requests)]
    flags += ["--max-mamba-cache-size", str(setup.state_slots), *ARMS[arm]]
    if setup.draft is None:
        return flags + SPECULATION
    draft = geometry_folder(config_of(setup.draft), folder / setup.draft)
    if demo and setup.name == KINDS["dflash2"].name:
        _make_dflash2(Path(draft) / "config.json")
    return [
        *flags,
        *("--speculative-algorithm", setup.algorithm, "--speculative-draft-model-path", draft),
        *("--speculative-num-draft-tokens", str(setup.draft_tokens)),
    ]


def _make_dflash2(config: Path) -> None:
    raw = json.loads(config.read_text())
    raw["architectures"] = ["DFlash2DraftModel"]
    raw["dflash_config"] |= DEMO_DFLASH2
    config.write_text(json.dumps(raw))


def head(args: argparse.Namespace, setups: Sequence[SetUp]) -> dict[str, Any]:
    """What the results say before the first run."""
    lengths = ", ".join(
        f"{setup.name} {ACCEPT_LENGTHS[setup.draft_tokens]:g} of {setup.draft_tokens} rows"
        for setup in setups
    )
    workloads = DEMO_SMALL if args.demo else SMALL
    notes = {} if args.demo else {s.name: published_note(s) for s in setups}
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(sys.argv),
        "machine": describe_machine(),
        "model": "demo" if args.demo else "published geometries, each in an engine without HTTP",
        "weights": "random (--load-format dummy), of the drafter, too",
        "acceptance": f"pretended, tokens a verify step on average, bonus included: {lengths}; "
        "outputs are not the model's",
        "warm_up": "the same prompts' shape with answers of at most 64 tokens, discarded",
        "arms": {arm: ARMS[arm] for arm in args.arms},
        "notes": {
            f"{setup}, {workload.name}": note
            for setup, note in notes.items()
            for workload in workloads
        },
        "failures": [],
        "runs": [],
    }


def summary(
    document: dict[str, Any], setups: Sequence[SetUp], workloads: Sequence[Workload]
) -> str:
    """All set-ups in one table, off -> on; Markdown."""
    lines = [
        "| set-up | scratch, GiB | KV pool, tokens | "
        + " | ".join(f"{w.name}, s | tok/s | on / off" for w in workloads)
        + " |",
        "|---|---|---|" + "---|---|---|" * len(workloads),
    ]
    ratio_of = {entry["workload"]: entry["ratio"] for entry in ratios(document)}
    for setup in setups:
        cells = [f"{setup.name}, {ACCEPT_LENGTHS[setup.draft_tokens]:g} of {setup.draft_tokens}"]
        runs = [r for r in document["runs"] if r["workload"]["name"].startswith(f"{setup.name}, ")]
        for name, factor, form in (
            ("verify_ssm_scratch_bytes", 1 / (1 << 30), ".2f"),
            ("max_total_num_tokens", 1, ",.0f"),
        ):
            cells.append(_both(document, runs, "capacity", name, factor, form))
        for workload in workloads:
            name = f"{setup.name}, {workload.name}"
            own = [r for r in runs if r["workload"]["name"] == name]
            cells.append(_both(document, own, "figures", "duration", 1, ".2f"))
            cells.append(_both(document, own, "figures", "output_throughput", 1, ",.0f"))
            cells.append(f"{ratio_of[name]:.3f}" if name in ratio_of else "-")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _both(
    document: dict[str, Any],
    runs: Sequence[dict[str, Any]],
    group: str,
    name: str,
    factor: float,
    form: str,
) -> str:
    """Median of each arm, joined by an arrow."""
    shown = []
    for arm in document["arms"]:
        values = [factor * run[group][name] for run in runs if run["arm"] == arm]
        shown.append(format(statistics.median(values), form) if values else "-")
    return " → ".join(shown)


def published_note(setup: SetUp) -> str:
    """The published figures of capacity, for below the table."""
    before, after = setup.scratch_gib
    tokens = setup.stock_tokens
    return (
        f"published: {setup.requests} requests, {setup.state_slots} state slots, scratch "
        f"{before:.2f} to {after:.2f} GiB, {tokens:,} to {tokens + setup.gained_tokens:,} tokens"
    )


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
    parser.add_argument(
        "--setups", type=names_of(KINDS), default=list(KINDS), help=f"of {','.join(KINDS)} (all)"
    )
    parser.add_argument("--arms", type=names_of(ARMS), default=["off", "on"], help="off,on")
    parser.add_argument(
        "--rounds", type=int, default=1, help="times that each arm has its turn; order alternates"
    )
    parser.add_argument("--repeats", type=int, default=3, help="measured runs in a turn (3)")
    parser.add_argument("--budget-s", type=float, default=560.0, help="start no turn past this")
    parser.add_argument("--demo", action="store_true", help="tiny models on the CPU")
    args = parser.parse_args(argv[:cut])
    args.server_flags = argv[cut + 1 :]
    for flag, value in (("--rounds", args.rounds), ("--repeats", args.repeats)):
        if value < 1:
            parser.error(f"{flag} {value}: must be at least 1")
    check_output(parser, "--out", args.out)
    check_output(parser, "--markdown", args.markdown)
    return args


if __name__ == "__main__":
    raise SystemExit(main())
