"""Accept rules. They see token ids and distributions, never a drafter."""

from __future__ import annotations

from torch import Tensor


def accept_matching_prefix(candidates: Tensor, targets: Tensor) -> Tensor:
    """Return how many drafts of each chain are accepted.

    candidates  [R, D] int64; column 0 is the bonus, the others are drafts
    targets     [R, D] int64; column i is the target's own choice for the token after column i
    returns     [R] int64, 0 .. D-1

    Greedy targets make this the greedy rule. Targets that were *sampled* make it target-only
    sampling: draft c is accepted with probability p(c), and a rejected position keeps the sampled
    token, which is then distributed as p without c, renormalised. Because the sample at a position
    depends on the request's seed and the position alone, the text is the same with and without
    speculation.
    """
    match = candidates[:, 1:] == targets[:, :-1]
    return match.long().cumprod(dim=1).sum(dim=1)
