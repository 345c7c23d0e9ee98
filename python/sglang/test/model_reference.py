"""Independent answers for whole models on a GPU: the same routers' choices, the same FP8 roundings.

Near a tie of two experts a router's choice is decided by the last bits, and one other choice changes a row's
logits by far more than any rounding. References therefore take the choices of the model under test, and
``regret`` says how much worse they are than the reference's own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sglang.kernels.ops.moe.route import route
from sglang.srt.layers.fp8_linear import FP8Linear
from sglang.srt.layers.gated_attention import GatedAttention
from sglang.srt.layers.gated_delta_net import GatedDeltaNet
from sglang.srt.layers.gpu_experts import GpuExperts
from sglang.srt.layers.linear import Linear
from sglang.srt.layers.mlp import DenseMLP
from sglang.srt.layers.moe import SparseMoE
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.fp8_reference import fake_quantize, quantized_experts_reference
from sglang.test.model_rig import ModelRig

Routes = Mapping[str, Tensor]
"""Chosen experts [T, top_k] by the name of the mixture, ``layers.N.mlp``."""

_OPTIONAL_KERNELS = ("fla", "causal_conv1d")


class RouteLog:
    """Records which experts every row of every call of ``model`` takes."""

    def __init__(self, model: nn.Module) -> None:
        self._calls: dict[str, list[Tensor]] = {}
        for name, module in model.named_modules():
            if isinstance(module, GpuExperts):
                self._calls[name.removesuffix(".experts")] = []
                module.register_forward_pre_hook(self._hook(name), with_kwargs=True)

    def _hook(self, name: str):
        calls = self._calls[name.removesuffix(".experts")]

        def record(module: nn.Module, args: tuple, kwargs: dict) -> None:
            _, chosen = route(args[1], kwargs["top_k"], renormalise=kwargs["renormalise"])
            calls.append(chosen.cpu().long())

        return record

    def take(self, rows: Sequence[slice]) -> dict[str, Tensor]:
        """The recorded calls' choices, of call i the rows ``rows[i]``, joined; forgets the calls."""
        taken = {}
        for name, calls in self._calls.items():
            parts = [chosen[own] for chosen, own in zip(calls, rows, strict=True)]
            taken[name] = torch.cat(parts)
            calls.clear()
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
            chosen = routes[name]
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, _RoutedReference(module, chosen, regret))
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


class _RoutedReference(nn.Module):
    """A mixture with given choices; weights come from its own router."""

    def __init__(self, moe: SparseMoE, chosen: Tensor, regret: Regret) -> None:
        super().__init__()
        self.moe = moe
        self.chosen = chosen
        self.regret = regret

    def forward(self, x: Tensor) -> Tensor:
        moe = self.moe
        probs = torch.softmax(moe.gate(x).float(), dim=-1)
        self.regret.note(probs, self.chosen)
        weights = _weights(probs, self.chosen, renormalise=moe.norm_topk_prob)
        experts = moe.experts
        routed = quantized_experts_reference(
            x, weights, self.chosen, experts.gate_up, experts.down, dtype=x.dtype
        )
        return routed + torch.sigmoid(moe.shared_expert_gate(x)) * moe.shared_expert(x)


@dataclass
class MapLog:
    """Inputs and outputs of every FP8 map of a model's last call, for comparing map by map."""

    model: nn.Module
    linears: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    experts: dict[str, tuple[tuple, dict, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, module in self.model.named_modules():
            if isinstance(module, FP8Linear):
                module.register_forward_hook(self._linear(name))
            elif isinstance(module, GpuExperts):
                module.register_forward_hook(self._experts(name), with_kwargs=True)

    def _linear(self, name: str):
        def record(module: nn.Module, args: tuple, output: Tensor) -> None:
            self.linears[name] = (args[0].clone(), output.clone())

        return record

    def _experts(self, name: str):
        def record(module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> None:
            self.experts[name] = (tuple(x.clone() for x in args), dict(kwargs), output.clone())

        return record

    def errors(self, plain: nn.Module) -> dict[str, float]:
        """Relative error of each map against fp32 products of the same rounded inputs.

        ``plain`` is the same checkpoint on the CPU, dequantised by the loader.
        """
        found = {}
        for name, (x, out) in self.linears.items():
            linear = plain.get_submodule(name.removesuffix(".quantized"))
            want = fake_quantize(x.cpu()) @ linear.weight[: out.shape[1]].T
            if linear.bias is not None:
                want += linear.bias[: out.shape[1]]
            found[name] = relative_error(out, want)
        for name, (args, options, out) in self.experts.items():
            found[name] = relative_error(
                out, self._mixture(plain.get_submodule(name), args, options)
            )
        return found

    @staticmethod
    def _mixture(experts: nn.Module, args: tuple, options: dict) -> Tensor:
        x, logits = args
        _, chosen = route(logits, options["top_k"], renormalise=options["renormalise"])
        chosen = chosen.cpu().long()
        probs = torch.softmax(logits.cpu().float(), dim=-1)
        weights = _weights(probs, chosen, renormalise=options["renormalise"])
        routed = quantized_experts_reference(
            x.cpu(), weights, chosen, experts.gate_up, experts.down, dtype=x.dtype
        )
        gate = torch.sigmoid(options["shared_gate"].cpu().float())
        return routed + gate * options["shared"].cpu().float()


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference by the norm of ``want``."""
    return ((got.cpu().float() - want).norm() / want.norm()).item()
