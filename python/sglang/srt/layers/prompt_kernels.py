"""What prompts need compiled, asked for at a server's start and not by its first request."""

from __future__ import annotations

import torch
from torch import nn

from sglang.kernels.ops.moe.by_slot import slot_tile
from sglang.kernels.ops.quantization.hopper_cuda import hopper_tile
from sglang.kernels.ops.quantization.launch import SMALL_ROWS
from sglang.srt.layers.fp8_linear import FP8Linear
from sglang.srt.layers.gpu_experts import GpuExperts
from sglang.srt.layers.mlp import DenseMLP


def load_prompt_kernels(model: nn.Module, dtype: torch.dtype) -> None:
    """Ask once for every FP8 product of ``model`` with rows of ``dtype`` how prompts multiply it.

    The choice compiles and loads the kernel where one serves; kinds are three at most (dense, up, down; or dense,
    gated), so layers beyond the first cost nothing.
    """
    rows = SMALL_ROWS + 1
    for module in model.modules():
        if isinstance(module, FP8Linear):
            hopper_tile(rows, module.weight, dtype, gated=False)
        elif isinstance(module, DenseMLP) and isinstance(module.gate_up, FP8Linear):
            hopper_tile(rows, module.gate_up.weight, dtype, gated=True)
        elif isinstance(module, GpuExperts) and module.gate_up_scale is not None:
            slot_tile(rows, module.gate_up, module.down, dtype)
