"""Run every stage of a hybrid layer on one input many times and name the stages that do not repeat.

    PYTHONPATH=python python benchmark/gpu_smoke/repeat_stages.py [--repeats 30] [--dtype bfloat16]

Inputs never change and every allocation in between is poisoned, so two answers of a stage mean a race or an
uninitialised read in it. Of the chunked prefill each kernel is watched by itself; a kernel whose inputs
already differ is not blamed. Exit status 1 if a stage did not repeat.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sglang.kernels import triton_support
from sglang.kernels.ops.attention.fla import gdn_prefill, prefill_kernels
from sglang.kernels.ops.attention.fla.fused_gdn_gating import fused_gdn_gating
from sglang.kernels.ops.attention.fla.prefill_plan import PrefillTokens, plan_prefill
from sglang.kernels.ops.attention.paged.op import paged_attention
from sglang.kernels.ops.fused.rows import rms_norm
from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn
from sglang.kernels.ops.moe.experts import run_experts
from sglang.kernels.ops.moe.route import route
from sglang.kernels.ops.quantization.fp8 import block_scaled_linear, quantize_activations

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


@functools.cache
def descriptors() -> tuple[type, ...]:
    """Types of tensor descriptors: Triton's, and Gluon's where there is one."""
    if importlib.util.find_spec("triton.experimental.gluon") is None:
        return (TensorDescriptor,)
    from triton.experimental.gluon.nvidia import hopper

    return TensorDescriptor, hopper.TensorDescriptor


def digest(value: object) -> str:
    """Of every tensor in ``value``, bit by bit; a descriptor stands for the tensor that it describes."""
    found = hashlib.sha256()
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            found.update(item.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy())
        elif isinstance(item, descriptors()):
            stack.append(item.base)
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


class WatchedKernel:
    """A Triton kernel whose launches are recorded: its tensors before, and the same ones after."""

    def __init__(self, name: str, kernel: Any, recorder: Recorder) -> None:
        self._name, self._kernel, self._recorder = name, kernel, recorder

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: object, **options: object) -> None:
            inputs = [args[i] for i in self._inputs(args)]
            before = digest(inputs)
            self._kernel[grid](*args, **options)
            self._recorder.calls.append((self._name, before, digest(list(args))))

        return launch

    def _inputs(self, args: tuple[object, ...]) -> list[int]:
        """What is not scratch yet to be written, whose contents are poison."""
        names = self._kernel.arg_names[: len(args)]
        made = {"solved", "attn", "q_coef", "k_coef", "s_coef", "decay"}
        scratch = {"out", "out_rows", "desc_out"} if "pool" in names else made
        return [i for i, name in enumerate(names) if name not in scratch]


def prefill_kernel_names(device: torch.device) -> list[tuple[Any, str]]:
    """(module that launches it, name) of every kernel of the chunked prefill that may run on ``device``."""
    found = [(prefill_kernels, name) for name in ("prefill_chunk_kernel", "prefill_state_kernel")]
    if triton_support.runs_on_hopper(device):
        from sglang.kernels.ops.attention.fla import prefill_hopper

        found.append((prefill_hopper, "prefill_state_hopper_kernel"))
    return found


def watch_prefill(stack: ExitStack, recorder: Recorder, device: torch.device) -> None:
    for module, name in prefill_kernel_names(device):
        watched = WatchedKernel(name, getattr(module, name), recorder)
        stack.enter_context(mock.patch.object(module, name, watched))


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
    packed = draw(total, conv_dim)
    widths = (g.key_heads * dim, g.key_heads * dim, g.value_heads * dim)
    parts = (t.unflatten(-1, (-1, dim)) for t in packed.split(widths, dim=-1))
    tokens = PrefillTokens(*parts, gates[1], biases[0], gates[0], biases[1])
    plan = plan_prefill(LENGTHS, [-1, 21, 64, 70, 256], device)
    dests = torch.tensor([-1, 6, 7, 8, 9], device=device)
    pool = torch.zeros(2 * len(LENGTHS), g.value_heads, dim, dim, device=device)

    def prefill() -> tuple[Tensor, Tensor]:
        states = pool.clone()
        out = gdn_prefill.gdn_prefill(
            tokens, states, slots, plan, scale=dim**-0.5, track_dests=dests
        )
        return out, states

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
        "experts": lambda: run_experts(x, *route(logits, 2, renormalise=True), *experts).total(),
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
                watch_prefill(stack, recorder, device)
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
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA device")
        return 2
    bad: dict[str, int] = {}
    for g in GEOMETRIES:
        print(f"{g.name}, {options.dtype}, {options.repeats} repeats")
        dtype = getattr(torch, options.dtype)
        bad |= unstable_stages(g, dtype, options.repeats, torch.device("cuda"))
    print(f"not repeatable: {bad}" if bad else "every stage repeats bit for bit")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
