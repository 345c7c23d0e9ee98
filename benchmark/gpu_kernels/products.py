"""Candidates for dense FP8 products, expert products and narrow maps: what to compile and what to time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from timing import BYTES_PER_US, Timing, copies_of, difference, floor_us, fp8_weight, graph_us
from torch import Tensor

from sglang.kernels.ops.fused.narrow import TILE, NarrowTile, narrow_linear
from sglang.kernels.ops.moe.experts import grouped_gated, grouped_linear
from sglang.kernels.ops.moe.launch import ExpertTile, expert_tiles
from sglang.kernels.ops.moe.route import route
from sglang.kernels.ops.moe.sort import ExpertRows, order_by_expert
from sglang.kernels.ops.quantization.fp8 import (
    block_scaled_gated,
    block_scaled_linear,
    block_scaled_split,
    quantize,
)
from sglang.kernels.ops.quantization.launch import (
    MANY_ON_HOPPER,
    SMALL_ROWS,
    GemmTile,
    HopperTile,
    dense_tile,
    gated_tile,
    split_tile,
)
from sglang.kernels.ops.quantization.rows import FP8_DTYPE, QuantizedRows, num_groups

Tile = TypeVar("Tile")
DENSE = {
    "35B": {
        "in_proj": (12288, 2048),
        "out": (2048, 4096),
        "qkv": (9216, 2048),
    },
    "27B": {
        "in_proj": (16384, 5120),
        "out": (5120, 6144),
        "qkv": (14336, 5120),
        "down": (5120, 17408),
    },
}
GATED = {"35B": {}, "27B": {"gate_up": (34816, 5120)}}
NARROW = {"35B": {"router": (264, 2048), "b, a": (64, 2048)}, "27B": {"b, a": (96, 5120)}}
EXPERTS = {"35B": {"experts": 257, "top_k": 8, "hidden": 2048, "inner": 512}}
"""The last expert is the shared one."""


HOPPER = tuple(HopperTile(height) for height in (4, 8, 16, 32))
"""Of dense products; ``prompt_products.py`` times experts with that kernel."""


def dense_tiles(rows: int) -> Iterator[GemmTile]:
    """Of many rows those that come near the table's; results/ has what the others took."""
    if rows > SMALL_ROWS:
        yield from (GemmTile(128, 128, 8, s, group_m=16, descriptors=True) for s in (3, 4))
        yield GemmTile(64, 256, 8, 3, parts=2, group_m=16, descriptors=True)
        return
    for ahead in (False, True):
        yield from (GemmTile(64, n, 4, s, scales_ahead=ahead) for n in (32, 64) for s in (4, 6))
        for m, n in ((16, 64), (32, 64), (64, 64), (16, 128), (32, 128)):
            yield GemmTile(m, n, 4, 4, weights_first=True, scales_ahead=ahead)
    yield GemmTile(64, 32, 4, 5, descriptors=True)
    yield from (GemmTile(64, 64, 4, s, descriptors=True) for s in (4, 6))
    yield GemmTile(128, 64, 8, 4, descriptors=True)
    yield from (GemmTile(m, 64, 4, 6, descriptors=True, weights_first=True) for m in (16, 32, 64))


def split_tiles() -> Iterator[GemmTile]:
    """Of few rows; the parts are added by the norm that reads them, which is not timed here."""
    for splits in (2, 4, 8):
        yield from (GemmTile(64, n, 4, 4, splits=splits) for n in (32, 64))
        yield GemmTile(128, 64, 8, 4, descriptors=True, splits=splits)
        yield GemmTile(64, 64, 4, 5, descriptors=True, splits=splits)
        yield GemmTile(32, 128, 4, 4, weights_first=True, splits=splits)


def gated_tiles(rows: int) -> Iterator[GemmTile]:
    if rows > SMALL_ROWS:
        for tile in dense_tiles(rows):
            if tile.parts == 2 and tile.block_n == 256:
                yield tile
        return
    for m, warps in ((64, 4), (64, 8), (128, 8)):
        yield GemmTile(m, 256, warps, 3, parts=2)
        yield GemmTile(m, 256, warps, 4, parts=2, descriptors=True)
    for m in (16, 32, 64):
        yield GemmTile(m, 256, 4, 3, parts=2, weights_first=True)
        yield GemmTile(m, 256, 8, 3, parts=2, weights_first=True, scales_ahead=True)
        yield GemmTile(m, 256, 8, 4, parts=2, weights_first=True, descriptors=True)


def expert_candidates(rows: int, *, gated: bool) -> Iterator[ExpertTile]:
    """Of the gated up projection, or of the down projection."""
    if rows > SMALL_ROWS:
        wide = ExpertTile(64, 256, 128, 8, 3, False, parts=2)
        yield from (wide, replace(wide, descriptors=True))
        if not gated:
            yield from (ExpertTile(64, 128, 128, 4, s, False, descriptors=True) for s in (3, 4))
        return
    wide = ExpertTile(16, 256, 128, 4, 3, True, parts=2)
    for ahead in (False, True):
        yield from (replace(wide, num_warps=w, scales_ahead=ahead) for w in (4, 8))
        yield from (
            replace(wide, num_stages=s, descriptors=True, scales_ahead=ahead) for s in (2, 3, 4)
        )
    yield replace(wide, num_stages=2)
    if not gated:
        narrow = ExpertTile(16, 128, 128, 4, 4, True)
        for ahead in (False, True):
            yield from (replace(narrow, num_stages=s, scales_ahead=ahead) for s in (3, 4))
            yield replace(narrow, descriptors=True, scales_ahead=ahead)
            yield replace(narrow, block_n=64, scales_ahead=ahead)


def narrow_tiles() -> Iterator[NarrowTile]:
    yield from (NarrowTile(16, 16, 256, 4, 3), NarrowTile(16, 16, 128, 2, 6))
    for k, warps, stages, lanes in (
        (64, 8, 4, 8), (128, 8, 2, 8), (64, 4, 4, 4), (128, 4, 3, 4), (256, 4, 2, 4),
        (128, 2, 4, 2), (256, 2, 3, 2),
    ):  # fmt: skip
        yield NarrowTile(16, 16, k, warps, stages, lanes)


def jobs(
    model: str, rows: tuple[int, ...], topics: list[str]
) -> list[tuple[object, int, str, str]]:
    """Arguments of ``once`` for every kernel that the timing of ``topics`` at ``rows`` will need."""
    found: set[tuple[object, int, str, str]] = set()
    for count in {min(rows), max(rows)}:
        few = count <= SMALL_ROWS
        if "dense" in topics:
            for what in GATED[model]:
                tiles = (gated_tile(count), *gated_tiles(count))
                found |= {(tile, count, model, what) for tile in tiles}
            tables = [dense_tile(count, shape[0]) for shape in DENSE[model].values()]
            found |= {(tile, count, model, "in_proj") for tile in (*tables, *dense_tiles(count))}
            if few:
                found |= {(tile, count, model, "out") for tile in (split_tile(), *split_tiles())}
        if "experts" in topics and model in EXPERTS:
            table = expert_tiles(count, 2, fp8=True)
            for what, own in (("up", table.up), ("down", table.down)):
                tiles = (own, *expert_candidates(count, gated=what == "up"))
                found |= {(tile, count, model, what) for tile in tiles}
        if "narrow" in topics and few:
            found |= {(tile, count, model, "b, a") for tile in (TILE, *narrow_tiles())}
    return sorted(found, key=str)


def short(tile: object) -> str:
    """A tile without its defaults."""
    text = str(tile)
    for default in (
        ", parts=1",
        ", descriptors=False",
        ", scales_ahead=False",
        ", group_m=1024",
        ", splits=1",
    ):
        text = text.replace(default, "")
    return text.replace(", weights_first=False", "")


def once(tile: object, rows: int, model: str, what: str) -> None:
    """Launch one candidate on data of the shape it will be timed on, to have it compiled."""
    torch.manual_seed(0)
    if isinstance(tile, NarrowTile):
        columns, depth = NARROW[model][what]
        x, w = (torch.zeros(n, depth, device="cuda", dtype=torch.bfloat16) for n in (rows, columns))
        narrow_linear(x, w, tile=tile)
    elif what in ("up", "down"):
        case = ExpertCase(EXPERTS[model], 16, empty=True)
        (case.up if what == "up" else case.down)(tile)
    elif isinstance(tile, (GemmTile, HopperTile)):
        gated = what in GATED[model]
        columns, depth = (GATED if gated else DENSE)[model][what]
        x = QuantizedRows.empty(rows, depth, dtype=torch.bfloat16, device=torch.device("cuda"))
        split = isinstance(tile, GemmTile) and tile.splits > 1
        call = block_scaled_split if split else block_scaled_linear
        (block_scaled_gated if gated else call)(x, *empty_weight(columns, depth), tile=tile)
    torch.cuda.synchronize()


def empty_weight(*shape: int) -> tuple[Tensor, Tensor]:
    weight = torch.empty(shape, device="cuda", dtype=FP8_DTYPE)
    grid = (*shape[:-2], num_groups(shape[-2]), num_groups(shape[-1]))
    return weight, torch.ones(grid, device="cuda")


class ExpertCase:
    """Weights of all experts and ``rows`` routed rows; orders by height of a tile."""

    def __init__(self, shape: dict[str, int], rows: int, *, empty: bool = False) -> None:
        self.shape, self.rows = shape, rows
        count, hidden, inner = shape["experts"], shape["hidden"], shape["inner"]
        make = empty_weight if empty else fp8_weight
        self.gate_up, self.down_weight = make(count, 2 * inner, hidden), make(count, hidden, inner)
        logits = torch.randn(rows, count - 1, device="cuda", dtype=torch.bfloat16)
        _, self.chosen = route(logits, shape["top_k"], renormalise=True)
        self.orders: dict[int, ExpertRows] = {}
        x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
        self.x = quantize(x)
        pairs = rows * shape["top_k"] + rows
        self.inner = quantize(torch.randn(pairs, inner, device="cuda", dtype=torch.bfloat16))
        self.used = self.chosen.unique().numel() + 1
        self.pairs = pairs

    def order(self, block_m: int) -> ExpertRows:
        if block_m not in self.orders:
            order = order_by_expert(self.chosen, self.shape["experts"] - 1, block_m)
            top_k = self.shape["top_k"]
            self.orders[block_m] = ExpertRows(order, self.rows * top_k, top_k, self.rows)
        return self.orders[block_m]

    def up(self, tile: ExpertTile) -> Tensor:
        rows = grouped_gated(self.x, *self.gate_up, self.order(tile.block_m), tile)
        return rows.values

    def down(self, tile: ExpertTile) -> Tensor:
        order = self.order(tile.block_m)
        return grouped_linear(self.inner, *self.down_weight, order, tile, x_by_pair=True)

    def floor(self, what: str) -> float:
        hidden, inner = self.shape["hidden"], self.shape["inner"]
        columns, depth = (2 * inner, hidden) if what == "up" else (hidden, inner)
        made = inner if what == "up" else 2 * hidden
        read = self.rows * hidden if what == "up" else self.pairs * inner
        moved = self.used * columns * depth + self.pairs * made + read
        return floor_us(moved, 2.0 * self.pairs * columns * depth)


def time_tiles(
    what: str,
    rows: int,
    table: Tile,
    tiles: Iterator[Tile],
    call: Callable[[Tile, int], Tensor],
    copies: int,
    floor: float,
    stop: float,
) -> list[Timing]:
    """``call(tile, copy)`` of the table's tile and of each candidate, all compared with the table's result."""
    want, found = call(table, 0), []
    want = want.sum(0) if want.dim() == 3 else want
    seen = set()
    for tile in (table, *tiles):
        if tile in seen or time.monotonic() > stop:
            continue
        seen.add(tile)
        try:
            got = call(tile, 0)
            error = difference(got.sum(0) if got.dim() == 3 else got, want)
            us = graph_us([partial(call, tile, copy) for copy in range(copies)])
        except Exception as failure:
            print(f"{what} rows {rows} {short(tile)}: {str(failure)[:160]}", flush=True)
            continue
        found.append(Timing(what, rows, short(tile), us, floor, tile == table, error))
    return found


def time_dense(
    model: str, what: str, rows: int, stop: float, *, hopper: bool = False
) -> list[Timing]:
    """``hopper``: that kernel's tiles, beside the one that serves other GPUs."""
    gated = what in GATED[model]
    columns, depth = (GATED if gated else DENSE)[model][what]
    weights = [fp8_weight(columns, depth) for _ in range(copies_of(columns * depth))]
    x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
    q = quantize(x)
    made = columns // 2 if gated else 2 * columns
    floor = floor_us(columns * depth + rows * (depth + made), 2.0 * rows * columns * depth)

    def call(tile: GemmTile | HopperTile, copy: int) -> Tensor:
        if gated:
            return block_scaled_gated(q, *weights[copy], tile=tile).values
        if isinstance(tile, GemmTile) and tile.splits > 1:
            return block_scaled_split(q, *weights[copy], tile=tile)
        return block_scaled_linear(q, *weights[copy], tile=tile)

    table: GemmTile | HopperTile = gated_tile(rows) if gated else dense_tile(rows, columns)
    tiles: Iterator[GemmTile | HopperTile] = gated_tiles(rows) if gated else dense_tiles(rows)
    if hopper:
        table, tiles = MANY_ON_HOPPER or HOPPER[0], iter((table, *HOPPER))
    found = time_tiles(what, rows, table, tiles, call, len(weights), floor, stop)
    if rows <= SMALL_ROWS and depth >= 4096 and not gated:
        floor += rows * columns * 4 / BYTES_PER_US
        table, tiles = split_tile(), split_tiles()
        name, copies = f"{what} in parts", len(weights)
        found += time_tiles(name, rows, table, tiles, call, copies, floor, stop)
    return found


def time_experts(case: ExpertCase, stop: float) -> list[Timing]:
    table = expert_tiles(case.rows, 2, fp8=True)
    found = []
    for what, own, call in (("up", table.up, case.up), ("down", table.down, case.down)):
        found += time_tiles(
            f"experts {what}",
            case.rows,
            own,
            expert_candidates(case.rows, gated=what == "up"),
            lambda tile, copy, call=call: call(tile),
            1,
            case.floor(what),
            stop,
        )
    return found


def time_narrow(model: str, what: str, rows: int, stop: float) -> list[Timing]:
    columns, depth = NARROW[model][what]
    x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16) for _ in range(24)]
    floor = floor_us((columns * depth + rows * (depth + columns)) * 2)

    def call(tile: NarrowTile | None, copy: int) -> Tensor:
        if tile is None:
            return torch.nn.functional.linear(x, weights[copy])
        return narrow_linear(x, weights[copy], tile=tile)

    table = TILE if rows <= SMALL_ROWS else None
    tiles: list[NarrowTile | None] = [None, *(narrow_tiles() if rows <= SMALL_ROWS else ())]
    return time_tiles(what, rows, table, iter(tiles), call, len(weights), floor, stop)
