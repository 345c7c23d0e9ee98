"""Time norms, gates and the KV store of a chunk in their candidate forms, and compare their bits with those in use.

    PYTHONPATH=python python benchmark/gpu_kernels/rows.py --out results.json [--budget-s 30] [--rows 8192 100]

CUDA-graph replays over several copies of the inputs, so that the L2 cache does not hold them; median of blocks.
The first candidate of a case is the one in use; it is timed again at the end, which shows how far clocks have
drifted. A candidate that fails or differs is reported and the rest go on.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from timing import L2_BYTES, compile_side_by_side, floor_us, graph_us
from torch import Tensor

from sglang.kernels.ops.attention.paged.store import (
    NormRope,
    StoreLaunch,
    norm_rope_store,
    store_launch,
)
from sglang.kernels.ops.fused.rows import (
    GATE_MUL,
    GATED_NORM,
    GateLaunch,
    gated_rms_norm,
    gated_rms_norm_quantized,
    norm_rows,
    sigmoid_mul_quantized,
    silu_mul_quantized,
)
from sglang.kernels.ops.fused.sums import RoutedSum
from sglang.kernels.ops.quantization.rows import QuantizedRows

EPS = 1e-6
HIDDEN, HEADS, KV_HEADS, DIM, GDN_HEADS = 2048, 16, 2, 256, 32
"""Of Qwen3.6-35B-A3B."""

POSITIONS = 32_768
Results = tuple[Tensor, ...]
Call = Callable[..., Results]


@dataclass(frozen=True)
class Line:
    what: str
    rows: int
    candidate: str
    us: float
    floor_us: float
    bits: str
    """Of the results, beside those of the form in use: "same", "DIFFER" or "FAILED: ..."."""


@dataclass(frozen=True)
class Case:
    """``calls[name](*make())``; the first is in use.

    moved    bytes that must move
    written  how many of the last inputs the calls write to
    """

    what: str
    moved: float
    make: Callable[[], Results]
    calls: dict[str, Call]
    written: int = 0


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def draw_hard(*shape: int) -> Tensor:
    """``draw`` with, in the first rows, subnormal and huge values, zeros of both signs and outliers."""
    x = draw(*shape)
    for row, scale in enumerate((2.0**-120, 2.0**-131, 2.0**100, -0.0, 40.0)):
        x[row] *= scale
    x[5, ..., ::3] *= 90.0
    x[6, ..., ::2] = -0.0
    return x


def of_rows(rows: QuantizedRows) -> Results:
    return rows.values.view(torch.uint8), rows.scale


def gates(present: GateLaunch) -> dict[str, GateLaunch]:
    found = {"in use": present, "exact": replace(present, pairs=False)}
    for elements, warps in ((2048, 4), (1024, 2), (1024, 4), (4096, 4), (4096, 8), (8192, 8)):
        found[f"{elements} w{warps}"] = GateLaunch(elements, warps)
    return found


def gate_cases(rows: int) -> Iterator[Case]:
    width = GDN_HEADS * 128
    weight = torch.randn(128, device="cuda")

    def heads_and_gates() -> Results:
        z = draw_hard(rows, 3 * width)[:, -width:].view(rows, GDN_HEADS, 128)
        return draw_hard(rows, GDN_HEADS, 128).flip(0), z

    def norm(launch: GateLaunch) -> Call:
        given = {"activation": "silu", "launch": launch}
        return lambda o, z: of_rows(gated_rms_norm_quantized(o, z, weight, EPS, **given))

    def plain_norm(launch: GateLaunch) -> Call:
        given = {"activation": "silu", "launch": launch}
        return lambda o, z: (gated_rms_norm(o, z, weight, EPS, **given),)

    def gated(launch: GateLaunch) -> Call:
        return lambda x, gate: of_rows(sigmoid_mul_quantized(x, gate, launch=launch))

    def silu(launch: GateLaunch) -> Call:
        return lambda both: of_rows(silu_mul_quantized(both, launch=launch))

    def attended() -> Results:
        gate = draw(rows, HEADS * 2 * DIM + 2 * KV_HEADS * DIM)[:, : HEADS * 2 * DIM]
        return draw_hard(rows, HEADS, DIM), gate.view(rows, HEADS, 2 * DIM)[..., DIM:]

    def named(
        make: Callable[[GateLaunch], Call], present: GateLaunch, some: int | None = None
    ) -> dict[str, Call]:
        return {name: make(launch) for name, launch in list(gates(present).items())[:some]}

    count = float(rows * width)
    yield Case("gated norm+quantise", count * 5, heads_and_gates, named(norm, GATED_NORM))
    yield Case("sigmoid gate+quantise", count * 5, attended, named(gated, GATE_MUL))
    yield Case("gated norm", count * 6, heads_and_gates, named(plain_norm, GATED_NORM, 4))
    yield Case(
        "silu+quantise",
        rows * 512 * 5.0,
        lambda: (draw_hard(rows, 1024),),
        named(silu, GATE_MUL, 4),
    )


def stores(rows: int) -> dict[str, StoreLaunch]:
    found = {"in use": store_launch(rows), "one head": StoreLaunch()}
    for heads, warps in ((4, 1), (2, 1), (1, 1), (8, 1), (8, 2), (16, 4), (4, 2), (8, 4)):
        found[f"heads {heads} w{warps}"] = StoreLaunch(heads, warps)
    return found


def store_case(rows: int) -> Case:
    angles = torch.rand(POSITIONS, 32, device="cuda") * 6
    q_weight, k_weight = draw(DIM), draw(DIM)
    norm = NormRope(q_weight, k_weight, angles.cos(), angles.sin(), EPS, True)
    positions = torch.arange(rows, device="cuda") + 7
    slots = torch.arange(rows, device="cuda") + 64

    def projected() -> Results:
        columns = HEADS * 2 * DIM
        both = draw(rows, columns + 2 * KV_HEADS * DIM)
        q, k, v = both.split((columns, KV_HEADS * DIM, KV_HEADS * DIM), dim=-1)
        q = q.view(rows, HEADS, 2 * DIM)[..., :DIM]
        pools = torch.zeros(2, rows + 64, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        return q, k.view(rows, KV_HEADS, DIM), v.view(rows, KV_HEADS, DIM), pools[0], pools[1]

    def call(launch: StoreLaunch) -> Call:
        def store(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Results:
            given = {"positions": positions, "slots": slots, "launch": launch}
            out = norm_rope_store(q, k, v, norm, k_buffer=keys, v_buffer=values, **given)
            return out, keys, values

        return store

    moved = rows * DIM * 4.0 * (HEADS + 2 * KV_HEADS)
    calls = {name: call(launch) for name, launch in stores(rows).items()}
    return Case("norm+rope+store", moved, projected, calls, written=2)


def norm_cases(rows: int) -> Iterator[Case]:
    weight = draw(HIDDEN)

    def norm(pairs: bool | None, plain: bool) -> Call:
        def call(x: Tensor, delta: Tensor, *routed: Tensor) -> Results:
            added = RoutedSum(delta, *routed) if routed else delta
            given = {"unit_offset": True, "plain": plain, "quantized": True, "pairs": pairs}
            forms, total = norm_rows(x, added, weight, EPS, **given)
            plain_rows = () if forms.plain is None else (forms.plain,)
            return (*of_rows(forms.quantized), total, *plain_rows)

        return call

    def routed() -> Results:
        scores, parts = draw(rows, 264), draw(rows * 9, HIDDEN)
        chosen = torch.rand(rows, 256, device="cuda").topk(8).indices.to(torch.int32)
        weights = torch.rand(rows, 8, device="cuda", dtype=torch.float32).to(torch.bfloat16)
        shared = parts[rows * 8 :]
        return draw(rows, HIDDEN), parts[: rows * 8], weights, chosen, shared, scores[:, 256:257]

    count = float(rows * HIDDEN)
    for plain in (True, False):
        calls = {
            "in use": norm(None, plain),
            "exact": norm(False, plain),
            "pairs": norm(True, plain),
        }
        yield Case(
            f"add+norm+quantise{' and plain' if plain else ''}",
            count * (9 if plain else 7),
            lambda: (draw_hard(rows, HIDDEN), draw(rows, HIDDEN)),
            calls,
        )
    calls = {
        "in use": norm(None, False),
        "exact": norm(False, False),
        "pairs": norm(True, False),
    }
    yield Case("routed+norm+quantise", count * 23, routed, calls)


def cases(rows: int) -> Iterator[Case]:
    yield store_case(rows)
    yield from gate_cases(rows)
    yield from norm_cases(rows)


def same_bits(got: Results, want: Results) -> bool:
    return len(got) == len(want) and all(
        torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        for one, other in zip(got, want, strict=True)
    )


def spoil(results: Results, written: Results) -> None:
    """Leave no right result in memory: neither where calls write to nor where new tensors come to lie."""
    for tensor in written:
        tensor.fill_(float("nan"))
    for part in results:
        torch.full(part.shape, 5, dtype=torch.uint8, device="cuda").to(part.dtype)


def time_case(case: Case, rows: int, stop: float) -> Iterator[Line]:
    copies = max(2, min(24, int(3 * L2_BYTES / case.moved)))
    inputs = [case.make() for _ in range(copies)]
    names = list(case.calls)
    want: Results = ()
    for name in [*names, names[0]]:
        if time.monotonic() > stop:
            return
        call = case.calls[name]
        try:
            spoil(want, inputs[0][len(inputs[0]) - case.written :])
            kept = tuple(part.clone() for part in call(*inputs[0]))
            want = want or kept
            bits = "same" if same_bits(kept, want) else "DIFFER"
            us = graph_us([lambda call=call, own=own: call(*own) for own in inputs])
        except Exception as error:
            bits, us = f"FAILED: {str(error)[:200]}", float("inf")
        yield Line(case.what, rows, name, us, floor_us(case.moved), bits)


def run_once(what: str, name: str) -> None:
    """Compile one candidate, by running it on few rows."""
    case = next(case for case in cases(48) if case.what == what)
    case.calls[name](*case.make())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=30.0)
    parser.add_argument("--rows", type=int, nargs="+", default=[8192, 100])
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    args = parser.parse_args()
    torch.manual_seed(0)
    jobs = [(run_once, (case.what, name)) for case in cases(48) for name in case.calls]
    took = compile_side_by_side(jobs, args.workers)
    print(f"compiled {len(jobs)} candidates in {took:.1f} s", flush=True)
    stop = time.monotonic() + args.budget_s
    found: list[Line] = []
    with torch.no_grad():
        for rows in args.rows:
            for case in cases(rows):
                for line in time_case(case, rows, stop):
                    found.append(line)
                    print(
                        f"{line.rows:5d} {line.what:30s} {line.candidate:28s} {line.us:8.2f} us"
                        f"  floor {line.floor_us:6.1f}  {line.bits}",
                        flush=True,
                    )
                args.out.write_text(json.dumps([asdict(line) for line in found], indent=1))


if __name__ == "__main__":
    main()
