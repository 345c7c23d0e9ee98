"""Trees and n-grams in the engine: the right node's KV and state are kept, wherever it is.

Known faults F01, F02, F12, F66. A scripted drafter hides the known continuation among wrong
siblings at changing nodes, so that accepted paths skip rows.
"""

from __future__ import annotations

import random

import pytest
import torch

from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.drafter import Proposal
from sglang.srt.speculative.tree import DraftTree
from sglang.srt.speculative.tree_drafter import TreeMTPDrafter
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.engine_harness import InProcessEngine
from sglang.test.make_checkpoint import make_checkpoint

register_cpu_ci(est_time=40, suite="e2e")

WIDTH = 8
NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": WIDTH}
SIZES = {"max_running_requests": 8, "page_size": 64}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    out = tmp_path_factory.mktemp("target") / "tiny"
    make_checkpoint(str(out), arch="qwen3_5", dtype="fp32", seed=7)
    return str(out)


def prompts(count=5, low=5, high=90, seed=3):
    rng = random.Random(seed)
    return [[rng.randrange(200) for _ in range(rng.randint(low, high))] for _ in range(count)]


@pytest.fixture(scope="module")
def plain(target):
    engine = InProcessEngine(target, **SIZES)
    greedy = engine.generate(prompts(), max_new_tokens=40, ignore_eos=True)
    sampled = engine.generate(
        prompts(), max_new_tokens=40, ignore_eos=True, temperature=0.9, sampling_seed=5
    )
    return greedy, sampled


class ScriptedTreeDrafter:
    """Random trees; a random number of right tokens lies on a random path of each."""

    is_chain = False
    capture_hidden = CaptureHiddenMode.NULL
    capture_layer_ids: tuple[int, ...] = ()
    draft_token_num = WIDTH

    def __init__(self, engine, expected, seed=0):
        self.engine, self.expected, self.rng = engine, expected, random.Random(seed)
        self.paths: dict[tuple[int, ...], int] = {}

    def propose(self, batch):
        tokens, parents = [], []
        for history, length in zip(batch.histories, batch.prefix_lens, strict=True):
            own = (-1, *(self.rng.randrange(i) for i in range(1, WIDTH - 1)), -1)
            leaf = self.rng.randrange(WIDTH - 1)
            path = [leaf]
            while own[path[-1]] >= 0:
                path.append(own[path[-1]])
            path = path[::-1]
            known = self.expected[history.rid][length + 1 :]
            row = [(own[i] * 31 + i * 7) % 200 + 3000 for i in range(WIDTH)]
            for depth, node in enumerate(path[1:]):
                row[node] = known[depth] if depth < len(known) else 0
            self.paths[tuple(path)] = self.paths.get(tuple(path), 0) + 1
            tokens.append(row[1:])
            parents.append(own)
        return Proposal(tokens=torch.tensor(tokens), tree=DraftTree(tuple(parents)))

    def after_prefill(self, fb, output, next_ids):
        """The script knows what follows."""

    def after_verify(self, fb, output, targets, num_correct):
        """The script knows what follows."""


def scripted(target, expected, texts, **options):
    engine = InProcessEngine(target, **NGRAM, **SIZES, **options)
    script = {f"r{i}": t + out for i, (t, out) in enumerate(zip(texts, expected, strict=True))}
    drafter = ScriptedTreeDrafter(engine, script)
    engine.built.worker.replace_drafter(drafter)
    return engine, drafter


def test_any_accepted_path_leaves_the_state_of_plain_decoding(target, plain):
    """Tokens equal the plain run; the cached boundary states resume to the same second turn."""
    engine, drafter = scripted(target, plain[0], prompts())
    got = engine.generate(prompts(), max_new_tokens=40, ignore_eos=True)
    assert got == plain[0]
    skipping = [p for p in drafter.paths if list(p) != list(range(len(p)))]
    accepted = sum(engine.last(f"r{i}").spec_accepted_tokens for i in range(5))
    steps = sum(engine.last(f"r{i}").spec_verify_ct for i in range(5))
    assert len(skipping) > 10 and accepted > 1.5 * steps


def test_boundary_state_of_a_tree_step_serves_the_next_turn(target):
    """A path crosses a track boundary at a node whose row is not its depth."""
    text = prompts(1, 180, 181)[0]
    options = {"mamba_track_interval": 64, "max_total_tokens": 8192}
    (first,) = InProcessEngine(target, **SIZES).generate(
        [text], max_new_tokens=160, ignore_eos=True
    )
    follow = text + first + prompts(1, 9, 9, seed=8)[0]
    cold = InProcessEngine(target, disable_radix_cache=True, **SIZES)
    (wanted,) = cold.generate([follow], max_new_tokens=30, ignore_eos=True)
    engine, _ = scripted(target, [first], [text], **options)
    assert engine.generate([text], max_new_tokens=160, ignore_eos=True) == [first]
    engine.built.worker._drafter.expected["r1"] = follow + wanted
    rid = engine.submit(follow, max_new_tokens=30, ignore_eos=True)
    engine.run()
    assert engine.last(rid).cached_tokens >= 256
    assert engine.ids(rid) == wanted


def test_wrong_node_at_commit_is_caught(target, plain, monkeypatch):
    """Control: committing the row of the depth instead of the node's changes the text."""
    from sglang.srt.speculative import accept_rule

    verdict = accept_rule.tree_verdict

    def by_depth(tree, candidates, targets):
        found = verdict(tree, candidates, targets)
        found.last_row = torch.tensor(found.num_correct)
        return found

    monkeypatch.setattr(accept_rule, "tree_verdict", by_depth)
    engine, _ = scripted(target, plain[0], prompts())
    assert engine.generate(prompts(), max_new_tokens=40, ignore_eos=True) != plain[0]


@pytest.mark.parametrize("match_type", ["BFS", "PROB"])
@pytest.mark.parametrize("breadth", [1, 10])
def test_ngram_text_equals_no_speculation(target, plain, match_type, breadth):
    """First run: mostly nothing to copy (F01); second run: everything was seen before."""
    engine = InProcessEngine(
        target,
        speculative_ngram_max_bfs_breadth=breadth,
        speculative_ngram_match_type=match_type,
        **NGRAM,
        **SIZES,
    )
    options = {"max_new_tokens": 40, "ignore_eos": True}
    assert engine.generate(prompts(), **options) == plain[0]
    before = sum(engine.last(f"r{i}").spec_verify_ct for i in range(5))
    assert engine.generate(prompts(), **options) == plain[0]
    after = sum(engine.last(f"r{i}").spec_verify_ct for i in range(5, 10))
    assert after * 3 < before
    sampled = engine.generate(prompts(), temperature=0.9, sampling_seed=5, **options)
    assert sampled == plain[1]


@pytest.mark.parametrize("capacity", [1, 50])
def test_an_index_smaller_than_a_batch_of_prompts(target, plain, capacity):
    """Catches a running request whose text the others' prompts push out of the index, which then ends
    the scheduler."""
    engine = InProcessEngine(target, speculative_ngram_capacity=capacity, **NGRAM, **SIZES)
    assert engine.generate(prompts(), max_new_tokens=40, ignore_eos=True) == plain[0]


@pytest.mark.parametrize(("topk", "rows"), [(2, 6), (3, 12)])
def test_eagle_tree_text_equals_no_speculation(target, plain, topk, rows):
    engine = InProcessEngine(
        target,
        speculative_algorithm="NEXTN",
        speculative_num_steps=3,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=rows,
        **SIZES,
    )
    options = {"max_new_tokens": 40, "ignore_eos": True}
    assert engine.generate(prompts(), **options) == plain[0]
    assert engine.generate(prompts(), temperature=0.9, sampling_seed=5, **options) == plain[1]


def test_tree_of_one_branch_drafts_like_the_chain_and_wider_ones_contain_it(target):
    """Positions, hidden rows and masks of the draft forwards: the best branch is the chain."""
    engine = InProcessEngine(
        target,
        speculative_algorithm="NEXTN",
        speculative_num_steps=4,
        speculative_eagle_topk=2,
        speculative_num_draft_tokens=12,
        **SIZES,
    )
    wide = engine.built.worker._drafter
    chain, propose, seen = wide._inner, wide.propose, []
    narrow = TreeMTPDrafter(chain, num_steps=4, topk=1, num_nodes=5)

    def spy(batch):
        wanted = chain.propose_steps(batch, 4).tokens
        one = narrow.propose(batch)
        assert torch.equal(one.tokens, wanted)
        assert set(one.tree.parents) == {(-1, 0, 1, 2, 3)}
        proposal = propose(batch)
        for r, own in enumerate(wanted.tolist()):
            node, depth = 0, 0
            children = {
                (parent, token): i + 1
                for i, (parent, token) in enumerate(
                    zip(proposal.tree.parents[r][1:], proposal.tokens[r].tolist(), strict=True)
                )
            }
            while depth < 4 and (node, own[depth]) in children:
                node, depth = children[node, own[depth]], depth + 1
            seen.append(depth)
        return proposal

    wide.propose = spy
    engine.generate(prompts(), max_new_tokens=6, ignore_eos=True)
    assert len(seen) >= 25 and min(seen) >= 1
    assert sum(seen) / len(seen) > 1.5


def test_penalties_count_each_nodes_own_ancestors(target):
    """F65 on trees: a repetition penalty gives the text of plain decoding."""
    options = {
        "max_new_tokens": 24, "ignore_eos": True,
        "frequency_penalty": 0.7, "repetition_penalty": 1.2, "min_new_tokens": 9,
    }  # fmt: skip
    expected = InProcessEngine(target, **SIZES).generate(prompts(), **options)
    engine, _ = scripted(target, expected, prompts())
    assert engine.generate(prompts(), **options) == expected


def test_logprobs_follow_the_accepted_path(target, plain):
    """F68 on trees: a token's log probability is that of its own node."""
    options = {"max_new_tokens": 20, "ignore_eos": True, "return_logprob": True}

    def values(engine):
        rids = [engine.submit(text, **options) for text in prompts()]
        engine.run()
        return [[x for item in engine.outputs[rid] for x in item.output_logprobs] for rid in rids]

    wanted = values(InProcessEngine(target, **SIZES))
    engine, _ = scripted(target, plain[0], prompts())
    for one, other in zip(values(engine), wanted, strict=True):
        assert [x.token_id for x in one] == [x.token_id for x in other]
        assert max(abs(a.logprob - b.logprob) for a, b in zip(one, other, strict=True)) < 1e-3


def test_adaptive_width_changes_and_text_does_not(target):
    """F42, F43: widths 0, 1 and 3 over buffers for 7, lossless equal to default in the pools."""
    texts = prompts(9)
    plain = InProcessEngine(target, max_running_requests=9, page_size=64)
    expected = plain.generate(texts, max_new_tokens=60, ignore_eos=True)
    engines, widths = [], set()
    for lossless in (False, True):
        engine = InProcessEngine(
            target,
            speculative_algorithm="NEXTN",
            speculative_adaptive=True,
            enable_linear_lossless_verify=lossless,
            max_running_requests=9,
            page_size=64,
        )
        drafter = engine.built.worker._drafter
        propose = drafter.propose

        def spy(batch, propose=propose):
            proposal = propose(batch)
            widths.add(proposal.tokens.shape[1])
            return proposal

        drafter.propose = spy
        assert engine.generate(texts, max_new_tokens=60, ignore_eos=True) == expected
        assert engine.built.worker.draft_token_num == 8
        engines.append(engine)
    assert widths == {0, 1, 3}
    first, second = (engine.state_tensors() for engine in engines)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_simulated_acceptance_forces_every_step(target, monkeypatch):
    """Two tokens a step, whatever the drafts are worth; the engine survives the wrong text."""
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "2")
    engine = InProcessEngine(target, speculative_algorithm="NEXTN", **SIZES)
    engine.generate(prompts(), max_new_tokens=21, ignore_eos=True)
    for i in range(5):
        last = engine.last(f"r{i}")
        assert (last.spec_verify_ct, last.completion_tokens) == (10, 21)
        assert last.spec_accepted_tokens == 20
    assert engine.built.info["simulated_accept_len"] == 2.0, "server info must say so"
    assert engine.built.info["speculative_accept_rule"] == "simulated(match)"
    assert engine.scheduler.metrics.accept_length() == 2.0
    assert engine.scheduler.metrics.accept_rate() == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("variables", "options", "message"),
    [
        ({"SGLANG_SIMULATE_ACC_LEN": "2"}, NGRAM, "works with chains"),
        (
            {"SGLANG_SIMULATE_ACC_LEN": "2", "SGLANG_SIMULATE_ACC_METHOD": "half"},
            {"speculative_algorithm": "NEXTN"},
            "SGLANG_SIMULATE_ACC_METHOD='half'",
        ),
        ({}, NGRAM | {"speculative_accept_threshold_single": 0.5}, "work with chains"),
    ],
)
def test_rules_that_cannot_work_are_refused_at_start(
    target, monkeypatch, variables, options, message
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        InProcessEngine(target, **options, **SIZES)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
