"""Per-request sampling state, and the tensors that a batch of rows samples with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.upload import upload, upload_ids

_MASK64 = (1 << 64) - 1


def uniform_at(seed: int, position: int) -> float:
    """A uniform number in [0, 1) that depends on the seed and the position alone.

    The same request draws the same numbers in any batch, with and without speculation.
    Source: splitmix64 (Steele, Lea, Flood 2014), applied to seed and position in turn.
    """
    x = seed & _MASK64
    for word in (position, 0x5851F42D4C957F2D):
        x = (x + 0x9E3779B97F4A7C15 + (word & _MASK64) * 0xD1342543DE82EF95) & _MASK64
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
        x ^= x >> 31
    return (x >> 11) * 2.0**-53


def uniforms_at(seeds: Sequence[int], starts: Sequence[int], count: int) -> np.ndarray:
    """``uniform_at`` of n seeds at positions ``starts[i] .. starts[i] + count - 1``: [n, count] fp64."""
    x = np.array([seed & _MASK64 for seed in seeds], dtype=np.uint64)[:, None]
    first = np.array([start & _MASK64 for start in starts], dtype=np.uint64)[:, None]
    last = np.array([[0x5851F42D4C957F2D]], dtype=np.uint64)
    for word in (first + np.arange(count, dtype=np.uint64), last):
        x = x + (np.uint64(0x9E3779B97F4A7C15) + word * np.uint64(0xD1342543DE82EF95))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(eq=False)
class SamplingState:
    """What one request's next token is drawn with. ``seed`` is always set."""

    params: SamplingParams
    seed: int
    vocab_size: int
    stop_token_ids: frozenset[int]
    prompt_ids: Sequence[int] = ()
    _prompt_mask: Tensor | None = field(default=None, repr=False)
    _bias: Tensor | None = field(default=None, repr=False)

    @property
    def is_greedy(self) -> bool:
        return self.params.is_greedy

    @property
    def edits_logits(self) -> bool:
        p = self.params
        return bool(
            p.frequency_penalty
            or p.presence_penalty
            or p.repetition_penalty != 1.0
            or p.logit_bias
            or p.min_new_tokens
        )

    def edit_logits(self, logits: Tensor, output_ids: Sequence[int], drafts: Sequence[int]) -> None:
        """Apply penalties, bias and the minimum length, in place, to the rows of one request.

        logits      [D, vocab] fp32; row i predicts the token after output_ids and drafts[:i]
        output_ids  what the request has emitted, the bonus included
        drafts      D - 1 candidate tokens
        """
        p = self.params
        penalised = p.frequency_penalty or p.presence_penalty or p.repetition_penalty != 1.0
        counts = self._counts(output_ids, logits.device) if penalised else None
        for i, row in enumerate(logits):
            if counts is not None:
                if i:
                    counts[drafts[i - 1]] += 1
                self._penalise(row, counts)
            if p.logit_bias:
                row += self._bias_row(logits.device)
            if len(output_ids) + i < p.min_new_tokens:
                row[list(self.stop_token_ids)] = float("-inf")

    def _counts(self, output_ids: Sequence[int], device: torch.device) -> Tensor:
        ids = upload_ids(output_ids, device)
        return torch.bincount(ids, minlength=self.vocab_size).to(torch.float32)

    def _penalise(self, row: Tensor, counts: Tensor) -> None:
        p = self.params
        if p.repetition_penalty != 1.0:
            seen = (counts > 0) | self._prompt_seen(row.device)
            scaled = torch.where(row > 0, row / p.repetition_penalty, row * p.repetition_penalty)
            row.copy_(torch.where(seen, scaled, row))
        row -= p.frequency_penalty * counts
        row -= p.presence_penalty * (counts > 0)

    def _prompt_seen(self, device: torch.device) -> Tensor:
        if self._prompt_mask is None:
            mask = torch.zeros(self.vocab_size, dtype=torch.bool, device=device)
            mask[upload_ids(self.prompt_ids, device)] = True
            self._prompt_mask = mask
        return self._prompt_mask

    def _bias_row(self, device: torch.device) -> Tensor:
        if self._bias is None:
            bias = torch.zeros(self.vocab_size, dtype=torch.float32, device=device)
            for token, value in self.params.logit_bias.items():
                bias[int(token)] = value
            self._bias = bias
        return self._bias


@dataclass
class SamplingBatch:
    """Sampling tensors of M rows; None where every row is greedy.

    temperature, top_p, min_p, uniform  [M] fp32; top_k [M] int64 (vocab size = off);
    greedy [M] bool
    """

    all_greedy: bool
    temperature: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    uniform: Tensor | None = None
    greedy: Tensor | None = None

    @classmethod
    def build(
        cls,
        states: Sequence[SamplingState],
        positions: Sequence[int],
        rows_per_request: int,
        device: torch.device,
    ) -> SamplingBatch:
        """Rows of request i predict tokens at ``positions[i], positions[i] + 1, ...``."""
        if all(s.is_greedy for s in states):
            return cls(all_greedy=True)
        table = np.empty((5, len(states), rows_per_request), dtype=np.float64)
        table[4] = uniforms_at([s.seed for s in states], positions, rows_per_request)
        for i, state in enumerate(states):
            p = state.params
            greedy = state.is_greedy
            table[0, i] = 1.0 if greedy else p.temperature
            table[1, i] = min(p.top_k, state.vocab_size)
            table[2, i] = p.top_p
            table[3, i] = p.min_p
        flat = upload(table.reshape(5, -1), device)
        greedy = upload(np.array([s.is_greedy for s in states]), device)
        return cls(
            all_greedy=False,
            temperature=flat[0].float(),
            top_k=flat[1].long(),
            top_p=flat[2].float(),
            min_p=flat[3].float(),
            uniform=flat[4],
            greedy=greedy.repeat_interleave(rows_per_request),
        )

    def rows(self, index: Tensor) -> SamplingBatch:
        """The rows ``index`` [n] of a batch that is not all greedy."""
        return SamplingBatch(
            all_greedy=False,
            temperature=self.temperature[index],
            top_k=self.top_k[index],
            top_p=self.top_p[index],
            min_p=self.min_p[index],
            uniform=self.uniform[index],
            greedy=self.greedy[index],
        )
