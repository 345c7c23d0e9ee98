"""Which drafts of a verify are kept, and what follows them: one object per rule, chosen at start."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sglang.srt.layers.sampler import filtered_probs, sample
from sglang.srt.sampling.sampling_batch import SamplingBatch, SamplingState
from sglang.srt.speculative.accept import accept_matching_prefix
from sglang.srt.speculative.accept_math import block_accept, rejection_accept, threshold_accept
from sglang.srt.speculative.drafter import Proposal
from sglang.srt.speculative.tree import DraftTree, walk
from sglang.srt.speculative.uniforms import Stream, stream_uniforms
from sglang.srt.utils.upload import upload, upload_ids

_MAX_GROUP_PROBS = 1 << 26  # entries of p held at once: 256 MiB in fp32


@dataclass
class VerifyRows:
    """What a rule sees of one verify (R requests, D rows each).

    candidates  [R, D] int64: the bonus, then the proposal's tokens
    logits      [R * D, vocab] fp32 after penalties, bias and masks
    states      how each request samples
    positions   position of the token that row 0 of each request predicts
    """

    candidates: Tensor
    logits: Tensor
    states: Sequence[SamplingState]
    positions: Sequence[int]
    proposal: Proposal

    @property
    def width(self) -> int:
        return self.candidates.shape[1]

    def sampling_batch(self) -> SamplingBatch:
        """Sampling tensors of all rows; a tree's rows use the numbers of their depth."""
        batch = SamplingBatch.build(self.states, self.positions, self.width, self.logits.device)
        tree = self.proposal.tree
        if tree is None or batch.all_greedy:
            return batch
        rows = [r * self.width + depth for r, own in enumerate(tree.depths()) for depth in own]
        return replace(batch, uniform=batch.uniform[rows])


class Verdict:
    """What a verify decided. Tensors are on the model's device; the lists wait for it, once.

    correct   [R] int64, accepted drafts
    targets   [R, D] int64, the token that follows each row, accepted rows first
    last_row  [R] int64, index within the request of its last accepted row
    paths     of trees: accepted rows in order; None for chains, where they are 0 .. num_correct
    """

    def __init__(
        self,
        correct: Tensor,
        targets: Tensor,
        *,
        last_row: Tensor | None = None,
        paths: list[list[int]] | None = None,
    ) -> None:
        self.correct = correct
        self.targets = targets
        self.last_row = correct if last_row is None else last_row
        self.paths = paths

    @cached_property
    def num_correct(self) -> list[int]:
        return self.correct.tolist()

    @cached_property
    def token_ids(self) -> list[list[int]]:
        """The tokens to emit: accepted drafts, then one more."""
        rows = zip(self.targets.tolist(), self.num_correct, strict=True)
        return [row[: count + 1] for row, count in rows]

    def rows_of(self, request: int) -> list[int]:
        """Accepted rows of a request, within the request."""
        if self.paths is not None:
            return self.paths[request]
        return list(range(self.num_correct[request] + 1))


class AcceptRule(Protocol):
    """``wants_probs``: proposals should be drawn at random and say from which distributions.
    ``reads_sampling``: the verdict depends on how requests sample and at which positions.
    """

    name: str
    wants_probs: bool
    reads_sampling: bool

    def accept(self, rows: VerifyRows) -> Verdict: ...


class MatchRule:
    """Keep drafts while they equal the target's own choice, greedy or sampled.

    With sampling a draft c is kept with probability p(c), and the text is the same as without
    speculation, because the choice depends on the request's seed and the position alone.
    """

    name = "match"
    wants_probs = False
    reads_sampling = True

    def accept(self, rows: VerifyRows) -> Verdict:
        targets = sample(rows.logits, rows.sampling_batch()).view(rows.candidates.shape)
        if rows.proposal.tree is not None:
            return tree_verdict(rows.proposal.tree, rows.candidates, targets)
        return Verdict(accept_matching_prefix(rows.candidates, targets), targets)


class _ChainRule(ABC):
    """Shared part of the rules over distributions: greedy requests match, the others draw."""

    wants_probs = False
    reads_sampling = True

    def accept(self, rows: VerifyRows) -> Verdict:
        batch = rows.sampling_batch()
        if batch.all_greedy or rows.width == 1:
            return MatchRule().accept(rows)
        targets = torch.argmax(rows.logits, dim=-1).view(rows.candidates.shape)
        correct = accept_matching_prefix(rows.candidates, targets)
        drawing = [r for r, state in enumerate(rows.states) if not state.is_greedy]
        group = max(1, _MAX_GROUP_PROBS // (rows.width * rows.logits.shape[-1]))
        for start in range(0, len(drawing), group):
            self._draw(rows, batch, drawing[start : start + group], targets, correct)
        return Verdict(correct, targets)

    def _draw(
        self,
        rows: VerifyRows,
        batch: SamplingBatch,
        requests: list[int],
        targets: Tensor,
        correct: Tensor,
    ) -> None:
        """Decide some of the requests that sample; writes their rows of ``targets`` and ``correct``."""
        device, width = rows.logits.device, rows.width
        index = upload_ids(requests, device)
        own = (index.unsqueeze(1) * width + torch.arange(width, device=device)).flatten()
        is_filtered = any(_is_filtered(rows.states[r]) for r in requests)
        p = target_probs(rows.logits[own], batch.rows(own), is_filtered=is_filtered)
        p = p.nan_to_num(0.0)  # rows after a draft that a grammar forbids allow nothing at all
        q = rows.proposal.probs
        states = [rows.states[r] for r in requests]
        starts = [rows.positions[r] - 1 for r in requests]
        own_correct, following = self.decide(
            rows.candidates[index],
            p.view(len(requests), width, -1),
            None if q is None else q[index],
            stream_uniforms(states, starts, width - 1, Stream.ACCEPT, device),
            stream_uniforms(states, starts, 1, Stream.FINAL, device)[:, 0],
        )
        chosen = torch.cat([rows.candidates[index, 1:], following.unsqueeze(1)], dim=1)
        chosen[torch.arange(len(requests), device=device), own_correct] = following
        targets[index], correct[index] = chosen, own_correct

    @abstractmethod
    def decide(
        self, candidates: Tensor, p: Tensor, q: Tensor | None, accept: Tensor, final: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(num_correct [n], next_token [n]) of n requests that sample; arguments as in accept_math."""


class RejectionRule(_ChainRule):
    """Accept with probability ``min(1, p / q)``; drafts without ``q`` count as certain."""

    name = "rejection"
    wants_probs = True

    def decide(
        self, candidates: Tensor, p: Tensor, q: Tensor | None, accept: Tensor, final: Tensor
    ) -> tuple[Tensor, Tensor]:
        return rejection_accept(candidates, p, _or_one_hot(q, candidates, p), accept, final)


class BlockRule(_ChainRule):
    """Block verification: drafts are accepted jointly."""

    name = "block"
    wants_probs = True

    def decide(
        self, candidates: Tensor, p: Tensor, q: Tensor | None, accept: Tensor, final: Tensor
    ) -> tuple[Tensor, Tensor]:
        return block_accept(candidates, p, _or_one_hot(q, candidates, p), accept, final)


class ThresholdRule(_ChainRule):
    """The lossy rule of ``--speculative-accept-threshold-single`` and ``-acc``; chains only."""

    name = "threshold"

    def __init__(self, *, single: float, acc: float) -> None:
        self._single = single
        self._acc = acc

    def decide(
        self, candidates: Tensor, p: Tensor, q: Tensor | None, accept: Tensor, final: Tensor
    ) -> tuple[Tensor, Tensor]:
        return threshold_accept(candidates, p, accept, final, single=self._single, acc=self._acc)


def tree_verdict(tree: DraftTree, candidates: Tensor, targets: Tensor) -> Verdict:
    """Verdict of trees from the target's choice after every node, ``targets`` [R, D]."""
    chosen = targets.tolist()
    paths = walk(tree, candidates.tolist(), chosen)
    width = targets.shape[1]
    token_ids = [[own[node] for node in path] for own, path in zip(chosen, paths, strict=True)]
    padded = [ids + ids[-1:] * (width - len(ids)) for ids in token_ids]

    def on_device(values: list) -> Tensor:
        return upload(np.array(values, dtype=np.int64), targets.device)

    return Verdict(
        on_device([len(path) - 1 for path in paths]),
        on_device(padded),
        last_row=on_device([path[-1] for path in paths]),
        paths=paths,
    )


def target_probs(logits: Tensor, batch: SamplingBatch, *, is_filtered: bool) -> Tensor:
    """The distribution that each of M sampling rows draws from, in id order: [M, vocab] fp32.

    ``is_filtered`` says whether any row has a top-k, top-p or min-p that cuts something.
    """
    if not is_filtered:
        return torch.softmax(logits / batch.temperature.unsqueeze(-1), dim=-1)
    probs, ids = filtered_probs(logits, batch.temperature, batch.top_k, batch.top_p, batch.min_p)
    probs = probs / probs.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, ids, probs)


def _is_filtered(state: SamplingState) -> bool:
    params = state.params
    return params.top_k < state.vocab_size or params.top_p < 1 or params.min_p > 0


def _or_one_hot(q: Tensor | None, candidates: Tensor, p: Tensor) -> Tensor:
    if q is not None:
        return q
    return torch.zeros_like(p[:, 1:]).scatter_(-1, candidates[:, 1:].unsqueeze(-1), 1.0)
