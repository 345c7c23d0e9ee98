"""Accept rules keep the target's distribution; planted wrong ones are caught.

Oracles: speculative sampling is exact when the law of the first two emitted tokens is the product of
the target's conditionals. Known faults F70, F71, F72.
"""

from __future__ import annotations

import pytest
import torch

from sglang.srt.layers.sampler import sample
from sglang.srt.sampling.sampling_batch import SamplingBatch, SamplingState
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative import accept_math
from sglang.srt.speculative.accept_rule import (
    BlockRule,
    MatchRule,
    RejectionRule,
    ThresholdRule,
    VerifyRows,
)
from sglang.srt.speculative.draft_sampling import DraftSampler
from sglang.srt.speculative.drafter import DraftBatch, Proposal
from sglang.srt.speculative.simulate import Method, SimulatedRule, TokenMode
from sglang.srt.speculative.tree import DraftTree
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=25, suite="unit")

NUM_DRAWS = 60_000
VOCAB = 4
TARGET = torch.tensor(
    [[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1]]
)
DRAFT = torch.tensor(
    [[0.2, 0.2, 0.2, 0.4], [0.0, 0.5, 0.5, 0.0], [0.7, 0.1, 0.1, 0.1], [0.7, 0.1, 0.1, 0.1]]
)
BONUS = 0
ACCEPT = {
    "rejection": accept_math.rejection_accept,
    "block": accept_math.block_accept,
    "threshold": lambda c, p, q, u, f: accept_math.threshold_accept(
        c, p, u, f, single=1.0, acc=1.0
    ),
}


def p_value(observed, expected):
    """Chi-square goodness of fit: probability of a worse fit than this one if the law is right."""
    live = expected > 0
    assert observed[~live].sum() == 0, "a token of probability 0 was emitted"
    statistic = ((observed[live] - expected[live]) ** 2 / expected[live]).sum()
    freedom = torch.tensor((int(live.sum()) - 1) / 2.0, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic.double() / 2))


def pair_law():
    return (TARGET[BONUS][:, None] * TARGET).flatten().double()


def count_pairs(candidates, num_correct, following, generator):
    """Counts of the first two emitted tokens; a missing second one is sampled plainly."""
    first = torch.where(num_correct > 0, candidates[:, 1], following)
    second = torch.where(num_correct > 1, candidates[:, 2], following)
    plain = torch.multinomial(TARGET[first], 1, generator=generator).squeeze(1)
    second = torch.where(num_correct == 0, plain, second)
    return torch.bincount(first * VOCAB + second, minlength=VOCAB * VOCAB).double()


def drafted(generator, q_table=DRAFT):
    """Random two-token drafts with the target's and the drafter's conditionals along them."""
    bonus = torch.full((NUM_DRAWS,), BONUS)
    first = torch.multinomial(q_table[bonus], 1, generator=generator).squeeze(1)
    second = torch.multinomial(q_table[first], 1, generator=generator).squeeze(1)
    candidates = torch.stack([bonus, first, second], dim=1)
    return candidates, TARGET[candidates], q_table[candidates[:, :2]]


@pytest.mark.parametrize("rule", sorted(ACCEPT))
def test_rule_keeps_the_target_distribution(rule):
    """60,000 draws; q differs from p and has zeros where p has none, and the other way round."""
    generator = torch.Generator().manual_seed(11)
    candidates, p, q = drafted(generator)
    accept = torch.rand((NUM_DRAWS, 2), generator=generator, dtype=torch.float64)
    final = torch.rand(NUM_DRAWS, generator=generator, dtype=torch.float64)
    num_correct, following = ACCEPT[rule](candidates, p, q, accept, final)
    counts = count_pairs(candidates, num_correct, following, generator)
    assert set(num_correct.tolist()) == {0, 1, 2}
    assert p_value(counts, pair_law() * NUM_DRAWS) > 1e-3


@pytest.mark.parametrize("fault", ["residual_is_p", "final_from_wrong_row", "accepts_too_much"])
def test_planted_bias_is_caught(fault, monkeypatch):
    """Control: three wrong rules, each of which some real engine has had."""
    generator = torch.Generator().manual_seed(11)
    candidates, p, q = drafted(generator)
    accept = torch.rand((NUM_DRAWS, 2), generator=generator, dtype=torch.float64)
    final = torch.rand(NUM_DRAWS, generator=generator, dtype=torch.float64)
    if fault == "residual_is_p":
        monkeypatch.setattr(accept_math, "residual", lambda p, q: p)
    if fault == "final_from_wrong_row":
        finish = accept_math._finish
        monkeypatch.setattr(
            accept_math, "_finish", lambda p, q, n, *rest: finish(p, q, n * 0, *rest)
        )
    if fault == "accepts_too_much":
        accept = accept * 0.9
    num_correct, following = accept_math.rejection_accept(candidates, p, q, accept, final)
    counts = count_pairs(candidates, num_correct, following, generator)
    expected = pair_law() * NUM_DRAWS
    live = expected > 0
    wrong = counts[~live].sum() > 0 or p_value(counts * live, expected) < 1e-6
    assert wrong


def test_block_verification_accepts_no_less():
    generator = torch.Generator().manual_seed(5)
    candidates, p, q = drafted(generator)
    accept = torch.rand((NUM_DRAWS, 2), generator=generator, dtype=torch.float64)
    final = torch.rand(NUM_DRAWS, generator=generator, dtype=torch.float64)
    means = {
        name: ACCEPT[name](candidates, p, q, accept, final)[0].double().mean()
        for name in ("rejection", "block")
    }
    assert means["block"] >= means["rejection"] - 0.01


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_perfect_draft_is_accepted_whole(rule):
    """q = p: nothing may be rejected, for any uniform numbers."""
    generator = torch.Generator().manual_seed(2)
    candidates, p, q = drafted(generator, TARGET)
    accept = torch.rand((NUM_DRAWS, 2), generator=generator, dtype=torch.float64)
    final = torch.rand(NUM_DRAWS, generator=generator, dtype=torch.float64)
    num_correct, _ = ACCEPT[rule](candidates, p, q, accept, final)
    assert int(num_correct.min()) == 2


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("bad", [float("nan"), 0.0, float("inf"), -1.0, 2.0])
def test_invalid_draft_probability_rejects_and_draws_cleanly(rule, bad):
    """A draft whose own q is no probability is rejected; the residual treats it as 0."""
    candidates = torch.tensor([[0, 1, 2]] * 8)
    p = TARGET[candidates]
    q = DRAFT[candidates[:, :2]].clone()
    q[:, 0, 1] = bad
    uniform = torch.linspace(0, 0.99, 8, dtype=torch.float64)
    num_correct, following = ACCEPT[rule](
        candidates, p, q, torch.zeros((8, 2), dtype=torch.float64), uniform
    )
    assert num_correct.tolist() == [0] * 8
    assert all(TARGET[0][token] > 0 for token in following.tolist())


def test_empty_residual_falls_back_to_the_target():
    """p = q and yet a rejection (only rounding can do this): the token still has p > 0."""
    p = torch.tensor([[0.25, 0.25, 0.5]])
    assert torch.equal(accept_math.residual(p, p.clone()), p)
    assert accept_math.draw(torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([0.9999999999])) == 1


@pytest.mark.parametrize("width", [1, 2, 4])
def test_forced_acceptance_at_every_position(width):
    """One-hot p and q that agree on the first n drafts accept exactly n, and continue with p."""
    for wanted in range(width + 1):
        path = torch.arange(width + 1)
        p = torch.eye(width + 3)[(path + 1)[None]]
        candidates = torch.arange(width + 1)[None].clone()
        if wanted < width:
            candidates[0, wanted + 1] = width + 2
        q = torch.eye(width + 3)[candidates[:, 1:]]
        uniform = torch.full((1, width), 0.5, dtype=torch.float64)
        final = torch.full((1,), 0.5, dtype=torch.float64)
        for rule in ACCEPT.values():
            num_correct, following = rule(candidates, p, q, uniform, final)
            assert (int(num_correct), int(following)) == (wanted, wanted + 1)


def make_states(count, *, greedy=False, **params):
    options = {"temperature": 0.0 if greedy else 1.0} | params
    made = SamplingParams(**options)
    made.normalize()
    return [
        SamplingState(params=made, seed=1000 + i, vocab_size=VOCAB, stop_token_ids=frozenset())
        for i in range(count)
    ]


def verify_rows(states, rule, start=7):
    """Draft two tokens per request the way drafters do, then lay out one verify."""
    count = len(states)
    bonus = torch.full((count,), BONUS)
    batch = DraftBatch(
        rows=list(range(count)), prefix_lens=[start] * count, bonus=bonus, sampling=states
    )
    tokens, probs, previous = [], [], bonus
    sampler = DraftSampler(batch, 2, bonus.device)
    for place in range(2):
        previous, chances = sampler.choose(DRAFT[previous].log(), place)
        tokens.append(previous)
        probs.append(chances)
    proposal = Proposal(
        tokens=torch.stack(tokens, 1), probs=torch.stack(probs, 1) if rule.wants_probs else None
    )
    candidates = torch.cat([bonus[:, None], proposal.tokens], dim=1)
    logits = TARGET[candidates].log().reshape(-1, VOCAB)
    return VerifyRows(candidates, logits, states, [start + 1] * count, proposal)


@pytest.mark.parametrize("rule", [RejectionRule(), BlockRule(), MatchRule()], ids=lambda r: r.name)
def test_rule_objects_draw_from_the_request_seeds_without_bias(rule):
    """The seeded streams, not ideal numbers: 60,000 requests, each with its own seed."""
    states = make_states(NUM_DRAWS)
    verdict = rule.accept(verify_rows(states, rule))
    generator = torch.Generator().manual_seed(1)
    num_correct = torch.tensor(verdict.num_correct)
    following = torch.tensor([ids[-1] for ids in verdict.token_ids])
    drafts = torch.tensor([(ids + [0, 0])[:2] for ids in verdict.token_ids])
    candidates = torch.cat([torch.zeros((NUM_DRAWS, 1), dtype=torch.long), drafts], dim=1)
    counts = count_pairs(candidates, num_correct, following, generator)
    assert p_value(counts, pair_law() * NUM_DRAWS) > 1e-3


@pytest.mark.parametrize("rule", [RejectionRule(), BlockRule()], ids=lambda r: r.name)
def test_greedy_and_sampled_requests_share_a_batch(rule):
    """Greedy requests follow the argmax exactly; each request decides as it does alone."""
    states = make_states(30)
    greedy = make_states(30, greedy=True)
    mixed = [g if i % 2 else s for i, (s, g) in enumerate(zip(states, greedy, strict=True))]
    together = rule.accept(verify_rows(mixed, rule)).token_ids
    alone = [rule.accept(verify_rows([state], rule)).token_ids[0] for state in mixed]
    assert together == alone
    best = [int(TARGET[BONUS].argmax())]
    assert all(ids[:1] == best for ids in together[1::2])


def test_same_seed_repeats_and_other_seeds_differ():
    rule = RejectionRule()
    states = make_states(200)
    first = rule.accept(verify_rows(states, rule)).token_ids
    assert first == rule.accept(verify_rows(states, rule)).token_ids
    assert len({tuple(ids) for ids in first}) > 1
    assert first != rule.accept(verify_rows(states, rule, start=8)).token_ids


@pytest.mark.parametrize(
    "params", [{"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.5}, {"temperature": 0.5}], ids=str
)
@pytest.mark.parametrize("rule", [RejectionRule(), BlockRule()], ids=lambda r: r.name)
def test_filters_of_the_request_shape_the_law(rule, params):
    """The first emitted token follows the filtered target, as plain sampling does."""
    count = NUM_DRAWS // 4
    states = make_states(count, **params)
    verdict = rule.accept(verify_rows(states, rule))
    counts = torch.bincount(
        torch.tensor([ids[0] for ids in verdict.token_ids]), minlength=VOCAB
    ).double()
    batch = SamplingBatch.build(states, list(range(count)), 1, torch.device("cpu"))
    logits = TARGET[BONUS].log().expand(count, VOCAB).contiguous()
    plain = torch.bincount(sample(logits, batch), minlength=VOCAB).double()
    support = plain > 0
    assert torch.equal(counts > 0, support)
    pooled = (counts + plain)[support]
    statistic = ((counts - plain)[support] ** 2 / pooled).sum()
    freedom = torch.tensor((int(support.sum()) - 1) / 2.0, dtype=torch.float64)
    assert float(torch.special.gammaincc(freedom.clamp_min(0.5), statistic / 2)) > 1e-3


def test_lossy_threshold_accepts_more():
    """A threshold below 1 is not exact, and that is what it is for."""
    states = make_states(2000)
    exact = ThresholdRule(single=1.0, acc=1.0)
    lossy = ThresholdRule(single=0.2, acc=1.0)
    rows = verify_rows(states, exact)
    assert sum(lossy.accept(rows).num_correct) > 1.2 * sum(exact.accept(rows).num_correct)


def test_match_on_a_tree_follows_the_target_and_never_padding():
    """Node 3 is padding with the very token that the target wants: it must not be taken."""
    tree = DraftTree(parents=((-1, 0, 0, -1, 2),))
    candidates = torch.tensor([[0, 1, 2, 3, 3]])
    logits = torch.full((5, VOCAB), -10.0)
    for node, wanted in enumerate((2, 0, 3, 1, 1)):
        logits[node, wanted] = 10.0
    proposal = Proposal(tokens=candidates[:, 1:], tree=tree)
    rows = VerifyRows(candidates, logits, make_states(1, greedy=True), [5], proposal)
    verdict = MatchRule().accept(rows)
    assert verdict.paths == [[0, 2, 4]]
    assert verdict.token_ids == [[2, 3, 1]]
    assert verdict.last_row.tolist() == [4]
    logits[0] = torch.tensor([-10.0, -10.0, -10.0, 10.0])
    assert MatchRule().accept(rows).token_ids == [[3]]


@pytest.mark.parametrize("method", list(Method), ids=lambda m: m.value)
@pytest.mark.parametrize("accept_len", [1.0, 2.3, 9.0])
def test_simulated_length_has_the_wanted_mean(method, accept_len):
    rule = SimulatedRule(
        MatchRule(), accept_len=accept_len, method=method, token_mode=TokenMode.FIXED, seed=3
    )
    lengths = [rule.draw_length(4) for _ in range(5000)]
    assert set(lengths) <= {1, 2, 3, 4}
    if method is Method.MATCH_EXPECTED:
        assert abs(sum(lengths) / 5000 - min(accept_len, 4.0)) < 0.05


def test_simulated_tokens_are_drafts_and_then_the_best():
    rows = verify_rows(make_states(5, greedy=True), MatchRule())
    rule = SimulatedRule(
        MatchRule(),
        accept_len=3,
        method=Method.MATCH_EXPECTED,
        token_mode=TokenMode.REAL_DRAFT_TOKEN,
        seed=0,
    )
    for ids, candidates in zip(rule.accept(rows).token_ids, rows.candidates.tolist(), strict=True):
        assert ids == candidates[1:] + [int(TARGET[candidates[2]].argmax())]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
