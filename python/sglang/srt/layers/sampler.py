"""From logits to token ids: greedy, temperature, top-k, top-p, min-p; log probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.srt.sampling.sampling_batch import SamplingBatch


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Draw one token per row.

    Shapes: logits [M, vocab] fp32; returns [M] int64.
    A row's result depends on its own logits, parameters and uniform number only. Filters apply in
    the order temperature, top-k, top-p, min-p, each on the renormalised remainder; the draw is
    inverse-CDF over the descending order (ties: lowest id first).
    """
    best = torch.argmax(logits, dim=-1)
    if batch.all_greedy:
        return best
    rows = torch.nonzero(~batch.greedy).flatten()
    probs, ids = filtered_probs(
        logits[rows],
        batch.temperature[rows],
        batch.top_k[rows],
        batch.top_p[rows],
        batch.min_p[rows],
    )
    cdf = probs.double().cumsum(dim=-1)
    target = (batch.uniform[rows] * cdf[:, -1]).unsqueeze(-1)
    index = torch.searchsorted(cdf, target, right=True)
    last = (probs > 0).sum(dim=-1, keepdim=True) - 1
    best[rows] = ids.gather(-1, torch.minimum(index, last)).flatten()
    return best


def filtered_probs(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the filtered distribution in descending order, and the ids in that order.

    Shapes: logits [M, vocab] fp32, the others [M]; returns probs [M, vocab] (not renormalised after
    the last filter; zero where cut) and ids [M, vocab] int64.
    """
    scaled = logits / temperature.unsqueeze(-1)
    probs, ids = torch.softmax(scaled, dim=-1).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    probs = probs.masked_fill(rank >= top_k.unsqueeze(-1), 0.0)
    probs = probs / probs.sum(dim=-1, keepdim=True)
    before = probs.cumsum(dim=-1) - probs
    keep = (before < top_p.unsqueeze(-1)) & (probs >= min_p.unsqueeze(-1) * probs[:, :1])
    keep[:, 0] = True
    return probs.masked_fill(~keep, 0.0), ids


def token_logprobs(
    logits: Tensor, ids: Tensor, top_num: int, chosen: list[int] | None
) -> list[tuple[float, list[tuple[float, int]], list[tuple[float, int]]]]:
    """Log probabilities under the model's own distribution (temperature 1, no filters).

    Shapes: logits [M, vocab] fp32, ids [M]. Returns per row the id's value, the ``top_num`` best as
    (value, id), and those of ``chosen``. Minus infinity is reported as the lowest finite fp32.
    """
    values = torch.log_softmax(logits, dim=-1).clamp_min(torch.finfo(torch.float32).min)
    own = values.gather(-1, ids.unsqueeze(-1)).flatten().tolist()
    top: list[list[tuple[float, int]]] = [[] for _ in own]
    if top_num > 0:
        best = values.topk(min(top_num, values.shape[-1]), dim=-1)
        pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        top = [list(zip(v, i, strict=True)) for v, i in pairs]
    named: list[list[tuple[float, int]]] = [[] for _ in own]
    if chosen:
        picked = values[:, torch.tensor(chosen, device=values.device)].tolist()
        named = [list(zip(v, chosen, strict=True)) for v in picked]
    return list(zip(own, top, named, strict=True))
