"""Pictures of results that run.py wrote.

    PYTHONPATH=python python benchmark/published/plot.py results.json sweep.json --out docs/images/published

Draws what the files hold: throughput and TTFT against concurrency if several were run, and the running
and waiting requests and the KV in use over the time of the last measured run of each arm.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

COLOURS = {"off": "#b5482a", "on": "#1f6f8b"}
LABELS = {"off": "default verify", "on": "lossless verify"}
Run = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Draw; print the names of the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+", help="JSON of run.py")
    parser.add_argument("--out", type=Path, required=True, help="folder, made if it is not there")
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    args = parser.parse_args(argv)
    documents = [read(parser, path) for path in args.results]
    runs = [run for document in documents for run in document["runs"] if run["measured"]]
    if not runs:
        parser.error("no measured run in " + ", ".join(str(path) for path in args.results))
    args.out.mkdir(parents=True, exist_ok=True)
    plt.rcParams["svg.hashsalt"] = "published"
    subtitle = heading(documents[-1])
    drawn = []
    if len({run["workload"]["concurrency"] for run in runs}) > 1:
        drawn.append(against_concurrency(runs, subtitle))
    workload = max(runs, key=lambda run: run["workload"]["concurrency"])["workload"]["name"]
    drawn.append(over_time([run for run in runs if run["workload"]["name"] == workload], subtitle))
    for name, figure in zip(("concurrency", "time")[-len(drawn) :], drawn):
        path = args.out / f"published_{name}.{args.format}"
        figure.savefig(path, metadata={"Date": None} if args.format == "svg" else None)
        plt.close(figure)
        print(path)
    return 0


def read(parser: argparse.ArgumentParser, path: Path) -> dict[str, Any]:
    """A result file; ends the program with a sentence if it is none."""
    try:
        document = json.loads(path.read_text())
        document["runs"], document["machine"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"{path}: is no result of run.py ({type(error).__name__}: {error})")
    return document


def heading(document: dict[str, Any]) -> str:
    machine = document["machine"]
    name = (machine["gpu"] or machine["cpu"]).split(",")[0]
    return f"{name}, torch {machine['torch']}, {document['date'][:10]}, acceptance pretended"


def against_concurrency(runs: Sequence[Run], subtitle: str) -> plt.Figure:
    """Output throughput and mean TTFT against requests in flight."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    _by_concurrency(left, runs, lambda run: run["figures"]["output_throughput"])
    left.set_ylabel("output, tokens per second")
    _by_concurrency(right, runs, lambda run: run["figures"]["mean_ttft_ms"] / 1000)
    right.set_ylabel("mean time to first token [s]")
    for axes in (left, right):
        axes.set_xlabel("requests in flight")
        axes.set_ylim(bottom=0)
    left.legend(frameon=False, fontsize=8)
    return _finish(figure, subtitle)


def _by_concurrency(axes: Axes, runs: Sequence[Run], read_value: Callable[[Run], float]) -> None:
    points: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        points[run["arm"]][run["workload"]["concurrency"]].append(read_value(run))
    for arm, by_place in points.items():
        places = sorted(by_place)
        medians = [statistics.median(by_place[place]) for place in places]
        axes.plot(places, medians, "o-", color=COLOURS[arm], label=LABELS[arm], markersize=4)


def over_time(runs: Sequence[Run], subtitle: str) -> plt.Figure:
    """Running and waiting requests, and KV in use, over the last run of each arm."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 5), sharex=True)
    for arm, run in {run["arm"]: run for run in runs}.items():
        times = [sample["t_s"] for sample in run["samples"]]
        if not times:
            continue
        colour, label = COLOURS[arm], LABELS[arm]
        running = [sample["num_running_reqs"] for sample in run["samples"]]
        waiting = [sample["num_waiting_reqs"] for sample in run["samples"]]
        used = [sample["num_used_tokens"] / 1000 for sample in run["samples"]]
        top.step(times, running, where="post", color=colour, label=f"{label}: running")
        top.step(times, waiting, where="post", color=colour, ls=":", label=f"{label}: waiting")
        bottom.plot(times, used, color=colour, label=label)
        held = run["capacity"]["max_total_num_tokens"]
        if held:
            bottom.axhline(held / 1000, color=colour, lw=0.8, ls="--")
    top.set_ylabel("requests")
    bottom.set_ylabel("KV in use, thousand tokens\n(dashed: all there is)")
    bottom.set_xlabel("seconds since the first request")
    for axes in (top, bottom):
        axes.set_ylim(bottom=0)
        handles, _ = axes.get_legend_handles_labels()
        if handles:
            axes.legend(frameon=False, fontsize=8)
    return _finish(figure, subtitle)


def _finish(figure: plt.Figure, subtitle: str) -> plt.Figure:
    for axes in figure.axes:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.suptitle(subtitle, fontsize=9)
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    raise SystemExit(main())
