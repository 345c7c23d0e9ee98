"""One training phase: AdamW, warm-up and cosine decay, progress bar, resumable.

A model this small keeps a GPU waiting for kernel launches, so on a GPU the whole step (forward,
backward, update) is recorded once as a CUDA graph and replayed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from tqdm import tqdm

from examples.demo_model.config import Phase
from examples.demo_model.progress import Progress

Parts = dict[str, torch.Tensor]
BatchFunction = Callable[[int], tuple[torch.Tensor, ...]]  # step -> tensors of fixed shapes
LossFunction = Callable[..., tuple[torch.Tensor, Parts]]  # those tensors -> loss, figures to show
FINAL_LR_SHARE = 0.05
WARM_STEPS = 3  # eager steps before recording: they create the optimiser's state


@dataclass
class Device:
    """Where and how to compute."""

    torch_device: torch.device
    graphs: bool = True  # record training steps; only a GPU can
    autocast: bool = field(init=False)

    def __post_init__(self) -> None:
        self.autocast = self.torch_device.type == "cuda"
        self.graphs = self.graphs and self.autocast

    def precision(self) -> torch.autocast:
        return torch.autocast(self.torch_device.type, torch.bfloat16, enabled=self.autocast)


def learning_rate(phase: Phase, step: int) -> float:
    warmup = max(1, min(200, phase.steps // 10))
    if step < warmup:
        return phase.peak_lr * (step + 1) / warmup
    done = (step - warmup) / max(1, phase.steps - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return phase.peak_lr * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * cosine)


@dataclass
class Task:
    """What a phase trains and on what."""

    name: str
    module: nn.Module
    phase: Phase
    batch: BatchFunction
    loss: LossFunction


def run_phase(task: Task, progress: Progress, device: Device, save_every: int) -> None:
    """Train those parameters of ``task.module`` that require gradients; afterwards the module holds
    the result, also when the phase had been finished by an earlier run."""
    name, module, phase = task.name, task.module, task.phase
    optimizer = _optimizer(module, phase.peak_lr, device)
    saved = progress.load(name, device.torch_device)
    first = 0
    if saved is not None:
        module.load_state_dict(saved["module"])
        first = saved["step"]
        if saved["optimizer"]:
            optimizer.load_state_dict(saved["optimizer"])
    if first >= phase.steps:
        return
    began = time.monotonic()
    stepper = _GraphStepper(task, optimizer, device) if device.graphs else None
    bar = tqdm(
        range(first, phase.steps), desc=name, initial=first, total=phase.steps, mininterval=5
    )
    for step in bar:
        _set_learning_rate(optimizer, learning_rate(phase, step))
        batch = tuple(tensor.to(device.torch_device) for tensor in task.batch(step))
        parts = stepper.step(batch) if stepper else _eager_step(task, optimizer, device, batch)
        if step % 50 == 0:
            bar.set_postfix({key: f"{value.item():.3f}" for key, value in parts.items()})
        if (step + 1) % save_every == 0 and step + 1 < phase.steps:
            progress.save(name, step + 1, module, optimizer.state_dict())
    optimizer.zero_grad(set_to_none=True)
    progress.save(name, phase.steps, module, {})
    seconds = time.monotonic() - began
    tokens = (phase.steps - first) * phase.rows * phase.length
    finals = ", ".join(f"{key} {value.item():.3f}" for key, value in parts.items())
    print(f"[{name}] {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s, {finals}", flush=True)


def _eager_step(
    task: Task, optimizer: torch.optim.AdamW, device: Device, batch: tuple[torch.Tensor, ...]
) -> Parts:
    optimizer.zero_grad(set_to_none=True)
    with device.precision():
        loss, parts = task.loss(*batch)
    loss.backward()
    nn.utils.clip_grad_norm_(task.module.parameters(), 1.0)
    optimizer.step()
    return parts


class _GraphStepper:
    """Runs a few steps eagerly, records one, then replays it on copied-in batches."""

    def __init__(self, task: Task, optimizer: torch.optim.AdamW, device: Device) -> None:
        self._task, self._optimizer, self._device = task, optimizer, device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._parts: Parts = {}
        self._warm = 0

    def step(self, batch: tuple[torch.Tensor, ...]) -> Parts:
        if self._warm < WARM_STEPS:
            self._warm += 1
            return self._on_side_stream(batch)
        if self._graph is None:
            self._graph = self._record(batch)
        for static, fresh in zip(self._inputs, batch, strict=True):
            static.copy_(fresh)
        self._graph.replay()
        return self._parts

    def _on_side_stream(self, batch: tuple[torch.Tensor, ...]) -> Parts:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            parts = _eager_step(self._task, self._optimizer, self._device, batch)
        torch.cuda.current_stream().wait_stream(side)
        return parts

    def _record(self, batch: tuple[torch.Tensor, ...]) -> torch.cuda.CUDAGraph:
        self._inputs = tuple(tensor.clone() for tensor in batch)
        self._optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._parts = _eager_step(self._task, self._optimizer, self._device, self._inputs)
        return graph


def _set_learning_rate(optimizer: torch.optim.AdamW, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _optimizer(module: nn.Module, rate: float, device: Device) -> torch.optim.AdamW:
    trained = [p for p in module.parameters() if p.requires_grad]
    recorded = device.graphs  # a recorded step reads its learning rate from the device

    def group(parameters: list[nn.Parameter], decay: float) -> dict[str, object]:
        lr = torch.tensor(rate, device=device.torch_device) if recorded else rate
        return {"params": parameters, "weight_decay": decay, "lr": lr}

    groups = [
        group([p for p in trained if p.dim() >= 2], 0.1),
        group([p for p in trained if p.dim() < 2], 0.0),
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device.autocast, capturable=recorded)
