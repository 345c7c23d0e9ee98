"""Acceptance as arithmetic: distributions and uniform numbers in, accepted lengths and tokens out.

Notation (R requests, D rows of a verify, V tokens): ``candidates [R, D]`` are the bonus and D - 1
drafts; ``p [R, D, V]`` is the target's distribution after each row; ``q [R, D-1, V]`` is the
distribution each draft was drawn from. Functions return ``num_correct [R]`` in 0 .. D-1 and
``next_token [R]``, the token after the last accepted draft. Formulas: docs/design/drafters.md.
"""

from __future__ import annotations

import torch
from torch import Tensor


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF draw in id order: weights [R, V] >= 0 with a positive sum, uniform [R] -> [R]."""
    cdf = weights.double().cumsum(dim=-1)
    index = torch.searchsorted(cdf, (uniform * cdf[:, -1]).unsqueeze(-1), right=True).squeeze(-1)
    positive = weights > 0
    last = weights.shape[-1] - 1 - positive.flip(-1).to(torch.uint8).argmax(dim=-1)
    return torch.minimum(index, last)


def clean_draft_probs(q: Tensor) -> Tensor:
    """``q`` with every entry that is no probability (NaN, infinite, negative, above 1) set to 0."""
    return torch.where((q >= 0) & (q <= 1), q, torch.zeros_like(q))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """``relu(p - q)`` [R, V]; where that is empty, which only rounding can cause, ``p`` itself."""
    left = (p - q).clamp_min(0)
    return torch.where(left.sum(dim=-1, keepdim=True) > 0, left, p)


def rejection_accept(
    candidates: Tensor, p: Tensor, q: Tensor, accept_uniform: Tensor, final_uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Accept draft i while ``u_i * q_i(c_i) < p_{i-1}(c_i)``; exact for any ``q``.

    accept_uniform [R, D-1]; final_uniform [R]. A draft whose own ``q`` is 0 or invalid is rejected.
    Source: speculative sampling, arXiv:2211.17192.
    """
    q = clean_draft_probs(q)
    drafts = candidates[:, 1:].unsqueeze(-1)
    p_of = p[:, :-1].gather(-1, drafts).squeeze(-1)
    q_of = q.gather(-1, drafts).squeeze(-1)
    accepted = (q_of > 0) & (accept_uniform * q_of < p_of)
    num_correct = accepted.long().cumprod(dim=1).sum(dim=1)
    return num_correct, _finish(p, q, num_correct, torch.ones_like(final_uniform), final_uniform)


def block_accept(
    candidates: Tensor, p: Tensor, q: Tensor, accept_uniform: Tensor, final_uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Block verification: the longest prefix that passes jointly; exact, and never shorter on average.

    Arguments as for ``rejection_accept``. Source: arXiv:2403.10444, algorithm 2.
    """
    q = clean_draft_probs(q)
    width = candidates.shape[1] - 1
    drafts = candidates[:, 1:].unsqueeze(-1)
    p_of = p[:, :-1].gather(-1, drafts).squeeze(-1)
    q_of = q.gather(-1, drafts).squeeze(-1)
    ratio = torch.where(q_of > 0, p_of / q_of.clamp_min(torch.finfo(q.dtype).tiny), 0.0)
    weight = torch.ones_like(p_of[:, 0])
    weights = [weight]
    for i in range(width):
        weight = (weight * ratio[:, i]).clamp_max(1.0)
        weights.append(weight)
    h = torch.stack(weights, dim=1)
    left = (h[:, :-1, None] * p[:, :-1] - q).clamp_min(0).sum(dim=-1)
    total = left + 1 - h[:, :-1]
    threshold = torch.where(total > 0, left / total, torch.zeros_like(left))
    threshold = torch.cat([threshold[:, 1:], h[:, -1:]], dim=1)
    passed = accept_uniform < threshold
    place = torch.arange(1, width + 1, device=p.device)
    num_correct = (passed * place).amax(dim=1)
    scale = h.gather(1, num_correct.unsqueeze(1)).squeeze(1)
    return num_correct, _finish(p, q, num_correct, scale, final_uniform)


def threshold_accept(
    candidates: Tensor,
    p: Tensor,
    accept_uniform: Tensor,
    final_uniform: Tensor,
    *,
    single: float,
    acc: float,
) -> tuple[Tensor, Tensor]:
    """Accept a draft if ``u < p(c) / acc`` or ``p(c) >= single``, never one with ``p(c) = 0``.

    Exact when both thresholds are 1; smaller values accept more and change the output distribution.
    """
    drafts = candidates[:, 1:].unsqueeze(-1)
    p_of = p[:, :-1].gather(-1, drafts).squeeze(-1)
    accepted = (p_of > 0) & ((accept_uniform < p_of / acc) | (p_of >= single))
    num_correct = accepted.long().cumprod(dim=1).sum(dim=1)
    q = torch.zeros_like(p[:, :-1]).scatter(-1, drafts, p_of.unsqueeze(-1))
    return num_correct, _finish(p, q, num_correct, torch.ones_like(final_uniform), final_uniform)


def _finish(p: Tensor, q: Tensor, num_correct: Tensor, scale: Tensor, uniform: Tensor) -> Tensor:
    """Draw the token after the last accepted draft from ``relu(scale * p - q)``, or from ``p``."""
    rows = torch.arange(p.shape[0], device=p.device)
    own = p[rows, num_correct]
    width = q.shape[1]
    rejected = num_correct < width
    draft = q[rows, num_correct.clamp_max(width - 1)] * rejected.unsqueeze(-1)
    factor = torch.where(rejected, scale.to(own.dtype), torch.ones_like(own[:, 0]))
    left = residual(own * factor.unsqueeze(-1), draft)
    return draw(left, uniform)
