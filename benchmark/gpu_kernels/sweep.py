"""Time FP8 and expert products at the served shapes over many tiles, beside bf16 and the memory's floor.

    PYTHONPATH=python python benchmark/gpu_kernels/sweep.py --out results.json [--model 35B|27B] [--budget-s 500]

CUDA-graph replays over several copies of the weight, so that the L2 cache does not hold it; median of
blocks. A tile whose result differs from the table's by more than rounding is an error, not a candidate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from sglang.kernels.ops.moe.experts import run_experts
from sglang.kernels.ops.moe.launch import ExpertTile, expert_tile
from sglang.kernels.ops.moe.route import route
from sglang.kernels.ops.quantization.fp8 import (
    FP8_DTYPE,
    block_scaled_linear,
    num_groups,
    quantize_activations,
)
from sglang.kernels.ops.quantization.launch import SMALL_ROWS, GemmTile, dense_tile

BYTES_PER_US = 4.3e6  # an H200's measured streaming rate
L2_BYTES = 50e6
DENSE = {
    "35B": {
        "in_proj": (12288, 2048),
        "gdn out": (2048, 4096),
        "qkv": (9216, 2048),
        "o_proj": (2048, 4096),
        "shared up": (1024, 2048),
        "shared down": (2048, 512),
    },
    "27B": {
        "in_proj": (16384, 5120),
        "gdn out": (5120, 6144),
        "qkv": (14336, 5120),
        "gate_up": (34816, 5120),
        "down": (5120, 17408),
    },
}
EXPERTS = {"35B": {"experts": 256, "top_k": 8, "hidden": 2048, "inner": 512}}
ROWS = (25, 100, 8192)


@dataclass(frozen=True)
class Timing:
    """One line of the table. ``floor_us``: bytes that must move, at the streaming rate."""

    what: str
    rows: int
    shape: tuple[int, ...]
    tile: dict[str, int | bool] | None
    us: float
    floor_us: float


def dense_tiles(rows: int) -> Iterator[GemmTile]:
    heights = (16, 32, 64) if rows <= SMALL_ROWS else (64, 128)
    for m, n, warps, depth in product(heights, (32, 64, 128), (4, 8), (3, 4, 5)):
        if m * n <= 128 * 128 and (warps == 4 or m * n >= 64 * 64):
            yield GemmTile(m, n, warps, depth)


def expert_tiles(rows: int) -> Iterator[ExpertTile]:
    heights = (16, 32) if rows <= SMALL_ROWS else (32, 64, 128)
    for m, n, warps, depth in product(heights, (64, 128), (4, 8), (3, 4, 5)):
        yield ExpertTile(m, n, 128, warps, depth, weights_first=m < 64)


def graph_us(calls: list[Callable[[], object]], blocks: int = 5, replays: int = 4) -> float:
    """Median time of one call, from a graph of all of ``calls``."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(blocks):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (replays * len(calls)))
    return statistics.median(times)


def fp8_weight(*shape: int) -> tuple[Tensor, Tensor]:
    weight = (torch.randn(shape, device="cuda") * 96).clamp(-448, 448).to(FP8_DTYPE)
    grid = (*shape[:-2], num_groups(shape[-2]), num_groups(shape[-1]))
    return weight, torch.rand(grid, device="cuda") * 2e-4 + 1e-4


def check(got: Tensor, want: Tensor, what: str) -> None:
    error = (got.float() - want.float()).norm() / want.float().norm()
    if not error < 1e-2:
        raise RuntimeError(f"{what}: relative difference {error:.3g} from the table's tile")


def sweep_dense(name: str, shape: tuple[int, int], rows: int, stop: float) -> list[Timing]:
    columns, depth = shape
    copies = max(1, min(24, int(2 * L2_BYTES / (columns * depth))))
    weights = [fp8_weight(columns, depth) for _ in range(copies)]
    x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
    moved = columns * depth + rows * (depth * 3 + columns * 2)
    floor = moved / BYTES_PER_US
    want = block_scaled_linear(x, *weights[0])
    found = []
    for tile in (dense_tile(rows, columns), *dense_tiles(rows)):
        if time.monotonic() > stop:
            break
        check(block_scaled_linear(x, *weights[0], tile=tile), want, f"{name} {tile}")
        us = graph_us([partial(block_scaled_linear, x, *w, tile=tile) for w in weights])
        found.append(Timing(name, rows, (rows, columns, depth), asdict(tile), us, floor))
    us = graph_us([lambda: quantize_activations(x)] * 8)
    found.append(Timing(f"{name}: quantise alone", rows, (rows, depth), None, us, floor))
    plain = [w.to(torch.bfloat16) for w, _ in weights[: max(1, copies // 2)]]
    us = graph_us([partial(torch.nn.functional.linear, x, w) for w in plain])
    found.append(Timing(f"{name}: bf16 cuBLAS", rows, (rows, columns, depth), None, us, floor))
    return found


def sweep_experts(shape: dict[str, int], rows: int, stop: float) -> list[Timing]:
    count, hidden, inner = shape["experts"], shape["hidden"], shape["inner"]
    gate_up, gate_up_scale = fp8_weight(count, 2 * inner, hidden)
    down, down_scale = fp8_weight(count, hidden, inner)
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    logits = torch.randn(rows, count, device="cuda", dtype=torch.bfloat16)
    weights, chosen = route(logits, shape["top_k"], renormalise=True)
    read = chosen.unique().numel() * 3 * inner * hidden
    floor = (read + rows * shape["top_k"] * (4 * inner + 2 * hidden) * 2) / BYTES_PER_US

    def call(tile: ExpertTile | None) -> Tensor:
        scales = {"gate_up_scale": gate_up_scale, "down_scale": down_scale}
        return run_experts(x, weights, chosen, gate_up, down, tile=tile, **scales)

    want, found = call(None), []
    sizes = (rows, count, hidden, inner)
    for tile in (expert_tile(rows, 2), *expert_tiles(rows)):
        if time.monotonic() > stop:
            break
        check(call(tile), want, f"experts {tile}")
        us = graph_us([partial(call, tile)] * 2)
        found.append(Timing("experts", rows, sizes, asdict(tile), us, floor))
    us = graph_us([lambda: route(logits, shape["top_k"], renormalise=True)] * 8)
    found.append(Timing("route", rows, sizes, None, us, floor))
    return found


def report(found: list[Timing]) -> None:
    """The table's tile (first of each group), the best one and what stands beside them."""
    tiled = [t for t in found if t.tile is not None]
    if tiled:
        best = min(tiled, key=lambda t: t.us)
        ratio = best.us / best.floor_us
        print(
            f"{best.what:14s} rows {best.rows:5d}: table {tiled[0].us:8.1f} us, best {best.us:8.1f} us "
            f"({ratio:.2f} x floor) {best.tile}"
        )
    for other in (t for t in found if t.tile is None):
        print(f"{other.what:26s} rows {other.rows:5d}: {other.us:8.1f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=tuple(DENSE), default="35B")
    parser.add_argument("--budget-s", type=float, default=500.0)
    options = parser.parse_args()
    torch.manual_seed(0)
    stop = time.monotonic() + options.budget_s
    found: list[Timing] = []
    for rows in ROWS:
        groups = [sweep_experts(shape, rows, stop) for shape in _experts(options.model)]
        groups += [
            sweep_dense(name, shape, rows, stop) for name, shape in DENSE[options.model].items()
        ]
        for group in groups:
            report(group)
            found += group
        content = {
            "gpu": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "model": options.model,
            "timings": [asdict(t) for t in found],
        }
        options.out.write_text(json.dumps(content, indent=1) + "\n")


def _experts(model: str) -> list[dict[str, int]]:
    return [EXPERTS[model]] if model in EXPERTS else []


if __name__ == "__main__":
    main()
