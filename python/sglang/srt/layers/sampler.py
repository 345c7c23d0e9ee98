"""From logits to token ids: greedy, temperature, top-k, top-p, min-p; log probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.kernels.ops.fused.argmax import argmax_rows
from sglang.srt.sampling.sampling_batch import SamplingBatch
from sglang.srt.utils.upload import upload_ids

HEAD_TOKENS = 256  # a guess: holds the draw of all but very flat distributions


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Draw one token per row.

    Shapes: logits [M, vocab] fp32 (any float dtype if all are greedy); returns [M] int64.
    A row's result depends on its own logits, parameters and uniform number only. Filters apply in
    the order temperature, top-k, top-p, min-p, each on the renormalised remainder; the draw is
    inverse-CDF over the descending order (ties: lowest id first).
    """
    best = argmax_rows(logits)
    if batch.all_greedy:
        return best
    rows = torch.nonzero(~batch.greedy).flatten()
    own = batch.rows(rows)
    best[rows] = draw(logits[rows], own)
    return best


def draw(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Draw one token for each of M rows that all sample; [M] int64.

    Nearly every draw falls among the most probable tokens, so those are looked at first and only
    the rows that they do not decide are sorted as a whole.
    """
    probs = torch.softmax(logits / batch.temperature.unsqueeze(-1), dim=-1)
    if probs.shape[-1] <= 2 * HEAD_TOKENS:
        return _draw_sorted(probs, batch)
    token, decided = _draw_from_head(probs, batch)
    left = torch.nonzero(~decided).flatten()
    if left.numel():
        token[left] = _draw_sorted(probs[left], batch.rows(left))
    return token


def _draw_sorted(probs: Tensor, batch: SamplingBatch) -> Tensor:
    probs, ids = _filtered(probs, batch.top_k, batch.top_p, batch.min_p)
    cdf = probs.double().cumsum(dim=-1)
    target = (batch.uniform * cdf[:, -1]).unsqueeze(-1)
    index = torch.searchsorted(cdf, target, right=True)
    last = ((probs > 0).sum(dim=-1, keepdim=True) - 1).clamp_min(0)
    return ids.gather(-1, torch.minimum(index, last)).flatten()


def _draw_from_head(probs: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """Tokens [M] as ``_draw_sorted`` draws them, and which of them are certain [M].

    A row is decided if what the filters keep is known (it ends within the head, or is everything) and
    the drawn token is more probable than the head's last one, beyond which ties are not in order.
    """
    head_ids = probs.topk(HEAD_TOKENS, dim=-1, sorted=False).indices.sort(dim=-1).values
    head, order = probs.gather(-1, head_ids).sort(dim=-1, descending=True, stable=True)
    ids = head_ids.gather(-1, order)
    within_k = torch.arange(HEAD_TOKENS, device=probs.device) < batch.top_k.unsqueeze(-1)
    kept = head.masked_fill(~within_k, 0.0)
    is_all = batch.top_k >= probs.shape[-1]
    total = torch.where(is_all, probs.sum(dim=-1), kept.sum(dim=-1)).unsqueeze(-1)
    kept = kept / total
    before = kept.cumsum(dim=-1) - kept
    keep = (before < batch.top_p.unsqueeze(-1)) & within_k
    keep &= kept >= batch.min_p.unsqueeze(-1) * kept[:, :1]
    keep[:, 0] = True
    cdf = kept.masked_fill(~keep, 0.0).double().cumsum(dim=-1)
    unfiltered = is_all & (batch.top_p >= 1) & (batch.min_p <= 0)
    whole = probs.double().sum(dim=-1) / total.squeeze(-1)
    mass = torch.where(unfiltered, whole, cdf[:, -1])
    index = torch.searchsorted(cdf, (batch.uniform * mass).unsqueeze(-1), right=True)
    inside = index.clamp_max(HEAD_TOKENS - 1)
    has_total = is_all | (batch.top_k <= HEAD_TOKENS)
    known = has_total & (unfiltered | ~keep[:, -1] | (batch.top_k == HEAD_TOKENS))
    decided = known & (head.gather(-1, inside) > head[:, -1:]).flatten()
    return ids.gather(-1, inside).flatten(), decided & (index == inside).flatten()


def filtered_probs(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the filtered distribution in descending order, and the ids in that order.

    Shapes: logits [M, vocab] fp32, the others [M]; returns probs [M, vocab] (not renormalised after
    the last filter; zero where cut) and ids [M, vocab] int64.
    """
    probs = torch.softmax(logits / temperature.unsqueeze(-1), dim=-1)
    return _filtered(probs, top_k, top_p, min_p)


def _filtered(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor]:
    probs, ids = probs.sort(dim=-1, descending=True, stable=True)
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
        picked = values[:, upload_ids(chosen, values.device)].tolist()
        named = [list(zip(v, chosen, strict=True)) for v in picked]
    return list(zip(own, top, named, strict=True))
