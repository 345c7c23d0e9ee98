"""Time the FP8 and expert products at the served shapes over many tiles, and all that lies between them.

    PYTHONPATH=python python benchmark/gpu_kernels/sweep.py --out results.json [--model 35B|27B] [--budget-s 85]

Candidates are compiled first, in several processes; then CUDA-graph replays over several copies of a weight, so
that the L2 cache does not hold it; median of blocks. A candidate whose result differs from the table's by more
than rounding is marked WRONG and never the best. What the budget does not reach is left out, rarest rows first.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import products
import small
import torch
from timing import Timing, compile_side_by_side

from sglang.kernels.ops.quantization.launch import SMALL_ROWS

ROWS = (100, 8192, 25, 32, 1)
TOPICS = ("experts", "dense", "narrow", "small", "hopper")
WRONG = 1e-2


def groups(model: str, rows: tuple[int, ...], topics: list[str], stop: float) -> Iterator[Callable]:
    """Calls that each time one line's candidates, the most wanted first."""
    for count in rows:
        if "experts" in topics and model in products.EXPERTS:
            case = products.ExpertCase(products.EXPERTS[model], count)
            yield partial(products.time_experts, case, stop)
        if "dense" in topics:
            for what in (*products.DENSE[model], *products.GATED[model]):
                yield partial(products.time_dense, model, what, count, stop)
        if "narrow" in topics:
            for what in products.NARROW[model]:
                yield partial(products.time_narrow, model, what, count, stop)
        if "small" in topics:
            yield partial(small.time_small, model, count)
    for count in rows:
        if "hopper" in topics and count > SMALL_ROWS:
            for what in (*products.DENSE[model], *products.GATED[model]):
                yield partial(products.time_dense, model, what, count, stop, hopper=True)


def report(found: list[Timing]) -> None:
    """Per line: the table's tile, the best candidate and its distance from the floor."""
    for what, rows in dict.fromkeys((t.what, t.rows) for t in found):
        own = [t for t in found if (t.what, t.rows) == (what, rows)]
        right = [t for t in own if t.error < WRONG]
        best = min(right, key=lambda t: t.us)
        table = next((t.us for t in own if t.is_table), best.us)
        print(
            f"{what:28s} rows {rows:5d}: table {table:8.1f} us, best {best.us:8.1f} us "
            f"({best.us / best.floor_us:5.2f} x floor) {best.candidate}",
            flush=True,
        )
        for t in own:
            if t.error >= WRONG:
                print(f"  WRONG by {t.error:.2g}: {t.candidate}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=tuple(products.DENSE), default="35B")
    parser.add_argument("--budget-s", type=float, default=85.0, help="for all of it")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--topics", nargs="+", choices=TOPICS, default=list(TOPICS))
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    options = parser.parse_args()
    begin = time.monotonic()
    stop = begin + options.budget_s
    torch.manual_seed(0)
    wanted = [
        (products.once, job)
        for job in products.jobs(options.model, tuple(options.rows), options.topics)
    ]
    compiled_s = compile_side_by_side(wanted, options.workers)
    print(f"compiled {len(wanted)} candidates in {compiled_s:.0f} s", flush=True)
    bits = {str(n): small.fusing_keeps_bits(options.model, n) for n in (25, 8192)}
    print(f"fused launches give the bits of their parts: {bits}", flush=True)
    found: list[Timing] = []
    with torch.no_grad():
        for group in groups(options.model, tuple(options.rows), options.topics, stop):
            if time.monotonic() > stop:
                break
            timings = group()
            report(timings)
            found += timings
            content = {
                "gpu": torch.cuda.get_device_name(0),
                "torch": torch.__version__,
                "model": options.model,
                "seconds": time.monotonic() - begin,
                "same_bits": bits,
                "timings": [asdict(t) for t in found],
            }
            options.out.write_text(json.dumps(content, indent=1) + "\n")
    print(f"took {time.monotonic() - begin:.0f} s of {options.budget_s:.0f}")


if __name__ == "__main__":
    main()
