"""Run the workloads on both sides of a comparison, twice each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field

from sglang.parity.client import Client, NativeClient, ServerFacts
from sglang.parity.compare import compare_runs
from sglang.parity.report import AlgorithmReport
from sglang.parity.servers import LAUNCHER, ServerProcess
from sglang.parity.workloads import WORKLOADS, Outcome, Sizes

Open = Callable[[], AbstractContextManager[Client]]
Runs = list[dict[str, Outcome]]
NUM_RUNS = 2


@dataclass(frozen=True)
class Job:
    """What is run on each server.

    expect_resume    a second turn must report cached tokens, else it proves nothing
    expect_lossless  the left server rolls back by snapshots, the right one by update tuples; both
                     must have verified drafts and told digests of their states
    together         run both servers at the same time; else one device need not hold both
    """

    workloads: Sequence[str]
    sizes: Sizes
    expect_resume: bool = True
    expect_lossless: bool = True
    together: bool = False


@dataclass
class Side:
    """One server's outcomes."""

    name: str
    facts: ServerFacts = field(default_factory=ServerFacts)
    runs: Runs = field(default_factory=list)

    def completions(self) -> Iterator:
        """All of both runs."""
        for run in self.runs:
            for outcome in run.values():
                yield from outcome.completions


def started(
    flags: Sequence[str], *, api_key: str | None = None, launcher: Sequence[str] = LAUNCHER
) -> Open:
    """A server that is started for the comparison and stopped after it."""

    @contextmanager
    def opened() -> Iterator[Client]:
        with ServerProcess(flags, launcher=launcher) as server:
            yield NativeClient(server.url, api_key=api_key, digests=True)

    return opened


def running(make: Callable[[], Client]) -> Open:
    """A server that runs already and stays."""

    @contextmanager
    def opened() -> Iterator[Client]:
        yield make()

    return opened


def run_pair(label: str, opens: dict[str, Open], job: Job) -> AlgorithmReport:
    """Compare two servers.

    ``opens``  the two sides by name, left first
    Raises: ServerError if a server cannot be started or asked.
    """
    report = AlgorithmReport(label)
    sides: list[Side] = []
    with ExitStack() as stack:
        if job.together:
            for side, client in _observe_together(stack, opens, job, label):
                _compare(report, sides, side, client)
        else:
            for name, opened in opens.items():
                with opened() as client:
                    side = _observe(client, job, f"{label}, {name}", name)
                    _compare(report, sides, side, client)
    lengths = [c.accept_length for c in sides[-1].completions() if c.accept_length]
    report.accept_length = sum(lengths) / len(lengths) if lengths else None
    report.problems = _problems(sides, report, job)
    return report


def _observe_together(
    stack: ExitStack, opens: dict[str, Open], job: Job, label: str
) -> list[tuple[Side, Client]]:
    """Start all servers, run everything on all of them; ``stack`` stops them."""
    with ThreadPoolExecutor(len(opens)) as pool:
        starts = [pool.submit(stack.enter_context, opened()) for opened in opens.values()]
    clients = [start.result() for start in starts]
    with ThreadPoolExecutor(len(opens)) as pool:
        runs = [
            pool.submit(_observe, client, job, f"{label}, {name}", name)
            for name, client in zip(opens, clients, strict=True)
        ]
        try:
            observed = [run.result() for run in runs]
        except BaseException:
            stack.close()  # else the pool would wait for answers that nobody needs any more
            raise
    return list(zip(observed, clients, strict=True))


def _observe(client: Client, job: Job, label: str, name: str) -> Side:
    """Run everything on one server."""
    side = Side(name, client.facts())
    for number in range(1, NUM_RUNS + 1):
        side.runs.append(_run_all(client, job, f"{label}, run {number}"))
    return side


def _compare(report: AlgorithmReport, earlier: list[Side], side: Side, client: Client) -> None:
    """Compare a side with itself and with the one before it; its server still runs."""
    report.facts[side.name] = side.facts
    report.within[side.name] = compare_runs(side.runs[0], side.runs[1], client)
    if earlier:
        report.across = compare_runs(earlier[0].runs[0], side.runs[0], client)
    earlier.append(side)


def _run_all(client: Client, job: Job, label: str) -> dict[str, Outcome]:
    """Run the workloads, each on a flushed server."""
    outcomes = {}
    for name in job.workloads:
        say(f"{label}: {name}")
        client.flush()
        outcomes[name] = WORKLOADS[name](client, job.sizes)
    return outcomes


def _problems(sides: list[Side], report: AlgorithmReport, job: Job) -> list[str]:
    """Why an equality found here would prove less than it seems to."""
    problems = []
    for side, lossless in zip(sides, (False, True), strict=True):
        completions = list(side.completions())
        if any(not c.output for c in completions):
            problems.append(f"{side.name}: an answer was empty")
        if not job.expect_lossless:
            continue
        if not sum(c.num_verify or 0 for c in completions):
            problems.append(f"{side.name}: no verify step ran, so nothing was rolled back")
        if any(c.digest is None for c in completions):
            problems.append(f"{side.name}: the server did not tell a digest of its state")
        if side.facts.lossless is not lossless:
            problems.append(
                f"{side.name}: the server says lossless_verify {side.facts.lossless}, not {lossless}"
            )
    turn = report.across.get("turn 2")
    if job.expect_resume and turn is not None:
        if len(turn.cached) < turn.total or min(turn.cached) == 0:
            problems.append(
                f"turn 2: cached tokens are {turn.cached or 'not reported'}, so a second turn did "
                "not resume from a tracked state"
            )
    return problems


def say(text: str) -> None:
    """Progress, apart from the report."""
    print(text, file=sys.stderr, flush=True)
