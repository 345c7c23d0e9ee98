"""Geometry, random data and CUDA-graph timing shared by the GDN verify benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

LAYERS, H, HV, DIM = 30, 16, 32, 128
ROWS = ((25, 4), (8, 4), (8, 8), (8, 16))
TRACK_SHARE = 4
"""Qwen3.6-35B-A3B; one request in four crosses a track boundary."""


@dataclass
class Case:
    """N requests with D draft tokens over all layers; q, k, v are views of one packed row."""

    n: int
    d: int
    capacity: int
    device: torch.device = field(default_factory=lambda: torch.device("cuda"))
    layers: int = LAYERS
    state_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        gen = torch.Generator(self.device).manual_seed(self.n * 100 + self.d)

        def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(*shape, device=self.device, generator=gen, dtype=dtype)

        tokens = self.n * self.d
        width = 2 * H * DIM + HV * DIM
        self.mixed = randn(self.layers, tokens, width, dtype=torch.bfloat16)
        self.gates = randn(self.layers, tokens, 2 * HV, dtype=torch.bfloat16)
        self.A_log = randn(self.layers, HV) * 0.5
        self.dt_bias = randn(self.layers, HV) * 0.5
        self.num_slots = 2 * self.n + 1
        self.states = torch.empty(
            self.layers, self.num_slots, HV, DIM, DIM, dtype=self.state_dtype, device=self.device
        )
        for layer in range(self.layers):
            self.states[layer] = (randn(self.num_slots, HV, DIM, DIM) * 0.1).to(self.state_dtype)
        ints = dict(dtype=torch.int32, device=self.device)
        self.slots = torch.arange(1, self.n + 1, **ints)
        self.rows = torch.arange(self.n, **ints)
        self.cu_seqlens = torch.arange(0, tokens + 1, self.d, **ints)
        self.track_dests = torch.arange(self.n + 1, 2 * self.n + 1, device=self.device)
        self.steps = torch.zeros(self.n, dtype=torch.int64, device=self.device)
        self.track_steps = torch.zeros_like(self.steps)
        self.gen = gen
        self.draw_acceptance()

    def draw_acceptance(self) -> None:
        """Accepted length uniform in 1..D; a random quarter of the rows has a boundary inside it."""
        accepted = torch.randint(1, self.d + 1, (self.n,), device=self.device, generator=self.gen)
        self.steps.copy_(accepted - 1)
        order = torch.rand(self.n, device=self.device, generator=self.gen).argsort()
        crossing = torch.zeros(self.n, dtype=torch.bool, device=self.device)
        crossing[order[: max(1, self.n // TRACK_SHARE)]] = True
        where = (torch.rand(self.n, device=self.device, generator=self.gen) * accepted).long()
        self.track_steps.copy_(torch.where(crossing, where, torch.full_like(where, -1)))

    def make_tuples(self, pitch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """u, k [L, R, pitch, HV, 128] and g [L, R, pitch, HV], poisoned with NaN."""
        shape = (self.layers, self.n + 1, pitch, HV)
        nan = float("nan")
        return (
            torch.full((*shape, DIM), nan, device=self.device),
            torch.full((*shape, DIM), nan, device=self.device),
            torch.full(shape, nan, device=self.device),
        )

    def make_snapshots(self) -> torch.Tensor:
        shape = (self.layers, self.n + 1, self.d, HV, DIM, DIM)
        return torch.empty(shape, dtype=self.state_dtype, device=self.device)

    def qkv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k [T, H, 128], v [T, HV, 128], strided views."""
        q, k, v = self.mixed[layer].split((H * DIM, H * DIM, HV * DIM), dim=-1)
        return q.unflatten(-1, (H, DIM)), k.unflatten(-1, (H, DIM)), v.unflatten(-1, (HV, DIM))


def capture(fn: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Warm up, then record `fn`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fn()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph


def time_graph(
    graph: torch.cuda.CUDAGraph, *, blocks: int, replays: int, between: Callable[[], None] | None
) -> tuple[float, float]:
    """(median, spread) in µs of one replay; a block is `replays` timed together; `between` is not timed."""
    samples = []
    for block in range(blocks + 1):
        marks = []
        for _ in range(replays):
            if between is not None:
                between()
            start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
            start.record()
            graph.replay()
            stop.record()
            marks.append((start, stop))
        torch.cuda.synchronize()
        if block > 0:
            total = sum(start.elapsed_time(stop) for start, stop in marks)
            samples.append(total * 1000.0 / replays)
    return statistics.median(samples), max(samples) - min(samples)
