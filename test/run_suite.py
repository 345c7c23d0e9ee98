#!/usr/bin/env python3
"""Run the registered test files of one backend, suite by suite.

    python test/run_suite.py --backend cpu                       everything for the CPU
    python test/run_suite.py --backend cpu --suite unit          one suite
    python test/run_suite.py --backend cuda --list               what would run, and where
    python test/run_suite.py --backend cpu --partition-id 0 --partition-size 2

Each suite runs in a pytest process of its own, so that one suite's memory and settings do not reach
the next; one that compiles and interprets kernels in two, side by side. The closing lines count passed, failed and skipped tests, and say why tests were skipped.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REGISTERED = ROOT / "test" / "registered"
SOURCE = ROOT / "python"
sys.path.insert(0, str(SOURCE))

from sglang.test.ci.ci_register import (  # noqa: E402
    CIRegistry,
    HWBackend,
    auto_partition,
    collect_tests,
)

SLOWEST_SHOWN = 8
FIRST_SUITES = ("unit", "kernels", "attention", "e2e")
PYTEST_RAN_NOTHING = 5
PROCESSES = {"kernels": 2}
"""Suites whose tests watch no clock, and into how many processes they are divided."""


@dataclass
class Outcome:
    """Counts of one suite, or of several added up."""

    passed: int = 0
    failed: int = 0
    skip_reasons: collections.Counter[str] = field(default_factory=collections.Counter)
    seconds: float = 0.0
    file_seconds: dict[str, float] = field(default_factory=dict)

    def spent(self, file: str, seconds: float) -> None:
        self.file_seconds[file] = self.file_seconds.get(file, 0.0) + seconds

    @property
    def skipped(self) -> int:
        return self.skip_reasons.total()

    def add(self, other: Outcome) -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skip_reasons += other.skip_reasons
        self.seconds += other.seconds
        for file, seconds in other.file_seconds.items():
            self.spent(file, seconds)


def find_files() -> list[str]:
    """Every test file, as a path from the repository's top."""
    return sorted(str(p.relative_to(ROOT)) for p in REGISTERED.rglob("test_*.py"))


def select(args: argparse.Namespace) -> dict[str, list[CIRegistry]]:
    """The registrations that were asked for, by suite, in the order in which suites run."""
    os.chdir(ROOT)
    backend = HWBackend[args.backend.upper()]
    chosen = [
        test
        for test in collect_tests(find_files())
        if test.backend == backend
        and (args.nightly or not test.nightly)
        and (args.suite is None or test.effective_suite == args.suite)
    ]
    for test in chosen:
        if test.disabled is not None:
            print(f"disabled: {test.filename} on {backend.name}: {test.disabled}")
    enabled = [test for test in chosen if test.disabled is None]
    share = auto_partition(enabled, args.partition_id, args.partition_size)
    suites: dict[str, list[CIRegistry]] = {}
    for test in sorted(share, key=lambda t: t.filename):
        suites.setdefault(test.effective_suite, []).append(test)
    rank = {name: i for i, name in enumerate(FIRST_SUITES)}
    return dict(sorted(suites.items(), key=lambda item: (rank.get(item[0], len(rank)), item[0])))


def _file_of(classname: str) -> str:
    """`test.registered.unit.test_x.TestClass` -> `unit/test_x`."""
    parts = classname.split(".")
    last = next((i for i, part in enumerate(parts) if part.startswith("test_")), len(parts) - 1)
    return "/".join(parts[max(0, last - 1) : last + 1])


def read_report(report: Path) -> Outcome:
    """Count the test cases of a JUnit file."""
    outcome = Outcome()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        skipped = case.find("skipped")
        outcome.spent(_file_of(case.get("classname", "")), float(case.get("time", 0)))
        if case.find("failure") is not None or case.find("error") is not None:
            outcome.failed += 1
        elif skipped is not None:
            outcome.skip_reasons[skipped.get("message") or "no reason given"] += 1
        else:
            outcome.passed += 1
    return outcome


def run_suite(name: str, tests: list[CIRegistry], pytest_args: list[str]) -> Outcome:
    """Run one suite. A pytest that ends without a report counts as one failure."""
    print(
        f"== {name}: {len(tests)} files, about {sum(t.est_time for t in tests):.0f} s", flush=True
    )
    started, outcome = time.monotonic(), Outcome()
    count = min(PROCESSES.get(name, 1), os.cpu_count() or 1, len(tests))
    with tempfile.TemporaryDirectory(prefix="run-suite-") as folder:
        parts = [
            _Part(name, auto_partition(tests, i, count), pytest_args, Path(folder) / str(i))
            for i in range(count)
        ]
        for part in parts:
            outcome.add(part.finish())
    outcome.seconds = time.monotonic() - started
    return outcome


class _Part:
    """One pytest process; the first shows its progress at once, others when they are finished."""

    def __init__(
        self, name: str, tests: list[CIRegistry], pytest_args: list[str], folder: Path
    ) -> None:
        folder.mkdir()
        self._name = name
        self._report = folder / "report.xml"
        self._shown = folder / "output.txt" if folder.name != "0" else None
        environment = dict(os.environ)
        paths = [str(SOURCE), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={self._report}"]
        command += [*pytest_args, *(test.filename for test in tests)]
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(self._shown.open("wb")) if self._shown else None
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output
            )

    def finish(self) -> Outcome:
        status = self._process.wait()
        if self._shown is not None:
            print(self._shown.read_text(encoding="utf-8", errors="replace"), flush=True)
        outcome = read_report(self._report) if self._report.is_file() else Outcome()
        if status not in (0, PYTEST_RAN_NOTHING) and outcome.failed == 0:
            print(f"{self._name}: pytest ended with status {status}", flush=True)
            outcome.failed = 1
        return outcome


def print_summary(outcomes: dict[str, Outcome]) -> Outcome:
    """Print one line for each suite, the reasons of skips, and the total as the last line."""
    total = Outcome()
    print("\n== summary")
    for name, outcome in outcomes.items():
        total.add(outcome)
        print(
            f"{name}: {outcome.passed} passed, {outcome.failed} failed, "
            f"{outcome.skipped} skipped in {outcome.seconds:.0f} s"
        )
    slowest = sorted(total.file_seconds.items(), key=lambda item: -item[1])[:SLOWEST_SHOWN]
    print("slowest: " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in slowest))
    for reason, count in total.skip_reasons.most_common():
        print(f"skipped {count}: {reason}")
    print(f"{total.passed} passed, {total.failed} failed, {total.skipped} skipped", flush=True)
    return total


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cpu", choices=[b.name.lower() for b in HWBackend])
    parser.add_argument("--suite", help="one suite instead of all")
    parser.add_argument("--nightly", action="store_true", help="the long tests too")
    parser.add_argument("--partition-id", type=int, default=0)
    parser.add_argument("--partition-size", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="print the files and run nothing")
    parser.add_argument("pytest_args", nargs="*", help="after --: passed on to pytest")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    suites = select(args)
    if args.list:
        for name, tests in suites.items():
            for test in tests:
                print(f"{name}\t{test.est_time:g} s\t{test.filename}")
        return 0
    if not suites:
        print(f"no test is registered for {args.backend} {args.suite or ''}")
        return 1
    outcomes = {name: run_suite(name, tests, args.pytest_args) for name, tests in suites.items()}
    total = print_summary(outcomes)
    return 0 if total.failed == 0 and total.passed > 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
