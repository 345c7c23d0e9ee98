"""Looking at the most probable tokens first draws what sorting everything draws."""

from __future__ import annotations

import warnings

import pytest
import torch

from sglang.srt.layers import sampler
from sglang.srt.sampling.sampling_batch import SamplingBatch, uniform_at, uniforms_at
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="unit")

VOCAB, ROWS = 4096, 96


def make_batch(generator):
    def pick(values):
        return values[torch.randint(len(values), (ROWS,), generator=generator)]

    return SamplingBatch(
        all_greedy=False,
        temperature=pick(torch.tensor([0.3, 1.0, 1.5])),
        top_k=pick(torch.tensor([VOCAB, VOCAB, 1, 50, 255, 256, 257, 1000])),
        top_p=pick(torch.tensor([1.0, 1.0, 0.99, 0.9, 0.5])),
        min_p=pick(torch.tensor([0.0, 0.0, 0.05])),
        uniform=torch.rand(ROWS, generator=generator, dtype=torch.float64),
        greedy=torch.zeros(ROWS, dtype=torch.bool),
    )


@pytest.mark.parametrize("sharpness", [0.2, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("tied", [False, True], ids=["distinct", "tied"])
def test_head_first_equals_a_full_sort(sharpness, tied):
    """Every filter, flat and sharp rows, and rows full of equal logits."""
    generator = torch.Generator().manual_seed(int(sharpness * 10))
    logits = torch.randn((ROWS, VOCAB), generator=generator) * sharpness
    if tied:
        logits = (logits * 2).round() / 2
    batch = make_batch(generator)
    probs = torch.softmax(logits / batch.temperature.unsqueeze(-1), dim=-1)
    assert torch.equal(sampler.draw(logits, batch), sampler._draw_sorted(probs, batch))
    _, decided = sampler._draw_from_head(probs, batch)
    assert bool(decided.any())
    if sharpness >= 3:
        assert decided.float().mean() > 0.4


def test_undecided_rows_would_be_wrong():
    """Control: on a flat distribution the head alone gives other tokens."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn((ROWS, VOCAB), generator=generator) * 0.2
    batch = make_batch(generator)
    probs = torch.softmax(logits, dim=-1)
    head, decided = sampler._draw_from_head(probs, batch)
    assert not bool(decided.all())
    assert not torch.equal(head, sampler._draw_sorted(probs, batch))


def test_many_uniforms_at_once_are_those_of_one_by_one():
    seeds = [0, 1, 12345, (1 << 64) - 1, 1 << 70, 99]
    starts = [0, 7, 1 << 20, (1 << 40) + 3, 5, (1 << 62) - 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = uniforms_at(seeds, starts, 5)
    for i, (seed, start) in enumerate(zip(seeds, starts, strict=True)):
        assert got[i].tolist() == [uniform_at(seed, start + j) for j in range(5)]


@pytest.mark.parametrize("vocab", [50, VOCAB])
def test_a_row_that_allows_nothing_harms_no_other(vocab):
    """Rows after a forbidden draft may be all minus infinity; their token is never used."""
    logits = torch.full((2, vocab), float("-inf"))
    logits[0, 3] = 1.0
    batch = SamplingBatch(
        all_greedy=False,
        temperature=torch.ones(2),
        top_k=torch.full((2,), vocab),
        top_p=torch.ones(2),
        min_p=torch.zeros(2),
        uniform=torch.full((2,), 0.5, dtype=torch.float64),
        greedy=torch.zeros(2, dtype=torch.bool),
    )
    assert int(sampler.draw(logits, batch)[0]) == 3


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
