"""Batches as pure functions of (seed, step), so that an interrupted run continues unchanged."""

from __future__ import annotations

import numpy as np
import torch

from examples.demo_model.corpus import Corpus


def _generator(*key: int) -> np.random.Generator:
    return np.random.default_rng(key)


class TextWindows:
    """Random windows of the training text; a source with ``repeat`` r is read r times as often."""

    def __init__(self, corpus: Corpus, seed: int) -> None:
        streams = [stream for stream in corpus.train if stream.repeat]
        sizes = np.array([len(stream.tokens) * stream.repeat for stream in streams], dtype=float)
        self._tokens = [stream.tokens for stream in streams]
        self._share = sizes / sizes.sum()
        self._seed = seed

    def batch(self, step: int, rows: int, length: int) -> torch.Tensor:
        """``[rows, length]`` int64 on the CPU."""
        rng = _generator(self._seed, length, step)
        picks = rng.choice(len(self._tokens), size=rows, p=self._share)
        windows = np.empty((rows, length), dtype=np.int64)
        for row, pick in enumerate(picks):
            tokens = self._tokens[pick]
            start = int(rng.integers(len(tokens) - length))
            windows[row] = tokens[start : start + length]
        return torch.from_numpy(windows)


class ChatWindows:
    """Windows that begin with a conversation; the mask is 1 on answer tokens."""

    def __init__(self, corpus: Corpus, seed: int) -> None:
        self._corpus = corpus
        self._seed = seed

    def batch(self, step: int, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """ids and mask, both ``[rows, length]`` int64."""
        corpus = self._corpus
        rng = _generator(self._seed, 1, step)
        train_starts = corpus.chat_starts[: corpus.chat_held_out_from]
        last = int(corpus.chat_starts[corpus.chat_held_out_from]) - length
        starts = rng.choice(train_starts[train_starts < last], size=rows)
        index = starts[:, None] + np.arange(length)
        ids = corpus.chat[index].astype(np.int64)
        return torch.from_numpy(ids), torch.from_numpy(corpus.chat_mask[index].astype(np.int64))

    def prompts(self, step: int, count: int, longest: int, *, held_out: bool) -> list[np.ndarray]:
        """``count`` conversation openings that end where the answer begins."""
        corpus = self._corpus
        rng = _generator(self._seed, 2, step, int(held_out))
        cut = corpus.chat_held_out_from
        numbers = np.arange(cut, len(corpus.chat_starts) - 1) if held_out else np.arange(cut)
        prompts = []
        for number in rng.permutation(numbers):
            start, end = corpus.chat_starts[number], corpus.chat_starts[number + 1]
            first_answer = int(corpus.chat_mask[start:end].argmax())
            if first_answer <= longest:
                prompts.append(corpus.chat[start : start + first_answer].astype(np.int64))
            if len(prompts) == count:
                break
        return prompts


def held_out_windows(corpus: Corpus, tokens: int, length: int) -> torch.Tensor:
    """Non-overlapping windows ``[n, length]`` from the start of the held-out text."""
    count = max(1, min(tokens, len(corpus.held_out)) // length)
    return torch.from_numpy(corpus.held_out[: count * length].astype(np.int64)).view(count, length)


def held_out_prompts(corpus: Corpus, count: int, length: int, seed: int) -> list[np.ndarray]:
    """Random held-out windows of ``length`` tokens."""
    starts = _generator(seed, 3).integers(len(corpus.held_out) - length, size=count)
    return [corpus.held_out[s : s + length].astype(np.int64) for s in starts]
