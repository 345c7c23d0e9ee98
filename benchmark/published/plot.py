"""Pictures of results that run.py wrote.

    PYTHONPATH=python python benchmark/published/plot.py results.json sweep.json --out docs/images/published

Draws what the files hold: throughput and TTFT against concurrency if several were run with prompts and
answers of one length, and of the run with most requests the waiting for the first token, request by
request, and the running and waiting requests and the KV in use over time.
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
from matplotlib.ticker import MaxNLocator

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
    names = ", ".join(str(path) for path in args.results)
    try:
        figures = draw(documents)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        parser.error(f"{names}: no results of run.py ({type(error).__name__}: {error})")
    if not figures:
        parser.error(f"no measured run in {names}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {args.out}: {error.strerror}; name a folder")
    for name, figure in figures.items():
        path = args.out / f"published_{name}.{args.format}"
        figure.savefig(path, metadata={"Date": None} if args.format == "svg" else None)
        plt.close(figure)
        print(path)
    return 0


def draw(documents: Sequence[dict[str, Any]]) -> dict[str, plt.Figure]:
    """Name -> picture; none if nothing was measured."""
    runs = [run for document in documents for run in document["runs"] if run["measured"]]
    if not runs:
        return {}
    plt.rcParams |= {"svg.hashsalt": "published", "font.size": 10, "legend.fontsize": 9}
    subtitle = heading(documents[-1])
    figures = {}
    if swept := of_one_length(runs):
        figures["concurrency"] = against_concurrency(swept, subtitle)
    most = max(runs, key=lambda run: run["workload"]["concurrency"])["workload"]["name"]
    largest = [run for run in runs if run["workload"]["name"] == most]
    figures["time"] = over_time(largest, f"{most}: {subtitle}")
    figures["ttft"] = first_tokens(largest, f"{most}: {subtitle}")
    return figures


def of_one_length(runs: Sequence[Run]) -> list[Run]:
    """The runs whose prompts and answers have the lengths run at most concurrencies; none if at one only."""
    by_lengths: dict[tuple[int, int], list[Run]] = defaultdict(list)
    for run in runs:
        by_lengths[run["workload"]["input_len"], run["workload"]["output_len"]].append(run)

    def places(group: Sequence[Run]) -> int:
        return len({run["workload"]["concurrency"] for run in group})

    widest = max(by_lengths.values(), key=places)
    return widest if places(widest) > 1 else []


def read(parser: argparse.ArgumentParser, path: Path) -> dict[str, Any]:
    """A result file; ends the program with a sentence if it is none."""
    try:
        document = json.loads(path.read_text())
        document["runs"], document["machine"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
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
        axes.set_xticks(sorted({run["workload"]["concurrency"] for run in runs}))
    left.legend(frameon=False)
    lengths = runs[0]["workload"]
    what = f"{lengths['input_len']:,} tokens in, {lengths['output_len']:,} out"
    return _finish(figure, f"{what}: {subtitle}")


def _by_concurrency(axes: Axes, runs: Sequence[Run], read_value: Callable[[Run], float]) -> None:
    points: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        points[run["arm"]][run["workload"]["concurrency"]].append(read_value(run))
    for arm, by_place in points.items():
        places = sorted(by_place)
        medians = [statistics.median(by_place[place]) for place in places]
        axes.plot(places, medians, "o-", color=COLOURS[arm], label=LABELS[arm], markersize=4)
        spread = [[min(by_place[p]), max(by_place[p])] for p in places]
        if any(low < high for low, high in spread):
            axes.vlines(places, *zip(*spread), color=COLOURS[arm], lw=1)


def first_tokens(runs: Sequence[Run], subtitle: str) -> plt.Figure:
    """Time to first token of each request in order of arrival, last run of each arm; else the mean."""
    figure, axes = plt.subplots(figsize=(10, 3.6))
    for arm, run in {run["arm"]: run for run in runs}.items():
        mean = run["figures"]["mean_ttft_ms"] / 1000
        colour, label = COLOURS[arm], f"{LABELS[arm]}\n(dashed: mean, {mean:.2f} s)"
        waits = {i: s for i, s in enumerate(run["figures"].get("ttfts", ()), 1) if s > 0}
        axes.axhline(mean, color=colour, lw=0.8, ls="--", label=None if waits else label)
        if waits:
            axes.plot(*zip(*waits.items()), "o-", color=colour, label=label, markersize=4)
    axes.set_xlabel("request, in order of arrival")
    axes.set_ylabel("time to first token [s]")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    _legend_beside(axes)
    return _finish(figure, subtitle)


def over_time(runs: Sequence[Run], subtitle: str) -> plt.Figure:
    """Running and waiting requests, and KV in use, over the last run of each arm."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(10, 5), sharex=True)
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
            _legend_beside(axes)
    return _finish(figure, subtitle)


def _legend_beside(axes: Axes) -> None:
    """To the right of the picture, where it hides no line."""
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))


def _finish(figure: plt.Figure, subtitle: str) -> plt.Figure:
    for axes in figure.axes:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.suptitle(subtitle, fontsize=9)
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    raise SystemExit(main())
