"""Batched generation with the target: prompts of any length, one temperature per row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tqdm import tqdm

from examples.demo_model.model import DemoModel


@torch.no_grad()
def continue_prompts(
    model: DemoModel,
    prompts: Sequence[np.ndarray],
    length: int,
    temperatures: torch.Tensor,
    *,
    seed: int,
    autocast: bool,
    describe: str = "generate",
) -> torch.Tensor:
    """Continue every prompt to ``length`` tokens.

    Args:
        prompts: token arrays of at least 1 and fewer than ``length`` tokens.
        temperatures: ``[B]``; 0 is greedy.

    Returns:
        ``[B, length]`` int64 on the model's device, prompts included.
    """
    device = next(model.parameters()).device
    rows = len(prompts)
    ids = torch.zeros(rows, length, dtype=torch.long)
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.from_numpy(prompt)
    ids, prompt_lengths = ids.to(device), prompt_lengths.to(device)
    heat = temperatures.to(device).unsqueeze(-1)
    generator = torch.Generator(device).manual_seed(seed)
    dtype = torch.bfloat16 if autocast else torch.float32
    caches = model.new_caches(rows, length, device, dtype)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        for position in tqdm(range(length - 1), desc=describe, unit="token", mininterval=5):
            logits = model.step(ids[:, position], position, caches).float()
            noise = torch.rand(logits.shape, generator=generator, device=device)
            gumbel = -torch.log(-torch.log(noise.clamp(1e-9, 1 - 1e-7)))
            chosen = (logits + heat * gumbel).argmax(-1)
            open_rows = prompt_lengths <= position + 1
            ids[:, position + 1] = torch.where(open_rows, chosen, ids[:, position + 1])
    return ids
