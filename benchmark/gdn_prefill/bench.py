"""Time one layer of GDN prefill, kernel by kernel and over many tiles, and its convolution.

    PYTHONPATH=python python3 benchmark/gdn_prefill/bench.py --out results.json [--budget-s 90] [--model 35B|27B|both] [--peer]

8,192 tokens, as one prompt and as eight. CUDA-graph replays over several copies of the rows, so that the L2
cache does not hold them; median of blocks. Every candidate is compared with the PyTorch form first, and run
twice on one input: other bits are an error. ``--peer`` times fla-core's chunk rule beside ours where it is
installed; its tuning takes a minute or more, beyond the budget.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor

from sglang.kernels.ops.attention.fla import prefill_call, prefill_kernels
from sglang.kernels.ops.attention.fla.fused_gdn_gating import fused_gdn_gating
from sglang.kernels.ops.attention.fla.gdn_prefill import chunked_rule_torch, gdn_prefill
from sglang.kernels.ops.attention.fla.prefill_launch import (
    ChunkTile,
    PrefillTiles,
    StateTile,
    prefill_tiles,
)
from sglang.kernels.ops.attention.fla.prefill_plan import (
    PrefillPlan,
    PrefillTokens,
    plan_prefill,
)
from sglang.kernels.ops.mamba import conv_kernels
from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn
from sglang.kernels.ops.mamba.conv_launch import PREFILL_TILE, ConvTile
from sglang.test.graph_timing import graph_us

BYTES_PER_US = 4.3e6  # an H200's measured streaming rate
MODELS = {"35B": (16, 32), "27B": (16, 48)}
HEAD_DIM, TOKENS, WIDTH, COPIES = 128, 8192, 4, 2
SHAPES = {"1 x 8192": [TOKENS], "8 x 1024": [TOKENS // 8] * 8}


@dataclass(frozen=True)
class Timing:
    """One line. ``floor_us``: bytes that must move, at the streaming rate. ``same_bits``: as the table's tiles."""

    model: str
    shape: str
    what: str
    tile: dict[str, Any] | None
    us: float
    floor_us: float
    error: float
    same_bits: bool | None = None


@dataclass
class Layer:
    """Rows of one layer, twice over, and what a correct answer is."""

    name: str
    shape: str
    lengths: list[int]
    copies: list[PrefillTokens]
    pool: Tensor
    slots: Tensor
    plan: PrefillPlan
    want: Tensor
    want_state: Tensor

    @property
    def scale(self) -> float:
        return HEAD_DIM**-0.5


def chunk_tiles(base: ChunkTile) -> Iterator[ChunkTile]:
    yield base
    for registers in (128, None):
        yield replace(base, max_registers=registers)
    yield replace(base, block_d=64)


def state_tiles(base: StateTile) -> Iterator[StateTile]:
    """What is left for rows or GPUs that the walk in order does not serve comes behind it."""
    yield base
    for rows, warps, stages, copies in (
        (64, 4, 2, True),
        (64, 4, 3, True),
        (128, 8, 3, True),
        (64, 4, 2, False),
    ):
        yield StateTile(rows, warps, stages, copies)


def conv_tiles() -> Iterator[ConvTile]:
    yield PREFILL_TILE
    for tokens, rows, block, warps in (
        (16, 4, 512, 4),
        (32, 4, 256, 2),
        (32, 4, 256, 4),
        (32, 2, 512, 4),
        (16, 4, 256, 2),
        (32, 8, 256, 2),
        (32, 4, 1024, 8),
        (32, 4, 1024, 4),
    ):
        yield ConvTile(tokens, rows, block, warps)


def distance(got: Tensor, want: Tensor) -> float:
    error = float((got.float() - want.float()).norm() / want.float().norm())
    return error if error == error else float("inf")


class Warmed:
    """A kernel that compiles when it is launched and runs nothing."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self._kernel.warmup(*args, grid=grid, **options)


def compile_all(calls: list[Callable[[], object]]) -> None:
    """Compile what ``calls`` launch, on all cores; a candidate that does not compile is left for its turn."""
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(16))
        for module, name in (
            (prefill_kernels, "prefill_chunk_kernel"),
            (prefill_kernels, "prefill_state_kernel"),
            (conv_kernels, "conv_prefill_kernel"),
            (conv_kernels, "conv_window_kernel"),
        ):
            patch = mock.patch.object(module, name, Warmed(getattr(module, name)))
            stack.enter_context(patch)
        with triton.AsyncCompileMode(pool, ignore_errors=True):
            for call in calls:
                call()


def make_layer(model: str, shape: str) -> Layer:
    heads, value_heads = MODELS[model]
    lengths = SHAPES[shape]
    widths = (heads * HEAD_DIM, heads * HEAD_DIM, value_heads * HEAD_DIM)
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", generator=generator)

    a_log, bias = draw(value_heads) * 0.5, draw(value_heads) * 0.5
    copies = []
    for _ in range(COPIES):
        mixed = draw(TOKENS, sum(widths)).bfloat16()
        a, b = draw(TOKENS, 2 * value_heads).bfloat16().split(value_heads, dim=-1)
        q, k, v = (t.unflatten(-1, (-1, HEAD_DIM)) for t in mixed.split(widths, dim=-1))
        copies.append(PrefillTokens(q, k, v, a, b, a_log, bias))
    pool = draw(len(lengths) + 1, value_heads, HEAD_DIM, HEAD_DIM) * 0.1
    slots = torch.arange(1, len(lengths) + 1, device="cuda", dtype=torch.int32)
    want, state = chunked_rule_torch(copies[0], pool[1:], lengths, HEAD_DIM**-0.5)
    plan = plan_prefill(lengths, None, torch.device("cuda"))
    return Layer(model, shape, lengths, copies, pool, slots, plan, want, state)


def run_once(layer: Layer, tiles: PrefillTiles) -> tuple[Tensor, Tensor]:
    states = layer.pool.clone()
    out = gdn_prefill(
        layer.copies[0], states, layer.slots, layer.plan, scale=layer.scale, tiles=tiles
    )
    return out, states[1:]


def check(
    layer: Layer, tiles: PrefillTiles, first: tuple[Tensor, Tensor] | None = None
) -> tuple[float, bool]:
    """Relative distance from the PyTorch form, and whether the bits are those of ``first``.

    Raises: RuntimeError if the distance is large or a second run differs.
    """
    out, states = run_once(layer, tiles)
    error = max(distance(out, layer.want), distance(states, layer.want_state))
    again, other = run_once(layer, tiles)
    if not error < 1e-2:
        raise RuntimeError(f"relative distance {error:.3g}")
    if not (torch.equal(out, again) and torch.equal(states, other)):
        raise RuntimeError("two runs of one input differ")
    same = first is None or (torch.equal(out, first[0]) and torch.equal(states, first[1]))
    return error, same


def chunk_calls(layer: Layer, tiles: PrefillTiles) -> list[Callable[[], object]]:
    plan, scale = layer.plan, layer.scale
    scratch = prefill_call.PrefillScratch.allocate(layer.copies[0], plan)
    return [
        lambda x=x: prefill_call.run_chunks(x, plan, scratch, tiles, scale) for x in layer.copies
    ]


def state_calls(layer: Layer, tiles: PrefillTiles) -> list[Callable[[], object]]:
    plan, slots = layer.plan, layer.slots
    out, pool = torch.empty_like(layer.want), layer.pool.clone()
    calls: list[Callable[[], object]] = []
    for x in layer.copies:
        scratch = prefill_call.PrefillScratch.allocate(x, plan)
        prefill_call.run_chunks(x, plan, scratch, tiles, layer.scale)
        calls.append(
            lambda x=x, scratch=scratch: prefill_call.run_states(
                x, plan, scratch, tiles, pool, slots, None, out
            )
        )
    return calls


def floors(layer: Layer) -> dict[str, float]:
    """Bytes in and out of each kernel, scratch included, at the streaming rate."""
    heads, value_heads = MODELS[layer.name]
    rows = TOKENS * HEAD_DIM * 2
    q_k, v = 2 * heads * rows, value_heads * rows
    squares = 2 * value_heads * TOKENS * 64 * 2
    states = 2 * layer.want_state.numel() * 4
    whole = q_k + 2 * v + states
    sizes = {"chunk": q_k + squares, "state": whole + squares, "whole": whole}
    return {name: size / BYTES_PER_US for name, size in sizes.items()}


def whole_calls(layer: Layer, tiles: PrefillTiles) -> list[Callable[[], object]]:
    pool = layer.pool.clone()
    return [
        lambda x=x: gdn_prefill(x, pool, layer.slots, layer.plan, scale=layer.scale, tiles=tiles)
        for x in layer.copies
    ]


def bench_prefill(layer: Layer, stop: float) -> Iterator[Timing]:
    """The table's tiles, every candidate of either kernel, and the best of both together."""
    base, floor = prefill_tiles(2), floors(layer)

    def line(what: str, tile: Any, us: float, kind: str, error: float, same: bool | None) -> Timing:
        return Timing(layer.name, layer.shape, what, asdict(tile), us, floor[kind], error, same)

    error, _ = check(layer, base)
    first = run_once(layer, base)
    us = graph_us(whole_calls(layer, base))
    yield line("prefill, table's tiles", base, us, "whole", error, None)
    best: dict[str, tuple[float, Any]] = {}
    groups = (
        ("state", state_tiles(base.state), state_calls),
        ("chunk", chunk_tiles(base.chunk), chunk_calls),
    )
    for kind, candidates, calls in groups:
        for tile in candidates:
            tiles = replace(base, **{kind: tile})
            if time.monotonic() > stop:
                print(f"{layer.name} {layer.shape} {kind}: out of time", flush=True)
                break
            try:
                error, same = check(layer, tiles, first)
                us = graph_us(calls(layer, tiles))
            except Exception as failure:  # a candidate that does not fit or compute is a finding
                print(f"{layer.name} {layer.shape} {kind} {tile}: {str(failure)[:200]}", flush=True)
                continue
            best[kind] = min(best.get(kind, (us, tile)), (us, tile), key=lambda pair: pair[0])
            yield line(kind, tile, us, kind, error, same)
    if len(best) == 2:
        tiles = replace(base, chunk=best["chunk"][1], state=best["state"][1])
        error, same = check(layer, tiles, first)
        us = graph_us(whole_calls(layer, tiles))
        yield line("prefill, best tiles", tiles, us, "whole", error, same)


def bench_layer(layer: Layer, stop: float, *, peer: bool) -> Iterator[Timing]:
    yield from bench_prefill(layer, stop)
    if peer and (us := peer_us(layer)) is not None:
        floor = floors(layer)["whole"]
        yield Timing(layer.name, layer.shape, "peer: fla-core", None, us, floor, 0.0)


def peer_us(layer: Layer) -> float | None:
    """fla-core's chunk rule on the same rows, contiguous copies and gating not counted; None without it."""
    if importlib.util.find_spec("fla") is None:
        return None
    rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    bounds = torch.tensor([0, *layer.lengths]).cumsum(0)
    device_bounds = bounds.cuda()
    states = layer.pool[1:].clone()
    calls = []
    for x in layer.copies:
        g, beta = fused_gdn_gating(x.A_log, x.a, x.b, x.dt_bias)
        q, k, v = (t.contiguous()[None] for t in (x.q, x.k, x.v))
        calls.append(
            lambda q=q, k=k, v=v, g=g, beta=beta: rule(
                q,
                k,
                v,
                g,
                beta,
                scale=layer.scale,
                initial_state=states,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                state_v_first=True,
                cu_seqlens=device_bounds,
                cu_seqlens_cpu=bounds,
            )
        )
    return graph_us(calls)


def conv_inputs(model: str, shape: str) -> tuple[list[Tensor], Tensor, Tensor, tuple]:
    heads, value_heads = MODELS[model]
    dim, lengths = (2 * heads + value_heads) * HEAD_DIM, SHAPES[shape]
    rows = [torch.randn(TOKENS, dim, device="cuda").bfloat16() for _ in range(COPIES)]
    weight = torch.randn(dim, WIDTH, device="cuda").bfloat16()
    states = torch.randn(len(lengths) + 1, dim, WIDTH - 1, device="cuda").bfloat16()
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    slots = torch.arange(1, len(lengths) + 1, device="cuda", dtype=torch.int32)
    return rows, weight, states, (bounds, lengths, slots)


def conv_calls(inputs: tuple, tile: ConvTile) -> list[Callable[[], Tensor]]:
    rows, weight, states, where = inputs
    return [
        lambda x=x: causal_conv1d_fn(x.t(), weight, None, states, *where, tile=tile) for x in rows
    ]


def conv_want(inputs: tuple) -> Tensor:
    """[dim, T] fp32, prompt by prompt, from the windows as they are now."""
    rows, weight, states, (_, lengths, slots) = inputs
    outs, start = [], 0
    for slot, length in zip(slots.tolist(), lengths):
        x = torch.cat([states[slot], rows[0][start : start + length].t()], dim=1).float()[None]
        made = torch.nn.functional.conv1d(x, weight.float()[:, None], groups=weight.shape[0])
        outs.append(torch.nn.functional.silu(made[0]))
        start += length
    return torch.cat(outs, dim=1)


def bench_conv(model: str, shape: str, stop: float) -> Iterator[Timing]:
    inputs = conv_inputs(model, shape)
    floor = 2 * inputs[0][0].numel() * 2 / BYTES_PER_US
    table: Tensor | None = None
    for tile in dict.fromkeys(conv_tiles()):
        if time.monotonic() > stop:
            print(f"{model} {shape} conv: out of time", flush=True)
            return
        fresh = (*inputs[:2], inputs[2].clone(), inputs[3])
        out = conv_calls(fresh, tile)[0]()
        if table is None:
            table, want = out, conv_want(inputs)
            error = distance(out, want)
            del want
        if not (error < 1e-2 and torch.equal(out, table)):
            raise RuntimeError(f"conv {tile}: distance {error:.3g}, or other bits than the table's")
        us = graph_us(conv_calls(fresh, tile))
        yield Timing(model, shape, "conv with windows", asdict(tile), us, floor, error)


def report(timing: Timing) -> None:
    ratio = timing.us / timing.floor_us
    tile = "" if timing.tile is None else str(timing.tile)
    bits = {None: "", True: "same bits", False: "OTHER BITS"}[timing.same_bits]
    print(
        f"{timing.model} {timing.shape}  {timing.what:26s} {timing.us:8.1f} us "
        f"{ratio:5.2f} x floor  error {timing.error:.1e}  {bits:11s}{tile}",
        flush=True,
    )


def all_launches(layer: Layer) -> list[Callable[[], object]]:
    made: list[Callable[[], object]] = []
    base = prefill_tiles(2)
    for chunk in chunk_tiles(base.chunk):
        made += chunk_calls(layer, replace(base, chunk=chunk))[:1]
    for state in state_tiles(base.state):
        if state.in_order:  # compiled at its turn
            continue
        tiles = replace(base, state=state)
        made.append(lambda tiles=tiles: state_calls(layer, tiles)[0]())
    inputs = conv_inputs(layer.name, layer.shape)
    for tile in dict.fromkeys(conv_tiles()):
        made += conv_calls(inputs, tile)[:1]
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=(*MODELS, "both"), default="both")
    parser.add_argument("--budget-s", type=float, default=90.0)
    parser.add_argument("--peer", action="store_true")
    options = parser.parse_args()
    begin = time.monotonic()
    models = list(MODELS) if options.model == "both" else [options.model]
    found: list[Timing] = []

    def take(timings: Iterator[Timing]) -> None:
        for timing in timings:
            report(timing)
            found.append(timing)
            content = {
                "gpu": torch.cuda.get_device_name(0),
                "torch": torch.__version__,
                "triton": triton.__version__,
                "timings": [asdict(t) for t in found],
            }
            options.out.write_text(json.dumps(content, indent=1))

    pairs = [(model, shape) for model in models for shape in SHAPES]
    for number, (model, shape) in enumerate(pairs):
        stop = begin + options.budget_s * (number + 1) / len(pairs)
        layer = make_layer(model, shape)
        if number % len(SHAPES) == 0:
            compile_all(all_launches(layer))
            print(f"{model}: compiled after {time.monotonic() - begin:.0f} s", flush=True)
        take(bench_layer(layer, stop, peer=options.peer))
        take(bench_conv(model, shape, stop))
        del layer
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
