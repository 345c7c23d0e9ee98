"""Time paged attention and the KV store over many settings, beside what the memory or the tensor cores allow.

    PYTHONPATH=python python benchmark/gpu_kernels/attention.py --out results.json [--model 35B|27B] [--budget-s 90]

CUDA-graph replays over several layers' pools, so that the L2 cache does not hold them; median of blocks.
Every setting is compared with fp32 PyTorch on sampled rows before it is timed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from sglang.kernels.ops.attention.paged.launch import (
    SPLITS,
    HopperLaunch,
    PagedLaunch,
    SplitRule,
    few_rows,
    many_rows,
    short_chunks,
)
from sglang.kernels.ops.attention.paged.op import SplitWorkspace, paged_attention
from sglang.kernels.ops.attention.paged.store import NormRope, norm_rope_store, store_kv
from sglang.test.graph_timing import graph_us

BYTES_PER_US = 4.3e6  # an H200's measured streaming rate
FLOP_PER_US = 7.9e8  # its measured rate of a large bf16 product
L2_BYTES = 60e6
PAGE = 64
HEAD_DIM = 256
HEADS = {"35B": (16, 2), "27B": (24, 4)}
DECODE = ((25, 4, 27_000), (25, 1, 27_000), (8, 4, 1_024), (8, 4, 4_096), (1, 4, 4_096))
PREFILL = ((1, 8_192, 18_432), (1, 8_192, 0), (8, 1_024, 0), (1, 8_192, 8_192))
TAILS = (
    (1, 16, 26_000),
    (1, 64, 26_000),
    (1, 128, 26_000),
    (1, 256, 26_000),
    (1, 512, 26_000),
    (1, 128, 4_096),
)
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Setting:
    """What is varied: the tile; for split contexts also the rule and the partial results' dtype."""

    tile: PagedLaunch | HopperLaunch
    rule: SplitRule | None = None
    partial: str = "bfloat16"


@dataclass(frozen=True)
class Timing:
    """One line of the table. ``floor_us``: bytes or products over the measured peak rates."""

    what: str
    setting: dict[str, object] | str
    us: float
    floor_us: float
    error: float | None = None


@dataclass
class Case:
    """R requests of D rows after ``prefix`` tokens, over ``layers`` pools of the same shape."""

    requests: int
    steps: int
    prefix: int
    heads: int
    kv_heads: int
    layers: int = 1
    q: Tensor = field(init=False)
    pools: list[tuple[Tensor, Tensor]] = field(init=False)
    table: Tensor = field(init=False)

    def __post_init__(self) -> None:
        context = self.prefix + self.steps
        pages = -(-context // PAGE)
        order = torch.randperm(self.requests * pages, device="cuda") + 1
        slots = order[:, None] * PAGE + torch.arange(PAGE, device="cuda")
        self.table = slots.view(self.requests, -1).int()
        shape = ((self.requests * pages + 1) * PAGE, self.kv_heads, HEAD_DIM)
        self.pools = [(draw(*shape), draw(*shape)) for _ in range(self.layers)]
        self.q = draw(self.requests * self.steps, self.heads, HEAD_DIM)
        self.rows = torch.arange(self.requests, device="cuda")
        self.prefixes = torch.full((self.requests,), self.prefix, device="cuda")
        ends = torch.arange(self.requests + 1, device="cuda") * self.steps
        self.start = ends.int()

    @property
    def context(self) -> int:
        return self.prefix + self.steps

    @property
    def floor_us(self) -> float:
        """The larger of streaming K and V once and of the products below the diagonal."""
        moved = self.requests * self.context * self.kv_heads * HEAD_DIM * 4
        pairs = self.requests * self.steps * (self.prefix + (self.steps + 1) / 2)
        return max(moved / BYTES_PER_US, pairs * self.heads * HEAD_DIM * 4 / FLOP_PER_US)

    def workspace(self, setting: Setting) -> SplitWorkspace | None:
        if setting.rule is None:
            return None
        return SplitWorkspace(
            max_rows=len(self.q),
            max_context=262_144,
            num_heads=self.heads,
            head_dim=HEAD_DIM,
            device=self.q.device,
            dtype=getattr(torch, setting.partial),
            rule=setting.rule,
        )

    def call(self, setting: Setting, workspace: SplitWorkspace | None, layer: int = 0) -> Tensor:
        keys, values = self.pools[layer]
        return paged_attention(
            self.q,
            keys,
            values,
            req_to_token=self.table,
            rows=self.rows,
            prefix_lens=self.prefixes,
            query_start_loc=self.start,
            max_query_len=self.steps,
            scaling=HEAD_DIM**-0.5,
            workspace=workspace,
            page_size=PAGE,
            tile=setting.tile,
        )

    def contiguous(self, request: int, layer: int = 0) -> tuple[Tensor, Tensor]:
        """K and V [context, Nkv, d] of one request."""
        slots = self.table[request, : self.context].long()
        keys, values = self.pools[layer]
        return keys[slots], values[slots]

    def sampled(self) -> tuple[Tensor, Tensor]:
        """Rows to compare, and their attention in fp32."""
        picked, wanted = [], []
        group = self.heads // self.kv_heads
        for request in {0, self.requests - 1}:
            keys, values = (x.float() for x in self.contiguous(request))
            for t in sorted({0, self.steps // 3, self.steps - 2, self.steps - 1} - {-1}):
                at = request * self.steps + t
                q = self.q[at].float().view(self.kv_heads, group, HEAD_DIM)
                seen = self.prefix + t + 1
                scores = torch.einsum("kgd,nkd->kgn", q, keys[:seen]) * HEAD_DIM**-0.5
                out = torch.einsum("kgn,nkd->kgd", scores.softmax(-1), values[:seen])
                picked.append(at)
                wanted.append(out.reshape(self.heads, HEAD_DIM))
        return torch.tensor(picked, device="cuda"), torch.stack(wanted)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16)


RULES = (
    SplitRule(128, 64, 32),
    SplitRule(256, 64, 64),
    SplitRule(512, 64, 32),
    SplitRule(256, 64, 16),
)


def decode_settings(case: Case) -> Iterator[Setting]:
    """The table's first; then rules under the table's tile, tiles under its rule."""
    group_rows = case.steps * case.heads // case.kv_heads
    table = few_rows(HEAD_DIM, group_rows)
    yield Setting(table, SPLITS)
    yield Setting(table, SPLITS, "float32")
    for rule in RULES:
        yield Setting(table, rule)
    height = max(16, 1 << (group_rows - 1).bit_length())
    for n, warps, stages in ((32, 4, 2), (32, 4, 3), (64, 4, 3)):
        yield Setting(PagedLaunch(height, n, warps, stages), SPLITS)


def prefill_settings(case: Case) -> Iterator[Setting]:
    """The Hopper kernel first; its blocks; the general kernel."""
    yield Setting(HopperLaunch())
    yield Setting(HopperLaunch(32, 4))
    yield Setting(HopperLaunch(32, 3))
    yield Setting(many_rows(HEAD_DIM))


def tail_settings(case: Case) -> Iterator[Setting]:
    """A short chunk after a long prefix: split as the table has it, and whole by either kernel."""
    yield Setting(short_chunks(HEAD_DIM), SPLITS)
    yield Setting(HopperLaunch())
    yield Setting(many_rows(HEAD_DIM))


def sweep(case: Case, what: str, settings: list[Setting], stop: float) -> list[Timing]:
    """Times of all settings that agree with fp32; a line with an error and no time names the others."""
    picked, want = case.sampled()
    spaces = [case.workspace(setting) for setting in settings]
    with ThreadPoolExecutor(12, initializer=enter_context) as pool:  # compiles side by side
        list(pool.map(case.call, settings, spaces))
    found: list[Timing] = []
    for setting, space in zip(settings, spaces, strict=True):
        if time.monotonic() > stop:
            break
        error = relative(case.call(setting, space)[picked], want)
        us = 0.0
        if error < 1e-2:
            layers = range(case.layers)
            calls = [partial(case.call, setting, space, layer) for layer in layers]
            us = graph_us(calls)
        found.append(Timing(what, asdict(setting), us, case.floor_us, error))
    return found


def enter_context() -> None:
    """Make the device's context this thread's: a descriptor of the copy engine needs it before any launch."""
    torch.zeros(1, device="cuda")


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.float() - want).norm() / want.norm()).item()


def peers(case: Case, what: str) -> list[Timing]:
    """PyTorch's own attention over contiguous K and V of the same sizes (not paged: less work)."""
    q = case.q.view(case.requests, case.steps, case.heads, HEAD_DIM).transpose(1, 2)
    both = [case.contiguous(request) for request in range(case.requests)]
    k, v = (torch.stack(x).transpose(1, 2) for x in zip(*both, strict=True))
    mask = causal_lower_right(case.steps, case.context)
    found = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):

        def call(chosen: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(chosen):
                return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

        name = f"torch {backend.name}"
        try:
            found.append(Timing(what, name, graph_us([call]), case.floor_us))
        except RuntimeError as error:
            print(f"{what}: {name} does not serve this: {str(error).splitlines()[0]}")
    return found


def kernels_of(case: Case, setting: Setting) -> dict[str, float]:
    """Mean microseconds of each kernel of one call, from the profiler."""
    space = case.workspace(setting)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(10):
            for layer in range(case.layers):
                case.call(setting, space, layer)
        torch.cuda.synchronize()
    means = {e.key: e.device_time_total / e.count for e in profile.key_averages()}
    return {name: us for name, us in means.items() if us}


def time_stores(rows: int, heads: int, kv_heads: int) -> list[Timing]:
    """The store alone, PyTorch's, and the one with norm and rotation, of strided projections."""
    shape = (65_536, kv_heads, HEAD_DIM)
    pools = [(draw(*shape), draw(*shape)) for _ in range(4)]
    pages = torch.randperm(65_536 // PAGE, device="cuda")[: -(-rows // PAGE)]
    slots = (pages[:, None] * PAGE + torch.arange(PAGE, device="cuda")).flatten()[:rows]
    sizes = (2 * heads * HEAD_DIM, kv_heads * HEAD_DIM, kv_heads * HEAD_DIM)
    q, k, v = draw(rows, sum(sizes)).split(sizes, dim=-1)
    q = q.view(rows, heads, -1)[..., :HEAD_DIM]
    k, v = (x.view(rows, kv_heads, HEAD_DIM) for x in (k, v))
    angles = torch.rand(4_096, 32, device="cuda")
    weight = draw(HEAD_DIM)
    norm = NormRope(weight, weight, angles.cos(), angles.sin(), 1e-6, True)
    positions = torch.arange(rows, device="cuda") % 4_096

    def fused(pool: tuple[Tensor, Tensor]) -> Tensor:
        keys, values = pool
        return norm_rope_store(
            q, k, v, norm, positions=positions, slots=slots, k_buffer=keys, v_buffer=values
        )

    def indexed(pool: tuple[Tensor, Tensor]) -> None:
        pool[0][slots], pool[1][slots] = k, v

    moved = rows * kv_heads * HEAD_DIM * 8 / BYTES_PER_US
    whole = moved + rows * heads * HEAD_DIM * 4 / BYTES_PER_US
    forms = {
        "store": (lambda pool: store_kv(k, v, slots, *pool), moved),
        "store by index": (indexed, moved),
        "norm, rope and store": (fused, whole),
    }
    return [
        Timing(f"{rows} rows", name, graph_us([partial(call, pool) for pool in pools]), floor)
        for name, (call, floor) in forms.items()
    ]


def report(found: list[Timing]) -> None:
    for at, line in enumerate(found):
        tiled = not isinstance(line.setting, str)
        setting = json.dumps(line.setting) if tiled else line.setting
        mark = "table" if at == 0 and tiled else ""
        if not line.us:
            mark = f"WRONG by {line.error}"
        ratio = line.us / line.floor_us
        print(f"{line.what:20s} {line.us:9.1f} us {ratio:6.2f} x floor {mark:5s} {setting}")


def run_case(
    shape: tuple[int, int, int],
    heads: tuple[int, int],
    settings_of: Callable[[Case], Iterator[Setting]],
    stop: float,
    *,
    with_peers: bool,
) -> tuple[list[Timing], dict[str, dict[str, float]]]:
    """Timings of one shape and the kernels of its first two settings."""
    split = settings_of is not prefill_settings
    requests, steps, prefix = shape
    size = requests * (prefix + steps) * heads[1] * HEAD_DIM * 4
    layers = max(1, min(24, int(2 * L2_BYTES / size))) if split else 1
    case = Case(requests, steps, prefix, *heads, layers=layers)
    what = f"{requests} x {steps} after {prefix}"
    settings = list(dict.fromkeys(settings_of(case)))
    found = sweep(case, what, settings, stop)
    if with_peers:
        found += peers(case, what)
    kernels = {str(asdict(setting)): kernels_of(case, setting) for setting in settings[:2]}
    report(found)
    print(f"{what}: kernels {kernels}", flush=True)
    return found, kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=tuple(HEADS), default="35B")
    parser.add_argument("--budget-s", type=float, default=90.0)
    parser.add_argument("--peers", action="store_true", help="also time PyTorch's attention")
    options = parser.parse_args()
    torch.manual_seed(0)
    stop = time.monotonic() + options.budget_s
    heads = HEADS[options.model]
    found: list[Timing] = []
    kernels: dict[str, dict[str, dict[str, float]]] = {}
    runs = [(DECODE[0], decode_settings), (PREFILL[0], prefill_settings)]
    runs += [(shape, tail_settings) for shape in TAILS]
    runs += [(shape, decode_settings) for shape in DECODE[1:]]
    runs += [(shape, prefill_settings) for shape in PREFILL[1:]]
    for shape, settings_of in runs:
        if time.monotonic() > stop:
            break
        lines, profile = run_case(shape, heads, settings_of, stop, with_peers=options.peers)
        found += lines
        kernels["{} x {} after {}: {}".format(*shape, settings_of.__name__)] = profile
        torch.cuda.empty_cache()
        _save(options, found, kernels)
    if time.monotonic() < stop:
        for rows in (100, 8_192):
            lines = time_stores(rows, *heads)
            report(lines)
            found += lines
        _save(options, found, kernels)
    if wrong := [line for line in found if not line.us]:
        raise SystemExit(f"{len(wrong)} settings gave a wrong result")


def _save(
    options: argparse.Namespace,
    found: list[Timing],
    kernels: dict[str, dict[str, dict[str, float]]],
) -> None:
    content = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "model": options.model,
        "timings": [asdict(line) for line in found],
        "kernels_us": kernels,
    }
    options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
