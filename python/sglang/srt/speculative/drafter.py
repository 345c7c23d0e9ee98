"""The protocol of a drafter: what it needs from the target, and when it is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    LogitsOutput,
)
from sglang.srt.sampling.sampling_batch import SamplingState
from sglang.srt.speculative.tree import DraftTree


@dataclass(frozen=True)
class TokenHistory:
    """A request's tokens by reference, never copied; the last output token is the bonus."""

    rid: str
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]


@dataclass
class DraftBatch:
    """R decoding requests before a verify.

    rows         request rows
    prefix_lens  committed lengths L; positions L .. L+D-1 have KV slots in the token table
    bonus        [R] int64, the emitted token at position L
    sampling     how each request samples; empty where the caller knows that no drafter asks
    histories    each request's tokens; likewise
    """

    rows: list[int]
    prefix_lens: list[int]
    bonus: Tensor
    sampling: Sequence[SamplingState] = field(default_factory=tuple)
    histories: Sequence[TokenHistory] = field(default_factory=tuple)


@dataclass
class Proposal:
    """Drafts of one step.

    tokens  [R, d] int64, d <= draft_token_num - 1; of a chain: the tokens at positions L+1 .. L+d
    probs   [R, d, vocab] fp32, the distributions that the drafts of a chain were drawn from; None if
            they were chosen without chance
    tree    shape when the drafts are no chain; its nodes are the bonus and then ``tokens``
    """

    tokens: Tensor
    probs: Tensor | None = None
    tree: DraftTree | None = None

    def with_bonus(self, bonus: Tensor) -> Tensor:
        """[R, d + 1]: each request's ``bonus`` [R], then its drafts."""
        return torch.cat([bonus.unsqueeze(1), self.tokens], dim=1)


class Drafter(Protocol):
    """Proposes up to ``draft_token_num - 1`` tokens per request. Its state is keyed by request row.

    ``draft_token_num`` is what pages and scratch are reserved for. ``is_chain`` says that no proposal
    ever has a tree.
    """

    draft_token_num: int
    is_chain: bool
    capture_hidden: CaptureHiddenMode
    capture_layer_ids: tuple[int, ...]

    def propose(self, batch: DraftBatch) -> Proposal:
        """Return the drafts of this step; every request gets equally many."""
        ...

    def after_prefill(self, fb: ForwardBatch, output: LogitsOutput, next_ids: Tensor) -> None:
        """The target ran prefill rows; ``next_ids`` [R] follows each request's last row."""
        ...

    def after_verify(
        self, fb: ForwardBatch, output: LogitsOutput, targets: Tensor, num_correct: list[int]
    ) -> None:
        """The target verified d+1 rows a request, accepted ones first.

        ``targets`` [R, d+1] is the token that follows each row (meaningless after ``num_correct``);
        rows of ``output`` are in the same order. ``fb`` has the lengths before the verify.
        """
        ...
