"""Drafts drawn from a draft distribution, with what an accept rule needs to know of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sglang.srt.sampling.sampling_batch import SamplingState
from sglang.srt.speculative.accept_math import draw
from sglang.srt.speculative.drafter import DraftBatch
from sglang.srt.speculative.uniforms import Stream, stream_uniforms
from sglang.srt.utils.upload import upload


class DraftSampler:
    """Chooses one draft per request and place: the best for greedy requests, else a random one.

    Random drafts follow ``softmax(scores / temperature)`` without top-k, top-p or min-p; the target's
    filters decide at acceptance.
    """

    def __init__(self, batch: DraftBatch, width: int, device: torch.device) -> None:
        states = batch.sampling
        self._uniform = stream_uniforms(states, batch.prefix_lens, width, Stream.DRAFT, device)
        self._temperature = _temperatures(states, device)
        self._greedy = upload(np.array([s.is_greedy for s in states]), device)

    @staticmethod
    def is_needed(batch: DraftBatch) -> bool:
        """Whether any request samples, so that draft probabilities matter."""
        return any(not state.is_greedy for state in batch.sampling)

    def choose(self, scores: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """Choose among ``scores`` [R, n] fp32: indices [R] and their distribution [R, n].

        The distribution of a greedy request is one-hot.
        """
        best = torch.argmax(scores, dim=-1)
        probs = torch.softmax(scores / self._temperature, dim=-1)
        index = torch.where(self._greedy, best, draw(probs, self._uniform[:, place]))
        one_hot = torch.zeros_like(probs).scatter_(-1, best.unsqueeze(-1), 1.0)
        return index, torch.where(self._greedy.unsqueeze(-1), one_hot, probs)


def _temperatures(states: Sequence[SamplingState], device: torch.device) -> Tensor:
    values = [1.0 if s.is_greedy else s.params.temperature for s in states]
    return upload(np.array(values, dtype=np.float32), device).unsqueeze(-1)
