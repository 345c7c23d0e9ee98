"""Draw the benchmark's table from its JSON.

python benchmark/gdn_verify/plot.py benchmark/gdn_verify/results/2026-11-29-h200.json docs/design/gdn_verify.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

SERIES = (
    ("triton snapshots", "snapshots, Triton", "#9aa5b1"),
    ("triton tuples", "update tuples, Triton (the feature's design)", "#5b7fa6"),
    ("cuda tuples", "update tuples, CUDA C++", "#d98a3d"),
    ("cuda deferred", "update tuples, CUDA C++, deferred commit", "#b5452c"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    document = json.loads(args.results.read_text())
    totals = {(f"{r['n']}x{r['d']}", r["variant"]): r["total"] for r in document["records"]}
    rows = list(dict.fromkeys(row for row, _ in totals))
    plt.rcParams["svg.hashsalt"] = "gdn"
    figure, axes = plt.subplots(figsize=(8, 4))
    width = 0.8 / len(SERIES)
    for place, (variant, label, color) in enumerate(SERIES):
        heights = [totals[row, variant] for row in rows]
        spots = [i + (place - (len(SERIES) - 1) / 2) * width for i in range(len(rows))]
        bars = axes.bar(spots, heights, width, label=label, color=color)
        axes.bar_label(bars, fmt="%.0f", fontsize=7)
    axes.set_xticks(
        range(len(rows)), [row.replace("x", " requests x ") + " drafts" for row in rows]
    )
    axes.set_ylabel("verify + commit, 30 layers [µs]")
    axes.set_title(f"{document['gpu']}, torch {document['torch']}, {document['date']}", fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(args.picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
