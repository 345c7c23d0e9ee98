"""Independent answers for whole models on a GPU: the same routers' choices, the same FP8 roundings.

Near a tie of two experts a router's choice is decided by the last bits, and one other choice changes a row's
logits by far more than any rounding. References therefore take the choices of the model under test, and
``regret`` says how much worse they are than the reference's own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from sglang.kernels.ops.fused.sums import total_of
from sglang.kernels.ops.moe.experts import run_experts
from sglang.kernels.ops.moe.route import route
from sglang.kernels.ops.quantization.rows import NormedRows
from sglang.srt.layers import gpu_experts
from sglang.srt.layers.fp8_linear import FP8Linear
from sglang.srt.layers.gated_attention import GatedAttention
from sglang.srt.layers.gated_delta_net import GatedDeltaNet
from sglang.srt.layers.linear import Linear
from sglang.srt.layers.mlp import DenseMLP
from sglang.srt.layers.moe import SparseMoE
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.checkpoints.quantize import BLOCK
from sglang.test.fp8_reference import fake_quantize, rounded_experts_reference
from sglang.test.model_rig import ModelRig

Routes = Mapping[str, Tensor]
"""Chosen experts [T, top_k] by the name of the mixture, ``layers.N.mlp``."""

_OPTIONAL_KERNELS = ("fla", "causal_conv1d")


def _moe_names(rig: ModelRig) -> list[str]:
    """Names of the mixtures in the order in which a call runs them."""
    config = rig.config
    return [f"layers.{i}.mlp" for i in range(config.num_hidden_layers) if config.is_moe_layer(i)]


class RouteLog(AbstractContextManager):
    """Records which experts every row of every call of a GPU rig takes, inside a ``with`` block."""

    def __init__(self, rig: ModelRig) -> None:
        self._names = _moe_names(rig)
        self._chosen: list[Tensor] = []
        self._patch = mock.patch.object(gpu_experts, "route", self._route)

    def _route(self, *args: object, **options: object) -> tuple[Tensor, Tensor]:
        weights, chosen = route(*args, **options)
        self._chosen.append(chosen.cpu().long())
        return weights, chosen

    def __enter__(self) -> RouteLog:
        self._patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()

    def take(self, rows: Sequence[slice]) -> dict[str, Tensor]:
        """The choices by mixture: of call i the rows ``rows[i]``, joined. Forgets the calls."""
        assert len(self._chosen) == len(rows) * len(self._names)
        taken = {}
        for layer, name in enumerate(self._names):
            calls = self._chosen[layer :: len(self._names)]
            taken[name] = torch.cat([call[own] for call, own in zip(calls, rows, strict=True)])
        self._chosen.clear()
        return taken


@dataclass
class Regret:
    """Largest share of probability by which a given choice of experts falls short of the best."""

    worst: float = 0.0
    changed: int = 0
    rows: int = 0

    def note(self, probs: Tensor, chosen: Tensor) -> None:
        best = probs.topk(chosen.shape[1]).values.sum(-1)
        lost = best - probs.gather(1, chosen).sum(-1)
        self.worst = max(self.worst, lost.max().item())
        self.changed += int((lost > 0).sum())
        self.rows += len(lost)


@contextmanager
def _without_optional_kernels() -> Iterator[None]:
    """Hide packages whose kernels `transformers` would take, also for tensors on the CPU."""
    missing = object()
    saved = {name: sys.modules.get(name, missing) for name in _OPTIONAL_KERNELS}
    for name in _OPTIONAL_KERNELS:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name, module in saved.items():
            if module is missing:
                del sys.modules[name]
            else:
                sys.modules[name] = module  # type: ignore[assignment]


def transformers_logits(path: str, tokens: Sequence[int], routes: Routes) -> tuple[Tensor, Regret]:
    """fp32 logits [T, vocab] of `transformers`' own PyTorch formulas on the CPU, and the routes' regret."""
    regret = Regret()
    with _without_optional_kernels():
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        modules = dict(model.named_modules())
        for name, chosen in routes.items():
            (gate,) = [m for key, m in modules.items() if key.endswith(f"{name}.gate")]
            gate.register_forward_hook(_forced(chosen, regret, model.config))
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0], regret


def _forced(chosen: Tensor, regret: Regret, config: object):
    text = config.get_text_config()  # type: ignore[attr-defined]
    renormalise = vars(text).get("norm_topk_prob", True)

    def replace(module: nn.Module, args: tuple, output: tuple) -> tuple:
        logits = output[0]
        probs = torch.softmax(logits.float(), dim=-1)
        regret.note(probs, chosen)
        weights = _weights(probs, chosen, renormalise=renormalise)
        return logits, weights.to(output[1].dtype), chosen

    return replace


def _weights(probs: Tensor, chosen: Tensor, *, renormalise: bool) -> Tensor:
    weights = probs.gather(1, chosen)
    return weights / weights.sum(-1, keepdim=True) if renormalise else weights


def quantized_logits(path: str, tokens: Sequence[int], routes: Routes) -> tuple[Tensor, Regret]:
    """fp32 logits [T, vocab] of an FP8 checkpoint with its activations rounded as the kernels round them.

    Weights are dequantised by the loader; every map that the checkpoint quantises gets
    ``fake_quantize`` of its input; all else is the CPU's module path in fp32.
    """
    rig = ModelRig(path, kernels="torch")
    regret = Regret()
    round_inputs(rig.model, routes, regret)
    return rig.run(ForwardMode.EXTEND, [list(tokens)], [0]).logits, regret


def plain_logits(path: str, tokens: Sequence[int], routes: Routes) -> tuple[Tensor, Regret]:
    """fp32 logits [T, vocab] of the CPU's module path in PyTorch, with the given routes and no rounding."""
    rig = ModelRig(path, kernels="torch")
    regret = Regret()
    for name, chosen in routes.items():
        _replace(rig.model, name, chosen, regret, rounds=False)
    return rig.run(ForwardMode.EXTEND, [list(tokens)], [0]).logits, regret


def round_inputs(model: nn.Module, routes: Routes, regret: Regret) -> None:
    """Make a CPU model on dequantised weights round its activations as the FP8 kernels do."""
    for name, module in list(model.named_modules()):
        if isinstance(module, GatedDeltaNet):
            assert isinstance(module.in_proj, Linear)
            module.in_proj = _PartlyRounded(module.in_proj, sum(module.in_rows[:2]))
            maps = [module.out_proj]
        elif isinstance(module, GatedAttention):
            maps = [module.qkv_proj, module.o_proj]
        elif isinstance(module, DenseMLP):
            maps = [module.gate_up, module.down]
        elif isinstance(module, SparseMoE):
            _replace(model, name, routes[name], regret, rounds=True)
            continue
        else:
            continue
        for linear in maps:
            linear.register_forward_pre_hook(lambda _, args: (fake_quantize(args[0]),))


class _PartlyRounded(nn.Module):
    """An input projection whose first ``quantized_rows`` outputs see rounded inputs."""

    def __init__(self, linear: Linear, quantized_rows: int) -> None:
        super().__init__()
        self.linear = linear
        self.quantized_rows = quantized_rows

    def forward_parts(self, x: Tensor, rows: Sequence[int]) -> tuple[Tensor, ...]:
        rounded = self.linear(fake_quantize(x))[:, : self.quantized_rows]
        plain = self.linear(x)[:, self.quantized_rows :]
        return torch.cat([rounded, plain], dim=1).split(list(rows), dim=1)


def _replace(model: nn.Module, name: str, chosen: Tensor, regret: Regret, *, rounds: bool) -> None:
    """Give the mixture ``name`` the choices ``chosen``."""
    moe = model.get_submodule(name)
    assert isinstance(moe, SparseMoE)
    parent, _, own = name.rpartition(".")
    routed = _RoutedReference(moe, chosen, regret, rounds=rounds)
    setattr(model.get_submodule(parent), own, routed)


class _RoutedReference(nn.Module):
    """A mixture with given choices; weights come from its own router."""

    def __init__(self, moe: SparseMoE, chosen: Tensor, regret: Regret, *, rounds: bool) -> None:
        super().__init__()
        self.moe = moe
        self.chosen = chosen
        self.regret = regret
        self.rounds = rounds

    def forward(self, x: Tensor) -> Tensor:
        moe = self.moe
        probs = torch.softmax(moe.gate(x).float(), dim=-1)
        self.regret.note(probs, self.chosen)
        weights = _weights(probs, self.chosen, renormalise=moe.norm_topk_prob)
        return self._routed(x, weights) + torch.sigmoid(
            moe.shared_expert_gate(x)
        ) * moe.shared_expert(x)

    def _routed(self, x: Tensor, weights: Tensor) -> Tensor:
        experts = self.moe.experts
        if not self.rounds:
            return experts(x, weights, self.chosen)
        return rounded_experts_reference(
            fake_quantize(x), weights, self.chosen, experts.gate_up, experts.down, dtype=x.dtype
        )


def map_errors(rig: ModelRig, plain: nn.Module, *, num_rows: int) -> dict[str, float]:
    """Relative error of every FP8 map, gated MLP and mixture of a GPU rig, each called by itself.

    plain  the same checkpoint on the CPU, dequantised by the loader; its weights in fp32 products of the
           same rounded rows are what is right
    """
    generator = torch.Generator().manual_seed(num_rows)
    found = {}
    for name, module in rig.model.named_modules():
        if isinstance(module, FP8Linear):
            x = _rows(num_rows, module.in_features, rig, generator)
            linear = plain.get_submodule(name.removesuffix(".quantized"))
            assert isinstance(linear, Linear)
            want = fake_quantize(x.cpu()) @ linear.weight[: module.out_features].T
            if linear.bias is not None:
                want += linear.bias[: module.out_features]
            found[name] = relative_error(module(x), want)
        elif isinstance(module, DenseMLP):
            x = _rows(num_rows, rig.config.hidden_size, rig, generator)
            found[name] = relative_error(module(x), _gated_mlp(plain.get_submodule(name), x))
        elif isinstance(module, gpu_experts.GpuSparseMoE):
            x = _rows(num_rows, rig.config.hidden_size, rig, generator)
            found[name] = _mixture_error(module, plain.get_submodule(name), x)
    return found


def _rows(num_rows: int, size: int, rig: ModelRig, generator: torch.Generator) -> Tensor:
    """Rows whose groups of 128 columns differ in size, so that a scale of another group shows."""
    x = torch.randn(num_rows, size, generator=generator)
    x *= 1 + torch.arange(size) // BLOCK
    return x.to(rig.device, rig.model.activation_dtype)


def _gated_mlp(mlp: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(mlp, DenseMLP)
    weights = (mlp.gate_up.weight[None], mlp.down.weight[None])
    one = torch.ones(len(x), 1)
    rows = fake_quantize(x.cpu())
    return rounded_experts_reference(
        rows, one, torch.zeros_like(one).long(), *weights, dtype=x.dtype
    )


def _mixture_error(moe: gpu_experts.GpuSparseMoE, plain: nn.Module, x: Tensor) -> float:
    """With the router's own choices, weights and gate, which come from maps that are not FP8."""
    assert isinstance(plain, SparseMoE)
    given: list[Tensor] = []

    def noted(rows: Any, weights: Tensor, chosen: Tensor, *args: Any, **options: Any) -> Any:
        given.extend(t.cpu() for t in (weights, chosen, options["shared_gate"]))
        return run_experts(rows, weights, chosen, *args, **options)

    with mock.patch.object(gpu_experts, "run_experts", noted):
        got = total_of(moe(NormedRows(x, None)))
    weights, chosen, gate = given
    experts, rows = plain.experts, fake_quantize(x.cpu())
    choice = (weights.float(), chosen.long())
    want = rounded_experts_reference(rows, *choice, experts.gate_up, experts.down, dtype=x.dtype)
    want += torch.sigmoid(gate.float()) * _gated_mlp(plain.shared_expert, x)
    return relative_error(got, want)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference by the norm of ``want``."""
    return ((got.cpu().float() - want).norm() / want.norm()).item()
