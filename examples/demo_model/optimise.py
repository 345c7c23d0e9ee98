"""One training phase: AdamW, warm-up and cosine decay, progress bar, resumable."""

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

LossFunction = Callable[[int], tuple[torch.Tensor, dict[str, torch.Tensor]]]
FINAL_LR_SHARE = 0.05


@dataclass
class Device:
    """Where and how to compute."""

    torch_device: torch.device
    autocast: bool = field(init=False)

    def __post_init__(self) -> None:
        self.autocast = self.torch_device.type == "cuda"

    def precision(self) -> torch.autocast:
        return torch.autocast(self.torch_device.type, torch.bfloat16, enabled=self.autocast)


def learning_rate(phase: Phase, step: int) -> float:
    warmup = max(1, min(200, phase.steps // 10))
    if step < warmup:
        return phase.peak_lr * (step + 1) / warmup
    done = (step - warmup) / max(1, phase.steps - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return phase.peak_lr * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * cosine)


def run_phase(
    name: str,
    module: nn.Module,
    phase: Phase,
    loss_function: LossFunction,
    progress: Progress,
    device: Device,
    save_every: int,
) -> None:
    """Train those parameters of ``module`` that require gradients; afterwards ``module`` holds the
    result, also when the phase had been finished by an earlier run."""
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
    bar = tqdm(
        range(first, phase.steps), desc=name, initial=first, total=phase.steps, mininterval=5
    )
    for step in bar:
        rate = learning_rate(phase, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        with device.precision():
            loss, parts = loss_function(step)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            bar.set_postfix({key: f"{value.item():.3f}" for key, value in parts.items()})
        if (step + 1) % save_every == 0 and step + 1 < phase.steps:
            progress.save(name, step + 1, module, optimizer.state_dict())
    progress.save(name, phase.steps, module, {})
    seconds = time.monotonic() - began
    tokens = (phase.steps - first) * phase.rows * phase.length
    finals = ", ".join(f"{key} {value.item():.3f}" for key, value in parts.items())
    print(f"[{name}] {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s, {finals}", flush=True)


def _optimizer(module: nn.Module, rate: float, device: Device) -> torch.optim.AdamW:
    trained = [p for p in module.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() >= 2]
    vectors = [p for p in trained if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=device.autocast)
