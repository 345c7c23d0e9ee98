"""Run every stage of a hybrid layer on one input many times and name the stages that do not repeat.

    PYTHONPATH=python python benchmark/gpu_smoke/repeat_stages.py [--repeats 30] [--dtype bfloat16]

Inputs never change and every allocation in between is poisoned, so two answers of a stage mean a race or an
uninitialised read in it. Of fla-core's chunk rule, each function it is made of is watched by itself; a
function whose inputs already differ is not blamed. ``--pin-warps 2`` leaves its kernels only the
configurations of that many warps, to see whether that cures it. Exit status 1 if a stage did not repeat.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import sys
import types
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor
from triton.runtime.autotuner import Autotuner, Heuristics

from sglang.kernels.ops.attention.fla import gdn_prefill
from sglang.kernels.ops.attention.fla.fused_gdn_gating import fused_gdn_gating
from sglang.kernels.ops.attention.paged.op import paged_attention
from sglang.kernels.ops.fused.rows import rms_norm
from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn
from sglang.kernels.ops.moe.experts import run_experts
from sglang.kernels.ops.moe.route import route
from sglang.kernels.ops.quantization.fp8 import block_scaled_linear, quantize_activations

FLA_MODULES = ("fla.ops.gated_delta_rule.chunk", "fla.ops.gated_delta_rule.chunk_fwd")
FLA_KERNEL_MODULES = (
    "fla.ops.gated_delta_rule.chunk_fwd",
    "fla.ops.gated_delta_rule.wy_fast",
    "fla.ops.common.chunk_delta_h",
    "fla.ops.common.chunk_o",
)
POISON_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Geometry:
    """GDN heads and width of one layer."""

    name: str
    hidden: int
    key_heads: int
    value_heads: int
    head_dim: int


GEOMETRIES = (
    Geometry("demo-like, heads of 64", 256, 2, 4, 64),
    Geometry("35B-A3B", 2048, 16, 32, 128),
)
LENGTHS = (12, 21, 66, 130, 300)


def digest(value: object) -> str:
    """Of every tensor in ``value``, bit by bit."""
    found = hashlib.sha256()
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            found.update(item.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy())
        elif isinstance(item, (tuple, list)):
            stack.extend(reversed(item))
        elif isinstance(item, dict):
            stack.extend(item[key] for key in sorted(item))
    return found.hexdigest()


@dataclass
class Recorder:
    """(name, digest of inputs, digest of outputs) of watched calls, in order."""

    calls: list[tuple[str, str, str]] = field(default_factory=list)

    def watch(self, name: str, function: Callable) -> Callable:
        def watched(*args: object, **options: object) -> object:
            before = digest([args, options])
            result = function(*args, **options)
            self.calls.append((name, before, digest(result)))
            return result

        return watched


def poison(device: torch.device) -> None:
    """Fill what the allocator will hand out next."""
    block = torch.full((POISON_ELEMENTS,), float("nan"), device=device)
    del block


def watch_fla(stack: ExitStack, recorder: Recorder) -> None:
    """Watch the functions that fla-core's chunk rule calls, whatever this version calls them."""
    for path in FLA_MODULES:
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError:
            continue
        for name, value in list(vars(module).items()):
            ours = isinstance(value, types.FunctionType) and value.__module__.startswith("fla.")
            if ours and ("fwd" in name or "cumsum" in name or "tril" in name):
                watched = recorder.watch(f"fla: {name}", value)
                stack.enter_context(mock.patch.object(module, name, watched))


def fla_tuners() -> dict[str, Autotuner]:
    """fla-core's autotuned forward kernels by name; empty where it is not installed."""
    found = {}
    for path in FLA_KERNEL_MODULES:
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError:
            continue
        for name, value in vars(module).items():
            inner = value
            while isinstance(inner, Heuristics):
                inner = inner.fn
            if isinstance(inner, Autotuner) and "bwd" not in name:
                found[name] = inner
    return found


def pin_warps(num_warps: int) -> None:
    """Leave every forward kernel only its configurations of ``num_warps``, where it has any."""
    for name, tuner in fla_tuners().items():
        kept = [config for config in tuner.configs if config.num_warps == num_warps]
        print(f"  {name}: {len(kept)} of {len(tuner.configs)} configurations")
        tuner.configs = kept or tuner.configs


def print_chosen() -> None:
    """What the autotuner took, once it has run."""
    for name, tuner in fla_tuners().items():
        for key, config in tuner.cache.items():
            print(f"  chosen: {name} {key}: {config}")


def stages(
    g: Geometry, dtype: torch.dtype, device: torch.device
) -> dict[str, Callable[[], object]]:
    """Each stage as a call without arguments, over inputs fixed here."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        made = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return made.to(dtype)

    total, dim = sum(LENGTHS), g.head_dim
    conv_dim = (2 * g.key_heads + g.value_heads) * dim
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).to(device, torch.int32)
    x, weight = draw(total, g.hidden), draw(conv_dim, g.hidden) / g.hidden**0.5
    mixed, taps = draw(total, conv_dim), draw(conv_dim, 4)
    slots = torch.arange(1, len(LENGTHS) + 1, device=device, dtype=torch.int32)
    windows = torch.zeros(len(LENGTHS) + 1, conv_dim, 3, device=device, dtype=dtype)
    gates = (draw(g.value_heads, dtype=torch.float32), draw(total, g.value_heads))
    biases = (draw(total, g.value_heads), draw(g.value_heads, dtype=torch.float32))
    log_decay, beta = (t[0] for t in fused_gdn_gating(gates[0], gates[1], *biases))
    tokens = gdn_prefill.PrefillTokens(
        draw(total, g.key_heads, dim),
        draw(total, g.key_heads, dim),
        draw(total, g.value_heads, dim),
        log_decay,
        beta,
    )
    pool = torch.zeros(len(LENGTHS) + 1, g.value_heads, dim, dim, device=device)

    def prefill() -> tuple[Tensor, Tensor]:
        states = pool.clone()
        return gdn_prefill.gdn_prefill(tokens, states, slots, LENGTHS, scale=dim**-0.5), states

    keys, values = draw(total + 1, 2, 64), draw(total + 1, 2, 64)
    table = torch.zeros(len(LENGTHS) + 1, max(LENGTHS), device=device, dtype=torch.int32)
    for row, (start, length) in enumerate(zip(bounds.tolist(), LENGTHS), start=1):
        table[row, :length] = torch.arange(start + 1, start + 1 + length, device=device)
    q = draw(total, 4, 64)
    experts = (draw(8, 256, g.hidden) / g.hidden**0.5, draw(8, g.hidden, 128) / 128**0.5)
    logits = draw(total, 8)
    fp8, scale = quantize_activations(weight)
    scale = scale[::128, :].contiguous()
    return {
        "linear (cuBLAS)": lambda: torch.nn.functional.linear(x, weight),
        "rms_norm": lambda: rms_norm(x, draw_once(g.hidden, device), 1e-6, unit_offset=True),
        "conv prefill": lambda: causal_conv1d_fn(
            mixed.t(), taps, None, windows.clone(), bounds, list(LENGTHS), cache_indices=slots
        ),
        "gating": lambda: fused_gdn_gating(gates[0], gates[1], *biases),
        "gdn prefill": prefill,
        "paged attention": lambda: paged_attention(
            q,
            keys,
            values,
            req_to_token=table,
            rows=slots.long(),
            prefix_lens=torch.zeros(len(LENGTHS), device=device, dtype=torch.int64),
            query_start_loc=bounds,
            max_query_len=max(LENGTHS),
            scaling=0.125,
        ),
        "fp8 linear": lambda: block_scaled_linear(x, fp8, scale),
        "experts": lambda: run_experts(x, *route(logits, 2, renormalise=True), *experts),
    }


def draw_once(size: int, device: torch.device) -> Tensor:
    return torch.linspace(-0.1, 0.1, size, device=device)


def unstable_stages(
    g: Geometry, dtype: torch.dtype, repeats: int, device: torch.device
) -> dict[str, int]:
    """Number of different answers of each stage that had more than one."""
    found: dict[str, int] = {}
    for name, call in stages(g, dtype, device).items():
        recorder = Recorder()
        answers = set()
        with ExitStack() as stack:
            if name == "gdn prefill":
                watch_fla(stack, recorder)
            for _ in range(repeats):
                poison(device)
                answers.add(digest(call()))
        by_input: dict[tuple[str, str], set[str]] = {}
        for part, before, after in recorder.calls:
            by_input.setdefault((part, before), set()).add(after)
        parts = {part: len(outs) for (part, _), outs in by_input.items() if len(outs) > 1}
        watched = f", {len({part for part, _ in by_input})} parts watched" if by_input else ""
        print(f"  {name:16s} {len(answers)} answer(s){watched} {parts or ''}", flush=True)
        if len(answers) > 1:
            found |= parts or {name: len(answers)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--pin-warps", type=int, default=None)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA device")
        return 2
    if options.pin_warps is not None:
        pin_warps(options.pin_warps)
    bad: dict[str, int] = {}
    for g in GEOMETRIES:
        print(f"{g.name}, {options.dtype}, {options.repeats} repeats")
        dtype = getattr(torch, options.dtype)
        bad |= unstable_stages(g, dtype, options.repeats, torch.device("cuda"))
    print_chosen()
    print(f"not repeatable: {bad}" if bad else "every stage repeats bit for bit")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
