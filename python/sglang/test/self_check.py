"""Command line: whether this machine's device computes what it should.

    python -m sglang.test.self_check [--device auto|cpu|cuda]

Tiny random models of every architecture, in bf16 and FP8, run a prompt in two chunks, decode, a verify and what
it leaves, and are compared with plain PyTorch in fp32 on the CPU. Exit status 1 and a way out if the device
computes something else: for devices that nobody tested this build on.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sglang.kernels.ops.cpu import library
from sglang.srt.arg_groups.basic_hook import detect_device
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.checkpoints import ARCHITECTURES
from sglang.test.make_checkpoint import make_checkpoint
from sglang.test.model_reference import (
    RouteLog,
    Routes,
    map_errors,
    plain_logits,
    quantized_logits,
    relative_error,
)
from sglang.test.model_rig import ModelRig

WAYS_OUT = {
    "cpu": "serve with SGLANG_CPU_KERNELS=torch, which uses none of the compiled kernels",
    "cuda": "serve with --device cpu",
}
_CPU_LIMIT = 1e-4
_GPU_LIMITS = {"bf16": 0.05, "fp8": 0.12}
"""Of the logits' norm, over four layers; see docs/numerics.md."""
_MAP_LIMIT = 0.015
_DRAFTS = 4
_LENGTH, _CUT = 120, 77


@dataclass(frozen=True)
class Finding:
    """One comparison: ``error`` may be at most ``limit``."""

    name: str
    error: float
    limit: float

    @property
    def is_good(self) -> bool:
        return self.error <= self.limit  # false for NaN

    def __str__(self) -> str:
        word = "ok    " if self.is_good else "WRONG "
        return f"{word} {self.name:45s} {self.error:.2e} (at most {self.limit:g})"


def check(device: str, folder: Path) -> Iterator[Finding]:
    """Every comparison on ``device``; checkpoints are written into ``folder``."""
    for arch in ARCHITECTURES:
        for dtype in ("bf16", "fp8"):
            path = str(make_checkpoint(folder / f"{arch}-{dtype}", arch=arch, dtype=dtype, seed=1))
            yield from _check_model(device, f"{arch} {dtype}", path, dtype)


def _check_model(device: str, name: str, path: str, dtype: str) -> Iterator[Finding]:
    limit = _CPU_LIMIT if device == "cpu" else _GPU_LIMITS[dtype]
    tokens = torch.randint(0, 4000, (_LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()
    runs = [_run(_rig(device, path, lossless=lossless), tokens) for lossless in (False, True)]
    (logits, state, routes), (lossless_logits, lossless_state, _) = runs
    rounds = dtype == "fp8" and device != "cpu"
    want, _ = (quantized_logits if rounds else plain_logits)(path, tokens, routes)
    for part, rows in (("prompt", slice(_LENGTH - 6)), ("decode and verify", slice(-6, None))):
        yield Finding(f"{name}: {part}", relative_error(logits[rows], want[rows]), limit)
    same = torch.equal(logits, lossless_logits) and torch.equal(state, lossless_state)
    yield Finding(f"{name}: lossless equals default", float(not same), 0)
    if rounds:
        plain = ModelRig(path, kernels="torch").model
        worst = max(map_errors(_rig(device, path), plain, num_rows=9).values())
        yield Finding(f"{name}: every FP8 map by itself", worst, _MAP_LIMIT)


def _rig(device: str, path: str, *, lossless: bool = False) -> ModelRig:
    common = {"num_draft": _DRAFTS, "lossless": lossless}
    if device == "cpu":
        library.select("auto")
        kernels = "torch" if library.library() is None else "native"
        return ModelRig(path, kernels=kernels, **common)
    options = {"dtype": torch.bfloat16, "conv_dtype": "bfloat16", "device": device}
    return ModelRig(path, kernels="torch", **common, **options)


def _run(rig: ModelRig, tokens: list[int]) -> tuple[Tensor, Tensor, Routes]:
    """Logits [T, vocab] of all tokens, the recurrent state after them, and the routes taken (on a GPU)."""
    log = nullcontext() if rig.device.type == "cpu" else RouteLog(rig)
    parts: list[Tensor] = []
    taken: list[slice] = []

    def call(mode: ForwardMode, begin: int, end: int, keep: int | None = None) -> None:
        parts.append(rig.run(mode, [tokens[begin:end]], [begin]).logits[:keep].clone())
        taken.append(slice(keep))

    with log as routes:
        call(ForwardMode.EXTEND, 0, _CUT)
        call(ForwardMode.EXTEND, _CUT, _LENGTH - 6)
        call(ForwardMode.DECODE, _LENGTH - 6, _LENGTH - 5)
        call(ForwardMode.TARGET_VERIFY, _LENGTH - 5, _LENGTH - 1, keep=3)
        rig.commit([2])
        for at in (_LENGTH - 2, _LENGTH - 1):
            call(ForwardMode.DECODE, at, at + 1)
    chosen = routes.take(taken) if routes is not None else {}
    return torch.cat(parts).cpu(), rig.states(1)[1].cpu(), chosen


def main(argv: list[str] | None = None, *, write: Callable[[str], object] = print) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="self_check", description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    device = parser.parse_args(argv).device
    device = detect_device() if device == "auto" else device
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no GPU is visible to this process; use --device cpu")
    what = torch.cuda.get_device_name(0) if device == "cuda" else "this CPU"
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for finding in check(device, Path(folder)):
            write(str(finding))
            wrong += not finding.is_good
    library.select("auto")
    if wrong:
        write(f"{what} computes {wrong} things wrongly with this build: {WAYS_OUT[device]}")
        return 1
    write(f"{what} computes what it should")
    return 0


if __name__ == "__main__":
    sys.exit(main())
