"""Time the kernels of FP8 products of prompt chunks against each other, and ask for equal bits.

    PYTHONPATH=python python benchmark/gpu_kernels/prompt_products.py --out results.json [--budget-s 60]

A process of its own times the candidates one after another and says so before each: after a crash, or silence,
its successor goes on with the next. The kernel in use comes first and is timed again at the end, which shows how far
clocks have drifted; all must equal the Triton tiles that serve other GPUs. g is the height of a band.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

DENSE = ("in_proj", "out", "qkv")
EXPERTS = ("up", "down", "sort rows", "both")
ROWS = 8192
SILENCE_S = 25.0
"""Longest wait for a word of the process: it imports, draws weights and compiles between two of them."""


@dataclass(frozen=True)
class Candidate:
    """``kernel``: the CUDA kernel, the Triton tiles, or the copy of rows to their slots."""

    what: str
    kernel: str = "cuda"
    group_m: int = 8

    @property
    def name(self) -> str:
        if self.kernel != "cuda":
            return self.kernel
        band = f" g{self.group_m}" if self.what in DENSE else ""
        return f"cuda{band}"


def candidates() -> list[Candidate]:
    """The most telling first."""
    found = []
    for what in ("in_proj", "up", "down", "both", "out", "qkv"):
        found.append(Candidate(what))
        if what == "in_proj":
            found += [Candidate(what, group_m=height) for height in (4, 16)]
        if what == "up":
            found.append(Candidate("sort rows", "copy"))
        found += [Candidate(what, "triton"), Candidate(what)]
    return found


# --- the process that times ---


def worker(wanted: list[Candidate]) -> None:
    import torch

    torch.manual_seed(0)
    for candidate in wanted:
        print(json.dumps({"start": True}), flush=True)
        try:
            with torch.no_grad():
                line = measure(candidate)
        except Exception as error:
            line = {"error": f"{type(error).__name__}: {str(error)[:1500]}", "broken": is_broken()}
        print(json.dumps(line), flush=True)
        if line.get("broken"):
            return


def is_broken() -> bool:
    """Whether a failed launch has left this process unable to use the GPU."""
    import torch

    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError):
        return True
    return False


def compile_experts() -> None:
    """In a process beside the one that times: what takes long to compile and comes later."""
    from products import once

    from sglang.kernels.ops.moe.launch import expert_tiles

    tiles = expert_tiles(ROWS, 2, fp8=True)
    once(tiles.up, ROWS, "35B", "up")
    once(tiles.down, ROWS, "35B", "down")


def measure(candidate: Candidate) -> dict:
    from timing import graph_us

    case = dense_case(candidate.what) if candidate.what in DENSE else expert_case()
    calls = case.calls(candidate)
    line = case.compare(candidate, calls[0]())
    return line | {"us": graph_us(calls), "floor_us": case.floor(candidate.what)}


def compare_bits(got, want) -> dict:
    """Whether both have the same bits, with what is needed to find a mistake if not."""
    import torch

    kind = torch.int16 if got.element_size() == 2 else torch.uint8
    one, other = got.view(kind), want.view(kind)
    same = torch.equal(one, other)
    line = {"same": same, "control_same": torch.equal(one.roll(1, 0), other)}
    if not same:
        wrong = (one != other).float()
        corner = wrong[:512, :512].unflatten(0, (-1, 64)).unflatten(2, (-1, 64)).mean((1, 3))
        number, right = got.float().nan_to_num(), want.float().nan_to_num()
        line["wrong"] = {
            "share": float(wrong.mean()),
            "nan": float(got.float().isnan().float().mean()),
            "norm of difference": float((number - right).norm() / right.norm()),
            "share in the first blocks of 64 x 64": corner.cpu().tolist(),
            "got": number[:2, :8].cpu().tolist(),
            "want": right[:2, :8].cpu().tolist(),
        }
    return line


@cache
def dense_case(what: str):
    from products import DENSE as SHAPES

    return DenseCase(*SHAPES["35B"][what])


@cache
def expert_case():
    return ExpertsCase()


class DenseCase:
    """Several copies of a weight, so that the L2 cache does not hold it."""

    def __init__(self, columns: int, depth: int) -> None:
        import torch
        from timing import copies_of, fp8_weight

        from sglang.kernels.ops.quantization.fp8 import quantize

        self.columns, self.depth = columns, depth
        self.weights = [fp8_weight(columns, depth) for _ in range(copies_of(columns * depth))]
        self.x = quantize(torch.randn(ROWS, depth, device="cuda", dtype=torch.bfloat16))
        self.want = self.run(Candidate("", "triton"), 0)

    def run(self, candidate: Candidate, copy: int):
        from sglang.kernels.ops.quantization.fp8 import block_scaled_linear
        from sglang.kernels.ops.quantization.launch import dense_tile

        tile = dense_tile(ROWS, self.columns)
        if candidate.kernel == "cuda":
            tile = cuda_tile(candidate)
        return block_scaled_linear(self.x, *self.weights[copy], tile=tile)

    def calls(self, candidate: Candidate) -> list:
        return [partial(self.run, candidate, copy) for copy in range(len(self.weights))]

    def compare(self, candidate: Candidate, got) -> dict:
        return compare_bits(got, self.want)

    def floor(self, what: str) -> float:
        from timing import floor_us

        moved = self.columns * self.depth + ROWS * (self.depth + 2 * self.columns)
        return floor_us(moved, 2.0 * ROWS * self.columns * self.depth)


def cuda_tile(candidate: Candidate):
    from sglang.kernels.ops.quantization.launch import HopperTile

    return HopperTile(candidate.group_m)


class ExpertsCase:
    """All experts of a layer and rows routed at random; results are compared by pair."""

    def __init__(self) -> None:
        import torch
        from products import EXPERTS as SHAPES
        from products import ExpertCase

        from sglang.kernels.ops.moe.launch import expert_tiles
        from sglang.kernels.ops.quantization.rows import FP8_DTYPE, QuantizedRows

        self.case = ExpertCase(SHAPES["35B"], ROWS)
        self.rows = self.case.order(128)
        order = self.rows.order
        slots = torch.arange(len(order.pairs), device="cuda")
        used = (order.tile_experts.repeat_interleave(128) >= 0) & (order.pairs >= 0)
        self.slot_of = torch.empty(self.rows.num_results, dtype=torch.int64, device="cuda")
        self.slot_of[order.pairs[used].long()] = slots[used]
        shared = torch.arange(self.rows.shared_rows, device="cuda") + len(order.pairs)
        self.slot_of[self.rows.num_pairs :] = shared
        inner = self.case.inner
        values = torch.zeros((128 * self.rows.num_tiles, inner.shape[1]), device="cuda").byte()
        values[self.slot_of] = inner.values.view(torch.uint8)
        scale = torch.ones((len(values), inner.scale.shape[1]), device="cuda")
        scale[self.slot_of] = inner.scale
        self.inner = QuantizedRows(values.view(FP8_DTYPE), scale, torch.bfloat16)
        self.triton = expert_tiles(ROWS, 2, fp8=True)
        self.want_up = self.triton_up()
        self.want_down = self.case.down(self.triton.down)
        self.weights = torch.rand(ROWS, self.rows.top_k, device="cuda", dtype=torch.bfloat16)
        self.gate = torch.rand(ROWS, 1, device="cuda", dtype=torch.bfloat16)
        self.want_both = self.both(Candidate("both", "triton"))

    def calls(self, candidate: Candidate) -> list:
        from sglang.kernels.ops.moe.by_slot import down_by_slot, sort_rows

        case, rows, what = self.case, self.rows, candidate.what
        if what == "both":
            return [partial(self.both, candidate)]
        if what == "sort rows":
            return [partial(sort_rows, case.x.values, rows.order, rows.top_k)]
        if candidate.kernel == "triton":
            return [self.triton_up if what == "up" else partial(case.down, self.triton.down)]
        tile = cuda_tile(candidate)
        if what == "up":
            return [partial(self.up, tile)]
        return [partial(down_by_slot, self.inner, *case.down_weight, rows, tile)]

    def triton_up(self):
        """By pair."""
        from sglang.kernels.ops.moe.experts import grouped_gated

        order = self.case.order(self.triton.block_m)
        return grouped_gated(self.case.x, *self.case.gate_up, order, self.triton.up)

    def both(self, candidate: Candidate):
        """From the order of pairs to every pair's output."""
        from sglang.kernels.ops.moe.experts import run_experts

        case = self.case
        tiles = self.triton if candidate.kernel == "triton" else cuda_tile(candidate)
        (gate_up, gate_up_scale), (down, down_scale) = case.gate_up, case.down_weight
        return run_experts(
            case.x,
            self.weights,
            case.chosen,
            gate_up,
            down,
            gate_up_scale=gate_up_scale,
            down_scale=down_scale,
            shared_gate=self.gate,
            last_is_shared=True,
            tiles=tiles,
        ).parts

    def up(self, tile):
        """The product alone: rows were sorted before."""
        from sglang.kernels.ops.quantization.hopper_cuda import SlotRows, hopper_product
        from sglang.kernels.ops.quantization.rows import QuantizedRows

        case, order = self.case, self.rows.order
        slots = SlotRows(
            order.pairs,
            order.tile_experts,
            self.rows.num_pairs,
            self.rows.top_k,
            self.rows.shared_rows,
            self.sorted_values(),
        )
        inner, device = case.shape["inner"], case.x.device
        out = QuantizedRows.empty(128 * slots.num_tiles, inner, dtype=case.x.dtype, device=device)
        hopper_product(case.x, *case.gate_up, out.values, out.scale, tile, slots=slots)
        return out

    @cache  # noqa: B019 - lives as long as the process
    def sorted_values(self):
        from sglang.kernels.ops.moe.by_slot import sort_rows

        return sort_rows(self.case.x.values, self.rows.order, self.rows.top_k)

    def compare(self, candidate: Candidate, got) -> dict:
        import torch

        if candidate.what == "down":
            return compare_bits(got, self.want_down)
        if candidate.what == "both":
            return compare_bits(got, self.want_both)
        if candidate.what == "sort rows":
            pair = torch.arange(self.rows.num_pairs, device="cuda")
            made = got.view(torch.uint8)[self.slot_of[pair]]
            return compare_bits(made, self.case.x.values.view(torch.uint8)[pair // self.rows.top_k])
        values, scale = got.values.view(torch.uint8), got.scale
        if candidate.kernel == "cuda":
            values, scale = values[self.slot_of], scale[self.slot_of]
        line = compare_bits(values, self.want_up.values.view(torch.uint8))
        line["scales_same"] = torch.equal(scale, self.want_up.scale)
        line["same"] = line["same"] and line["scales_same"]
        return line

    def floor(self, what: str) -> float:
        from timing import floor_us

        if what == "sort rows":
            hidden = self.case.shape["hidden"]
            return floor_us(hidden * (ROWS + self.rows.num_pairs))
        if what == "both":
            return self.case.floor("up") + self.case.floor("down")
        return self.case.floor(what)


# --- the process that is called ---


class Child:
    """A worker and its words, one at a time."""

    def __init__(self, wanted: list[Candidate]) -> None:
        arguments = json.dumps([asdict(each) for each in wanted])
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--worker", arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ.copy(),
        )
        self.words: queue.Queue[str | None] = queue.Queue()
        self.noise: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        if self.process.stdout is not None:
            for line in self.process.stdout:
                self.words.put(line)
        self.words.put(None)

    def next(self, patience_s: float) -> dict | None:
        """The next word, None if the worker has ended or is silent for ``patience_s``."""
        end = time.monotonic() + patience_s
        while (left := end - time.monotonic()) > 0:
            try:
                line = self.words.get(timeout=left)
            except queue.Empty:
                return None
            if line is None:
                return None
            if line.startswith("{"):
                return json.loads(line)
            self.noise.append(line.rstrip())
        return None

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def run_all(wanted: list[Candidate], stop: float) -> list[dict]:
    found: list[dict] = []
    left = list(wanted)
    while left and time.monotonic() < stop:
        child = Child(left)
        while left:
            patience = min(SILENCE_S, stop - time.monotonic())
            started = child.next(patience)
            line = child.next(min(SILENCE_S, stop - time.monotonic())) if started else None
            if line is None and time.monotonic() >= stop:
                break
            if line is None:
                why = "ended" if child.process.poll() is not None else "silent"
                noise = " | ".join(child.noise[-6:])[:1500]
                line = {"error": f"{why}: {noise}", "broken": True}
            candidate = left.pop(0)
            found.append({"what": candidate.what, "candidate": candidate.name} | line)
            show(found[-1])
            if line.get("broken"):
                break
        child.end()
    for candidate in left:
        print(f"not reached: {candidate.what} {candidate.name}")
    return found


def show(line: dict) -> None:
    head = f"{line['what']:10s} {line['candidate']:24s}"
    if "error" in line:
        print(f"{head} FAILED {line['error']}", flush=True)
        return
    bits = {True: "same bits", False: "WRONG", None: ""}[line.get("same")]
    if line.get("control_same"):
        bits += ", BUT SO HAS THE CONTROL"
    times = f"{line['us']:8.1f} us {line['us'] / line['floor_us']:6.2f} x floor"
    print(f"{head} {times} {bits}", flush=True)
    for name, value in line.get("wrong", {}).items():
        if name.startswith("share in"):
            for row in value:
                print("   ", " ".join(f"{x:4.2f}" for x in row))
        else:
            print(f"    {name}: {value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget-s", type=float, default=60.0)
    parser.add_argument("--only", nargs="+", help="products, of " + ", ".join(DENSE + EXPERTS))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--compile-experts", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        worker([Candidate(**each) for each in json.loads(options.worker)])
        return
    if options.compile_experts:
        compile_experts()
        return
    if options.out is None:
        parser.error("--out is missing: the file for the results")
    begin = time.monotonic()
    wanted = [c for c in candidates() if not options.only or c.what in options.only]
    beside = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), "--compile-experts"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    found = run_all(wanted, begin + options.budget_s)
    beside.kill()
    beside.wait()
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"took {time.monotonic() - begin:.0f} s of {options.budget_s:.0f}")


if __name__ == "__main__":
    main()
