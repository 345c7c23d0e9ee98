"""Measure GDN verify and commit over all layers: correctness first, then CUDA-graph timings.

    PYTHONPATH=python python benchmark/gdn_verify/bench.py --out results.json [--sweep]

Writes JSON and prints a table. Needs one CUDA device of compute capability 9.0 or later.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from cases import ROWS, Case, capture, time_graph
from variants import Deferred, Snapshots, Tuples, Variant

from sglang.kernels.ops.gdn_cuda.launch_table import DEFAULT_TILE, VerifyTile, select_tile
from sglang.kernels.ops.gdn_cuda.module import load_module

FEATURE_DESIGN_US = {(25, 4): 2512, (8, 4): 900, (8, 8): 1359, (8, 16): 2313}
UPSTREAM_SNAPSHOT_US = {(25, 4): 3274, (8, 4): 1118, (8, 8): 1645, (8, 16): 2735}
"""Recorded on one H200, torch 2.11.0+cu130, Triton 3.6.0 (docs/design/gdn_kernels.md)."""

SWEEP_TILES = (
    VerifyTile(4, 4, 3),
    VerifyTile(4, 4, 4),
    VerifyTile(4, 4, 4, pairs=True),
    VerifyTile(4, 4, 3, min_rounds=2),
    VerifyTile(8, 4, 2),
    VerifyTile(8, 4, 2, pairs=True),
    VerifyTile(2, 4, 7),
    VerifyTile(2, 4, 6),
    VerifyTile(4, 4, 3, pdl=True),
    VerifyTile(4, 4, 4, pdl=True),
    VerifyTile(8, 4, 2, pdl=True),
    VerifyTile(2, 4, 7, pdl=True),
)


def capacities(d: int) -> tuple[int, ...]:
    """Ring sizes to try: always flush, and a few verifies between write-backs."""
    return tuple(sorted({2 * d, 3 * d})) if d <= 8 else (2 * d,)


def check_exactness(n: int, d: int, *, layers: int, rounds: int) -> int:
    """Snapshots, tuples and the deferred commit give equal outputs and equal pools; returns comparisons made."""
    made = 0
    cases = [Case(n, d, 3 * d, layers=layers) for _ in range(3)]
    snap = Snapshots(cases[0], use_cuda=True)
    tup = Tuples(cases[1], use_cuda=True)
    deferred = Deferred(cases[2], use_cuda=True)
    for turn in range(rounds):
        for case in cases:
            case.draw_acceptance()
        for variant in (snap, tup, deferred):
            variant.verify()
        for layer in range(layers):
            want = snap.out[layer]
            for other in (tup, deferred):
                if not torch.equal(want, other.out[layer]):
                    raise SystemExit(
                        f"{n}x{d} turn {turn}: outputs differ ({type(other).__name__})"
                    )
                made += 1
        for variant in (snap, tup, deferred):
            variant.commit()
        if not torch.equal(cases[0].states, cases[1].states):
            raise SystemExit(f"{n}x{d} turn {turn}: replayed pool differs from snapshots")
        made += 1
    deferred.owner.materialise(cases[2].rows, cases[2].slots)
    if not torch.equal(cases[0].states, cases[2].states):
        raise SystemExit(f"{n}x{d}: deferred pool differs after it is materialised")
    cases[2].states[0, 1, 0, 0, 0] += 1.0
    if torch.equal(cases[0].states, cases[2].states):
        raise SystemExit("the comparison does not see a changed element")
    return made + 1


def triton_agreement(n: int, d: int) -> float:
    """Largest output difference between the two implementations."""
    case = Case(n, d, 2 * d, layers=1)
    outs = []
    for use_cuda in (False, True):
        variant = Tuples(case, use_cuda=use_cuda)
        variant.verify()
        outs.append(variant.out[0].float())
    return (outs[0] - outs[1]).abs().max().item()


def measure(variant: Variant, *, quick: bool) -> dict[str, float]:
    """µs for verify, commit and both, all layers. Deferred commits are only meaningful together."""
    blocks, replays = (3, 12) if quick else (7, 24)
    case = variant.case

    def both() -> None:
        variant.verify()
        variant.commit()

    result: dict[str, float] = {}
    graph = capture(both)
    median, spread = time_graph(graph, blocks=blocks, replays=replays, between=case.draw_acceptance)
    result |= {"total": median, "spread": spread}
    del graph
    if not isinstance(variant, Deferred):
        parts: tuple[tuple[str, Callable[[], None]], ...] = (
            ("verify", variant.verify),
            ("commit", variant.commit),
        )
        for name, part in parts:
            graph = capture(part)
            result[name], _ = time_graph(graph, blocks=blocks, replays=replays, between=None)
            del graph
    return result


def run_row(n: int, d: int, *, sweep: bool) -> list[dict[str, object]]:
    """All variants of one row."""
    records: list[dict[str, object]] = []

    def add(name: str, variant: Variant, *, quick: bool = False, **more: object) -> None:
        figures = measure(variant, quick=quick)
        records.append({"n": n, "d": d, "variant": name, **more, **figures})
        extra = " ".join(f"{k}={v}" for k, v in more.items())
        print(f"{n}x{d} {name} {extra}: {figures}", flush=True)

    def sweep_tiles(name: str, build: Callable[[VerifyTile], Variant], **more: object) -> None:
        for tile in SWEEP_TILES:
            add(f"{name} sweep", build(tile), quick=True, tile=list(vars(tile).values()), **more)

    def best_tile(name: str) -> tuple[VerifyTile, int]:
        """The fastest tile of the sweep (the table's without one) and its ring size."""
        swept = [r for r in records if r["variant"] == f"{name} sweep"]
        if not swept:
            deferred = name == "cuda deferred"
            chosen = select_tile(num_heads_in_batch=n * 32, draft_tokens=d, deferred=deferred)
            return chosen, capacities(d)[0]
        record = min(swept, key=lambda r: float(r["total"]))
        return VerifyTile(*record["tile"]), int(record.get("capacity", 2 * d))

    case = Case(n, d, 2 * d)
    for name, kind in (("triton snapshots", Snapshots), ("triton tuples", Tuples)):
        add(name, kind(case, use_cuda=False))
    if sweep:
        sweep_tiles("cuda tuples", lambda tile, c=case: Tuples(c, use_cuda=True, tile=tile))
    tile, _ = best_tile("cuda tuples")
    label = list(vars(tile).values())
    for name, kind in (("cuda snapshots", Snapshots), ("cuda tuples", Tuples)):
        add(name, kind(case, use_cuda=True, tile=tile), tile=label)
    del case
    if sweep:
        for capacity in capacities(d):
            ring_case = Case(n, d, capacity)
            sweep_tiles(
                "cuda deferred",
                lambda tile, c=ring_case: Deferred(c, use_cuda=True, tile=tile),
                capacity=capacity,
            )
            del ring_case
    tile, capacity = best_tile("cuda deferred")
    chosen_case = Case(n, d, capacity)
    label = list(vars(tile).values())
    variant = Deferred(chosen_case, use_cuda=True, tile=tile)
    add("cuda deferred", variant, capacity=capacity, tile=label)
    return records


def print_table(records: list[dict[str, object]]) -> None:
    """One line a row: both paths, the deferred commit, and the ratio to the recorded designs."""
    print(
        "\nrow    snapshots(cuda) tuples(triton) tuples(cuda)  deferred  vs feature  vs snapshots"
    )
    for n, d in ROWS:
        rows = [r for r in records if (r["n"], r["d"]) == (n, d)]
        if not rows:
            continue

        best = {str(r["variant"]): float(r["total"]) for r in rows}
        deferred = best["cuda deferred"]
        print(
            f"{n}x{d:<4} {best['cuda snapshots']:12.0f} {best['triton tuples']:13.0f} "
            f"{best['cuda tuples']:13.0f} {deferred:10.0f} "
            f"{FEATURE_DESIGN_US[n, d] / deferred:10.2f}x {UPSTREAM_SNAPSHOT_US[n, d] / deferred:10.2f}x"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sweep", action="store_true", help="also time every tile")
    parser.add_argument("--rows", default="25x4,8x4,8x8,8x16", help="requests x draft tokens")
    args = parser.parse_args()
    chosen_rows = [tuple(int(x) for x in row.split("x")) for row in args.rows.split(",")]
    started = time.time()
    props = torch.cuda.get_device_properties(0)
    module = load_module(DEFAULT_TILE, False, 0)
    print(props.name, torch.__version__, "CTAs per SM", module.resident_ctas(4), flush=True)
    checks = sum(check_exactness(n, d, layers=2, rounds=12) for n, d in ((5, 4), (3, 8), (3, 16)))
    agreement = {f"{n}x{d}": triton_agreement(n, d) for n, d in ROWS}
    print(f"{checks} exact comparisons; largest difference to Triton {agreement}", flush=True)
    records: list[dict[str, object]] = []
    document = {
        "gpu": props.name,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "exact_comparisons": checks,
        "difference_to_triton": agreement,
        "feature_design_us": {f"{n}x{d}": v for (n, d), v in FEATURE_DESIGN_US.items()},
        "upstream_snapshot_us": {f"{n}x{d}": v for (n, d), v in UPSTREAM_SNAPSHOT_US.items()},
        "records": records,
    }
    for n, d in chosen_rows:
        records.extend(run_row(n, d, sweep=args.sweep))
        args.out.write_text(json.dumps(document, indent=1))
        torch.cuda.empty_cache()
    print_table(records)
    print(f"{time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
