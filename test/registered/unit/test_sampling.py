"""Sampling: filters, seeds, penalties; each test names the mistake it would catch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang.srt.layers.sampler import filtered_probs, sample, token_logprobs
from sglang.srt.sampling.sampling_batch import SamplingBatch, SamplingState, uniform_at
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="unit")

VOCAB = 11


def make_state(seed: int = 0, **options) -> SamplingState:
    params = SamplingParams(**options)
    params.normalize()
    params.verify(VOCAB)
    return SamplingState(
        params=params,
        seed=seed,
        vocab_size=VOCAB,
        stop_token_ids=frozenset(params.stop_token_ids or ()),
    )


def draw(logits: torch.Tensor, states, positions) -> torch.Tensor:
    batch = SamplingBatch.build(states, positions, 1, torch.device("cpu"))
    return sample(logits, batch)


def reference_filter(logits: np.ndarray, temperature, top_k, top_p, min_p) -> np.ndarray:
    """The distribution written as slowly as it can be read."""
    p = np.exp(logits / temperature - (logits / temperature).max())
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    kept = order[:top_k]
    mass = sum(p[i] for i in kept)
    out, before = np.zeros_like(p), 0.0
    for i in kept:
        share = p[i] / mass
        if before < top_p and share >= min_p * p[order[0]] / mass or i == order[0]:
            out[i] = share
        before += share
    return out / out.sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, VOCAB, 1.0, 0.0), (0.7, 4, 1.0, 0.0), (1.3, VOCAB, 0.6, 0.0), (1.0, 6, 0.8, 0.2)],
)
def test_filters_equal_a_plain_reference(temperature, top_k, top_p, min_p):
    """Catches a filter applied in another order or to an unnormalised remainder."""
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    full = torch.ones(5)
    probs, ids = filtered_probs(
        logits, full * temperature, full.long() * top_k, full * top_p, full * min_p
    )
    got = torch.zeros(5, VOCAB).scatter(1, ids, probs)
    got = (got / got.sum(-1, keepdim=True)).numpy()
    for row, want in zip(got, logits.double().numpy(), strict=True):
        np.testing.assert_allclose(
            row, reference_filter(want, temperature, top_k, top_p, min_p), atol=1e-6
        )


def test_drawn_frequencies_follow_the_distribution():
    """Catches a biased draw: chi-square over 40,000 draws, and the same test rejects a planted bias."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
    state = make_state(seed=99, temperature=0.9)
    count = 40_000
    ids = draw(logits.expand(count, -1).contiguous(), [state] * count, range(count))
    expected = torch.softmax(logits.double() / 0.9, -1).numpy() * count
    observed = np.bincount(ids.numpy(), minlength=VOCAB)
    statistic = ((observed - expected) ** 2 / expected).sum()
    assert statistic < 29.6, statistic  # 99.9th percentile of chi-square with 10 degrees of freedom
    biased = torch.softmax(logits.double(), -1).numpy() * count
    assert ((observed - biased) ** 2 / biased).sum() > 29.6


def test_a_row_does_not_depend_on_its_neighbours():
    """Catches randomness or filtering that leaks between the requests of a batch."""
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(5))
    states = [
        make_state(1, temperature=1.2),
        make_state(2, temperature=0.0),
        make_state(3, top_k=3),
    ]
    together = draw(logits, states, [7, 8, 9])
    alone = [draw(logits[i : i + 1], [states[i]], [7 + i])[0] for i in range(3)]
    assert torch.equal(together, torch.stack(alone))
    assert together[1] == logits[1].argmax()


def test_seed_and_position_fix_the_draw():
    """Catches a seed that is ignored: the same repeats, others differ somewhere."""
    first = [uniform_at(42, i) for i in range(200)]
    assert first == [uniform_at(42, i) for i in range(200)]
    assert first != [uniform_at(43, i) for i in range(200)]
    assert all(0 <= u < 1 for u in first)
    assert len(set(first)) == 200
    assert abs(np.mean(first) - 0.5) < 0.07


def test_penalties_count_the_drafts_before_each_row():
    """Catches penalties that see only emitted tokens, so that row 1 ignores draft 1."""
    state = make_state(frequency_penalty=1.0, presence_penalty=0.5)
    logits = torch.zeros(3, VOCAB)
    state.edit_logits(logits, output_ids=[4, 4], drafts=[2, 4])
    assert logits[0, 4] == -2.5 and logits[0, 2] == 0
    assert logits[1, 2] == -1.5 and logits[1, 4] == -2.5
    assert logits[2, 4] == -3.5


def test_repetition_penalty_covers_prompt_and_output():
    state = make_state(repetition_penalty=2.0)
    state.prompt_ids = [1]
    logits = torch.tensor([[1.0, 4.0, -1.0] + [0.5] * (VOCAB - 3)])
    state.edit_logits(logits, output_ids=[2], drafts=())
    assert logits[0, :4].tolist() == [1.0, 2.0, -2.0, 0.5]


def test_min_tokens_bans_stops_at_every_row_of_a_block():
    """Catches a minimum that is checked only once per step (F60)."""
    state = make_state(min_new_tokens=4, max_new_tokens=9, stop_token_ids=[6])
    logits = torch.zeros(3, VOCAB)
    state.edit_logits(logits, output_ids=[1, 2], drafts=[3, 3])
    assert torch.isinf(logits[:, 6]).tolist() == [True, True, False]


def test_logit_bias_is_added():
    state = make_state(logit_bias={3: 5.0})
    logits = torch.zeros(1, VOCAB)
    state.edit_logits(logits, output_ids=[0], drafts=())
    assert logits[0, 3] == 5.0 and logits.sum() == 5.0


def test_logprobs_are_the_models_and_finite():
    """Catches infinities, which are not JSON (F69)."""
    logits = torch.tensor([[0.0, float("-inf"), 1.0]])
    ((own, top, named),) = token_logprobs(logits, torch.tensor([1]), 2, [0, 1])
    want = torch.log_softmax(logits[0], -1)
    assert np.isfinite(own)
    assert [i for _, i in top] == [2, 0]
    assert top[0][0] == pytest.approx(want[2].item())
    assert named[0] == (pytest.approx(want[0].item()), 0) and np.isfinite(named[1][0])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
