"""Times of everything between the products, beside what their launches cost apart; and that fusing keeps bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from timing import Timing, floor_us, graph_us
from torch import Tensor

from sglang.kernels.ops.fused.argmax import argmax_rows
from sglang.kernels.ops.fused.rows import (
    add_rms_norm,
    gated_rms_norm,
    gated_rms_norm_quantized,
    norm_rope,
    norm_rows,
    sigmoid_mul,
    sigmoid_mul_quantized,
    silu_mul,
    silu_mul_quantized,
)
from sglang.kernels.ops.fused.sums import RoutedSum, SplitSum
from sglang.kernels.ops.moe.route import route
from sglang.kernels.ops.moe.sort import order_by_expert
from sglang.kernels.ops.quantization.fp8 import quantize
from sglang.kernels.ops.quantization.rows import QuantizedRows

HIDDEN = {"35B": 2048, "27B": 5120}
HEADS = {"35B": (32, 16, 2), "27B": (48, 24, 4)}
"""GDN value heads, query heads, key heads."""

VOCABULARY = 248_320
EPS = 1e-6
BOTH = {"unit_offset": True, "quantized": True}
Case = tuple[str, Callable[[], object], float]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def cases(model: str, rows: int) -> Iterator[Case]:
    """(name, call, bytes that must move)."""
    size = HIDDEN[model]
    x, delta, weight = draw(rows, size), draw(rows, size), torch.randn(size, device="cuda")
    yield (
        "add+norm",
        lambda: add_rms_norm(x, delta, weight, EPS, unit_offset=True),
        rows * size * 8.0,
    )
    for plain in (True, False):
        yield (
            f"add+norm+quantise{' (and plain)' if plain else ''}",
            lambda plain=plain: norm_rows(x, delta, weight, EPS, plain=plain, **BOTH),
            rows * size * (9.0 if plain else 7.0),
        )
    yield "quantise", lambda: quantize(x), rows * size * 3.0
    yield from head_cases(model, rows)
    if rows <= 128:
        scores = draw(rows, VOCABULARY)
        yield "argmax of scores", lambda: argmax_rows(scores), scores.numel() * 2.0
        yield "torch's argmax", lambda: torch.argmax(scores, dim=-1), scores.numel() * 2.0
    if model == "35B":
        yield from expert_cases(rows, size)


def head_cases(model: str, rows: int) -> Iterator[Case]:
    heads, query_heads, key_heads = HEADS[model]
    o, z = (
        draw(rows, heads, 128),
        draw(rows, 3 * heads * 128)[:, -heads * 128 :].view(rows, heads, 128),
    )
    weight, count = torch.randn(128, device="cuda"), float(rows * heads * 128)
    yield "gated norm", lambda: gated_rms_norm(o, z, weight, EPS, activation="silu"), count * 6
    yield (
        "gated norm+quantise",
        lambda: gated_rms_norm_quantized(o, z, weight, EPS, activation="silu"),
        count * 5,
    )
    q, gate = draw(rows, query_heads, 512).chunk(2, dim=-1)
    count = float(rows * query_heads * 256)
    yield "sigmoid gate+quantise", lambda: sigmoid_mul_quantized(q, gate), count * 5
    angles = torch.rand(4096, 32, device="cuda")
    positions = torch.arange(rows, device="cuda") % 4096
    scale, k = torch.randn(256, device="cuda"), draw(rows, key_heads, 256)
    for name, heads_of in (("q norm+rope", q), ("k norm+rope", k)):
        yield (
            name,
            lambda t=heads_of: norm_rope(
                t, scale, angles, angles, positions, EPS, unit_offset=True
            ),
            heads_of.numel() * 4.0,
        )


def expert_cases(rows: int, size: int) -> Iterator[Case]:
    logits = draw(rows, 264)[:, :256]
    _, chosen = route(logits, 8, renormalise=True)
    block_m = 16 if rows <= 128 else 128
    yield "route", lambda: route(logits, 8, renormalise=True), rows * 600.0
    yield "order by expert", lambda: order_by_expert(chosen, 256, block_m), rows * 64.0
    routed, x, weight = (
        routed_case(rows, size),
        draw(rows, size),
        torch.randn(size, device="cuda"),
    )
    yield "combine", routed.total, rows * size * 20.0
    yield (
        "combine+add+norm+quantise",
        lambda: norm_rows(x, routed, weight, EPS, plain=True, **BOTH),
        rows * size * 25.0,
    )
    split = SplitSum(torch.randn(4, rows, size, device="cuda"), torch.bfloat16)
    yield (
        "add 4 parts+norm+quantise",
        lambda: norm_rows(x, split, weight, EPS, plain=True, **BOTH),
        rows * size * 23.0,
    )
    both = draw(rows * 9, 1024)
    yield "silu+quantise", lambda: silu_mul_quantized(both), rows * 9 * 512 * 5.0


def routed_case(rows: int, size: int) -> RoutedSum:
    scores, parts = draw(rows, 264), draw(rows * 9, size)
    weights, chosen = route(scores[:, :256], 8, renormalise=True)
    return RoutedSum(parts[: rows * 8], weights, chosen, parts[rows * 8 :], scores[:, 256:257])


def time_small(model: str, rows: int) -> list[Timing]:
    return [
        Timing(name, rows, "", graph_us([call] * 8), floor_us(moved))
        for name, call, moved in cases(model, rows)
    ]


def same_rows(one: QuantizedRows, other: QuantizedRows) -> bool:
    values = torch.equal(one.values.view(torch.uint8), other.values.view(torch.uint8))
    return values and torch.equal(one.scale, other.scale)


def fusing_keeps_bits(model: str, rows: int) -> dict[str, bool]:
    """Whether each fused launch gives exactly what its parts give, at the model's own shapes."""
    size, (heads, query_heads, _) = HIDDEN[model], HEADS[model]
    x, delta, weight = draw(rows, size), draw(rows, size), torch.randn(size, device="cuda")
    normed, total = add_rms_norm(x, delta, weight, EPS, unit_offset=True)
    both_forms, same_total = norm_rows(x, delta, weight, EPS, plain=True, **BOTH)
    one_form, _ = norm_rows(x, delta, weight, EPS, plain=False, **BOTH)
    split = SplitSum(torch.randn(4, rows, size, device="cuda"), torch.bfloat16)
    of_parts, _ = norm_rows(x, split, weight, EPS, plain=True, **BOTH)
    of_total, _ = norm_rows(x, split.total(), weight, EPS, plain=True, **BOTH)
    routed = routed_case(rows, size)
    of_experts, _ = norm_rows(x, routed, weight, EPS, plain=True, **BOTH)
    of_sum, _ = norm_rows(x, routed.total(), weight, EPS, plain=True, **BOTH)
    want = quantize(normed)
    o, z = draw(rows, heads, 128), draw(rows, heads, 128)
    head_weight = torch.randn(128, device="cuda")
    gated = gated_rms_norm(o, z, head_weight, EPS, activation="silu")
    gated_q = gated_rms_norm_quantized(o, z, head_weight, EPS, activation="silu")
    q, gate = draw(rows, query_heads, 512).chunk(2, dim=-1)
    both = draw(rows, 1024)
    return {
        "norm, both forms": same_rows(both_forms.quantized, want)
        and torch.equal(both_forms.plain, normed)
        and torch.equal(total, same_total),
        "norm of split sums": torch.equal(of_parts.plain, of_total.plain)
        and same_rows(of_parts.quantized, of_total.quantized),
        "norm of routed sums": torch.equal(of_experts.plain, of_sum.plain)
        and same_rows(of_experts.quantized, of_sum.quantized),
        "norm, FP8 alone": same_rows(one_form.quantized, want),
        "gated norm": same_rows(gated_q, quantize(gated.view(rows, -1))),
        "sigmoid gate": same_rows(
            sigmoid_mul_quantized(q, gate), quantize(sigmoid_mul(q, gate).view(rows, -1))
        ),
        "silu": same_rows(silu_mul_quantized(both), quantize(silu_mul(both))),
    }
