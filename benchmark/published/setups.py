"""What the published comparison consists of: geometry, server flags, workloads, and others' figures."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GEOMETRY = ROOT / "test" / "registered" / "unit" / "model_configs" / "Qwen3.6-35B-A3B-FP8.json"

VERIFY_ROWS = 4
SPECULATION = (
    "--speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1 "
    f"--speculative-num-draft-tokens {VERIFY_ROWS}"
).split()
PUBLISHED_FLAGS = [
    *("--load-format dummy --skip-tokenizer-init --device-memory-gb 80").split(),
    *("--mem-fraction-static 0.8 --kv-cache-dtype bf16 --page-size 64").split(),
    *("--max-running-requests 25 --max-mamba-cache-size 150 --enable-hierarchical-cache").split(),
    *SPECULATION,
]
DEMO_FLAGS = [
    *"--device cpu --cpu-threads 1 --page-size 64 --max-running-requests 4".split(),
    *SPECULATION,
]
ARMS = {
    "off": [],
    "on": ["--enable-linear-lossless-verify"],
}
"""Arm -> its flags. `off` keeps a copy of the state for every draft token, as others do."""

PUBLISHED_TOKENS = {"off": 498_880, "on": 788_224}
ACCEPT_LENGTH = 3.5


@dataclass(frozen=True)
class Workload:
    """Requests of equal length, all sent at once but at most ``concurrency`` in flight."""

    name: str
    requests: int
    input_len: int
    output_len: int
    concurrency: int


PUBLISHED = Workload("25 x 26k/2k", 25, 26_000, 2_000, 25)
SMALL = (Workload("8 x 4k/512", 8, 4_096, 512, 8), Workload("1 x 4k/512", 1, 4_096, 512, 1))
DEMO = Workload("demo", 4, 160, 24, 4)
WORKLOADS = {
    "published": (PUBLISHED,),
    "small": SMALL,
    "sweep": tuple(
        Workload(f"{n} x 26k/2k", n, PUBLISHED.input_len, PUBLISHED.output_len, n)
        for n in (1, 4, 8, 16)
    ),
}
"""Name -> workloads. A sweep's last point is the published workload itself."""

DEMO_WORKLOADS = {
    "published": (DEMO,),
    "small": (Workload("2 x 40/8", 2, 40, 8, 2), Workload("1 x 40/8", 1, 40, 8, 1)),
    "sweep": tuple(
        Workload(f"{n} x 160/24", n, DEMO.input_len, DEMO.output_len, n) for n in (1, 2)
    ),
}
"""The same names for the bundled model on a CPU."""


SMALL_REPEATS = 5
"""Measured runs of a small workload for each one of the others: they are short and so less steady."""


def is_in(name: str, workload: Workload) -> bool:
    """Whether ``workload`` is one of those behind ``name``, of a GPU or of the bundled model."""
    return workload in (*WORKLOADS[name], *DEMO_WORKLOADS[name])


def chosen(names: Sequence[str], *, demo: bool) -> list[Workload]:
    """The workloads behind the names, in the order given."""
    table = DEMO_WORKLOADS if demo else WORKLOADS
    return [workload for name in names for workload in table[name]]


def names_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """A parser of a flag's comma-separated names, each of them known and given once."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        if len(set(names)) < len(names):
            raise argparse.ArgumentTypeError(f"{text!r} names something twice; leave one out")
        return names

    return parse


def in_turn(arms: Sequence[str], round_index: int) -> list[str]:
    """The arms of a round: every second one goes backwards, so that none is always the first."""
    return list(arms) if round_index % 2 == 0 else list(reversed(arms))


@dataclass(frozen=True)
class Reference:
    """Figures of another machine or engine for the published workload; None where not given."""

    name: str
    scratch_gib: float | None = None
    tokens: int | None = None
    running: int | None = None
    duration_s: float | None = None
    output_rate: float | None = None
    ttft_s: float | None = None
    tpot_ms: float | None = None


REFERENCES = (
    Reference("H100, off", 6.09, 498_880, 18, 36.75, 1360.6),
    Reference("H100, on", 0.10, 788_224, 24, 33.03, 1513.7),
    Reference("SGLang 0.5.17, H200", None, 498_880, 18, 34.3, 1460, 11.0, 7.5),
    Reference("the same, ReplaySSM", None, 863_936, 24, 31.7, 1578, 8.0, 9.3),
)
"""The first two are the feature's published figures, measured on one H100; the others were measured
on one H200 with 80 GB emulated, the same workload and the same pretended acceptance."""

SMALL_REFERENCES = {
    "8 x 4k/512": "SGLang 0.5.17 on one H200: 1,560 tok/s, with ReplaySSM 1,650 tok/s",
    "1 x 4k/512": "SGLang 0.5.17 on one H200: TPOT 2.31 ms",
}


def check_output(parser: argparse.ArgumentParser, flag: str, path: Path | None) -> None:
    """Refuse a file that cannot be written before anything is measured, not after."""
    if path is None:
        return
    if not path.parent.is_dir():
        parser.error(f"{flag} {path}: no folder {path.parent}; make it first")
    if path.is_dir():
        parser.error(f"{flag} {path}: is a folder; name a file in it")
    needed = [path.parent] if not path.exists() or path.is_file() else []
    needed += [path] if path.exists() else []
    if not all(os.access(each, os.W_OK) for each in needed):
        parser.error(f"{flag} {path}: may not be written; name another file")


def write_json(path: Path, document: Any) -> None:
    """Write in one go: who is killed meanwhile leaves the file as it was."""
    text = json.dumps(document, indent=1) + "\n"
    if path.exists() and not path.is_file():  # a pipe or a terminal
        path.write_text(text, encoding="utf-8")
        return
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def in_plain_words(measure: Callable[[], int]) -> int:
    """The exit status of ``measure``; 2 and one line for a model, flag or file that cannot be used, 130
    for Ctrl-C."""
    try:
        return measure()
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: --out holds what was measured before", file=sys.stderr)
        return 128 + signal.SIGINT


@contextmanager
def model_directory(path: str | None) -> Iterator[str]:
    """A model path for the server: the one given, or a folder with the published geometry alone."""
    if path is not None:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="published-geometry-") as folder:
        yield geometry_folder(GEOMETRY, Path(folder) / GEOMETRY.stem)


def geometry_folder(config: Path, target: Path) -> str:
    """Make the folder ``target`` with a copy of ``config`` as its config.json, and no weights."""
    target.mkdir(parents=True)
    shutil.copy(config, target / "config.json")
    return str(target)


def flags_of_arm(
    arm: str, common: Sequence[str], *, published_capacity: bool, more: Sequence[str]
) -> list[str]:
    """Server flags of one arm, the model path aside."""
    flags = [*common, *ARMS[arm]]
    if published_capacity:
        flags += ["--max-total-tokens", str(PUBLISHED_TOKENS[arm])]
    return [*flags, *more]
