"""Random weights in place of a checkpoint: right shapes, plausible sizes, the same in every run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from sglang.kernels.ops.quantization.rows import FP8_DTYPE, FP8_MAX
from sglang.srt.layers.layernorm import GatedRMSNorm, RMSNorm
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

FP8_SIGMA = 96.0
"""Of drawn e4m3 values: the largest of a block's 16,384 stays below 448 but for one block in hundreds."""

_NORM_SIGMA = 0.1
_CHUNK_ELEMENTS = 1 << 26
_SCALE_SUFFIX = "_scale"

Draw = Callable[[Tensor, torch.Generator], None]


def load_dummy_weights(
    model: nn.Module, *, seed: int = 0, shared_with: nn.Module | None = None
) -> None:
    """Fill every parameter of ``model`` on its own device.

    Each parameter has a generator seeded by (seed, its name), so it depends on nothing else; devices of
    different kinds draw different numbers. Parameters that ``shared_with`` owns stay as they are.
    """
    kept = set() if shared_with is None else {id(p) for p in shared_with.parameters()}
    with torch.no_grad():
        for name, parameter, draw in _parameters(model):
            if id(parameter) not in kept:
                draw(parameter, _generator(f"{seed}:{name}", parameter.device))


def _generator(key: str, device: torch.device) -> torch.Generator:
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _parameters(model: nn.Module) -> Iterator[tuple[str, Tensor, Draw]]:
    for module_name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        for name, parameter in own.items():
            yield f"{module_name}.{name}", parameter, _draw_of(module, name, own)


def _draw_of(module: nn.Module, name: str, own: dict[str, nn.Parameter]) -> Draw:
    parameter = own[name]
    if isinstance(module, (RMSNorm, GatedRMSNorm)):
        unit_offset = isinstance(module, RMSNorm) and module.unit_offset
        return _normal(_NORM_SIGMA, mean=0.0 if unit_offset else 1.0)
    if isinstance(module, RadixLinearAttention) and name == "A_log":
        return _draw_log_decay
    if isinstance(module, RadixLinearAttention) and name == "dt_bias":
        return _uniform(-4.0, -1.0)
    if parameter.dtype == FP8_DTYPE:
        return _draw_fp8
    if name.endswith(_SCALE_SUFFIX):
        typical = own[name.removesuffix(_SCALE_SUFFIX)].shape[-1] ** -0.5 / FP8_SIGMA
        return _uniform(0.75 * typical, 1.25 * typical)
    if parameter.dim() < 2:
        return _normal(_NORM_SIGMA)
    return _normal(parameter.shape[-1] ** -0.5)


def _normal(sigma: float, *, mean: float = 0.0) -> Draw:
    def draw(tensor: Tensor, generator: torch.Generator) -> None:
        tensor.normal_(mean, sigma, generator=generator)

    return draw


def _uniform(low: float, high: float) -> Draw:
    def draw(tensor: Tensor, generator: torch.Generator) -> None:
        tensor.uniform_(low, high, generator=generator)

    return draw


def _draw_log_decay(tensor: Tensor, generator: torch.Generator) -> None:
    tensor.uniform_(0.5, 8.0, generator=generator).log_()


def _draw_fp8(tensor: Tensor, generator: torch.Generator) -> None:
    """In chunks of rows, so that the fp32 draws need little memory beside the weights."""
    rows = tensor.view(-1, tensor.shape[-1])
    step = max(1, _CHUNK_ELEMENTS // rows.shape[1])
    for part in rows.split(step):
        values = torch.empty(part.shape, dtype=torch.float32, device=part.device)
        values.normal_(0.0, FP8_SIGMA, generator=generator)
        part.copy_(values.clamp_(-FP8_MAX, FP8_MAX).to(FP8_DTYPE))
