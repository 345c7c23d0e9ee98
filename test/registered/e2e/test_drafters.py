"""Block drafters and the MTP chain in the engine: same text, right drafts, right draft KV.

Known faults F02, F04, F06, F13, F68. Oracles: a drafter computed from the checkpoint's tensors alone
(sglang.test.draft_reference), and one-shot against incremental draft KV.
"""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import load_file

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.draft_checkpoints import DraftGeometry, make_draft_checkpoint
from sglang.test.draft_reference import DraftReference
from sglang.test.engine_harness import InProcessEngine
from sglang.test.make_checkpoint import make_checkpoint

register_cpu_ci(est_time=45, suite="e2e")

CASES = {
    "dflash": ("dflash", DraftGeometry()),
    "dflash-window": ("dflash", DraftGeometry(sliding_window=9, is_causal=True)),
    "dflash2": ("dflash2", DraftGeometry(block_size=5, is_causal=False)),
    "dspark": ("dspark", DraftGeometry()),
    "dspark-gated": ("dspark", DraftGeometry(markov_head_type="gated", sliding_window=17)),
    "dspark-rnn": ("dspark", DraftGeometry(markov_head_type="rnn", sample_from_anchor=False)),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    out = tmp_path_factory.mktemp("target") / "tiny"
    make_checkpoint(str(out), arch="qwen3_5", dtype="fp32", seed=7)
    return str(out)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory, target):
    root = tmp_path_factory.mktemp("drafts")
    return {
        name: make_draft_checkpoint(
            str(root / name),
            kind=kind,
            target_path=target,
            geometry=geometry,
            prefix="model." if name == "dflash-window" else "",
        )
        for name, (kind, geometry) in CASES.items()
    }


def prompts(count=5, low=5, high=90, seed=3):
    rng = random.Random(seed)
    return [[rng.randrange(200) for _ in range(rng.randint(low, high))] for _ in range(count)]


def block_engine(target, drafts, name, **options):
    return InProcessEngine(
        target,
        speculative_algorithm="DSPARK" if name.startswith("dspark") else "DFLASH",
        speculative_draft_model_path=drafts[name],
        **({"max_running_requests": 8, "page_size": 64} | options),
    )


@pytest.fixture(scope="module")
def plain(target):
    engine = InProcessEngine(target, max_running_requests=8, page_size=64)
    greedy = engine.generate(prompts(), max_new_tokens=24, ignore_eos=True)
    sampled = engine.generate(
        prompts(), max_new_tokens=24, ignore_eos=True, temperature=0.9, sampling_seed=5
    )
    return greedy, sampled


@pytest.mark.parametrize("name", sorted(CASES))
def test_greedy_text_equals_no_speculation_and_lossless_equals_default(target, drafts, plain, name):
    """Also in the pools, after every commit."""
    engines = [
        block_engine(target, drafts, name, enable_linear_lossless_verify=lossless)
        for lossless in (False, True)
    ]
    for engine in engines:
        for text in prompts():
            engine.submit(text, max_new_tokens=24, ignore_eos=True)
    compared = 0
    while not all(engine.scheduler.is_idle for engine in engines):
        for engine in engines:
            engine.scheduler.step()
        first, second = (engine.state_tensors() for engine in engines)
        assert all(torch.equal(first[key], second[key]) for key in first)
        compared += 1
    assert compared > 10
    for engine in engines:
        assert [engine.ids(f"r{i}") for i in range(5)] == plain[0]


@pytest.mark.parametrize("name", ["dflash", "dflash2", "dspark"])
def test_sampled_text_repeats_with_the_seed(target, drafts, plain, name):
    """DFLASH matches the target's own draws, so its text is that of no speculation; the others
    accept by probabilities and repeat themselves."""
    options = {
        "max_new_tokens": 24, "ignore_eos": True, "temperature": 0.9, "sampling_seed": 5,
    }  # fmt: skip
    engine = block_engine(target, drafts, name)
    first = engine.generate(prompts(), **options)
    again = engine.generate(prompts(), **options)
    assert first == again
    if name == "dflash":
        assert first == plain[1]


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("mtp", "speculative_use_rejection_sampling"),
        ("mtp", "speculative_use_block_verification"),
        ("dflash", "speculative_use_block_verification"),
        ("dflash2", "speculative_use_block_verification"),
        ("dspark", "speculative_use_block_verification"),
    ],
)
def test_every_rule_serves_greedy_and_sampled_requests_together(target, drafts, plain, name, flag):
    """F72: greedy requests keep the plain text beside sampled ones, whose text repeats."""
    options = {flag: True, "enable_linear_lossless_verify": True}
    if name == "mtp":
        engine = InProcessEngine(
            target, speculative_algorithm="NEXTN", max_running_requests=8, page_size=64, **options
        )
    else:
        engine = block_engine(target, drafts, name, **options)
    sampled = []
    for _ in range(2):
        rids = []
        for i, text in enumerate(prompts()):
            temperature = 0.0 if i % 2 else 0.8
            rids.append(
                engine.submit(
                    text,
                    max_new_tokens=24,
                    ignore_eos=True,
                    temperature=temperature,
                    sampling_seed=9,
                )
            )
        engine.run()
        got = [engine.ids(rid) for rid in rids]
        assert got[1::2] == plain[0][1::2]
        sampled.append(got[::2])
    assert sampled[0] == sampled[1]


def test_greedy_draft_mode_of_dspark_keeps_the_text_of_a_seed(target, drafts, plain, monkeypatch):
    """SGLANG_DSPARK_USE_GREEDY_DRAFT: drafts are certain, so the target's own draws decide."""
    monkeypatch.setenv("SGLANG_DSPARK_USE_GREEDY_DRAFT", "1")
    engine = block_engine(target, drafts, "dspark")
    options = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 0.9, "sampling_seed": 5}
    assert engine.generate(prompts(), **options) == plain[1]


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_penalties_and_minimum_length_count_the_drafts(target, drafts, name):
    """F65, F60: every draft row is edited with the drafts before it, as plain decoding does."""
    options = {
        "max_new_tokens": 20, "ignore_eos": True,
        "frequency_penalty": 0.8, "presence_penalty": 0.3, "repetition_penalty": 1.3,
        "logit_bias": {17: 2.0}, "min_new_tokens": 7,
    }  # fmt: skip
    plain = InProcessEngine(target, max_running_requests=8, page_size=64)
    expected = plain.generate(prompts(), **options)
    assert block_engine(target, drafts, name).generate(prompts(), **options) == expected


def test_lossy_thresholds_accept_more_and_leave_greedy_alone(target, plain):
    """The documented lossy rule: with a single threshold of 0 nearly every draft is taken."""
    engines = [
        InProcessEngine(
            target,
            speculative_algorithm="NEXTN",
            speculative_accept_threshold_single=single,
            max_running_requests=8,
            page_size=64,
        )
        for single in (0.0, 1.0)
    ]
    assert engines[0].generate(prompts(), max_new_tokens=24, ignore_eos=True) == plain[0]
    steps = []
    for engine in engines:
        rids = [
            engine.submit(text, max_new_tokens=24, ignore_eos=True, temperature=1.0)
            for text in prompts()
        ]
        engine.run()
        steps.append(sum(engine.last(rid).spec_verify_ct for rid in rids))
    assert steps[0] * 2 < steps[1]


def reference(directory, target):
    weights = load_file(f"{target}/model.safetensors")
    return DraftReference(
        directory, weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    )


def record_calls(engine, taps=True):
    """Remember every proposal and the taps of every prefill."""
    drafter = engine.built.worker._drafter
    propose, after_prefill = drafter.propose, drafter.after_prefill
    proposals, seen = [], []

    def spy_propose(batch):
        proposal = propose(batch)
        proposals.append((batch.prefix_lens[0], int(batch.bonus[0]), proposal.tokens[0].tolist()))
        return proposal

    def spy_prefill(fb, output, next_ids):
        seen.append(output.taps.clone())
        after_prefill(fb, output, next_ids)

    drafter.propose = spy_propose
    if taps:
        drafter.after_prefill = spy_prefill
    return proposals, seen


@pytest.mark.parametrize("name", sorted(CASES))
def test_drafts_equal_the_reference_drafter(target, drafts, name):
    """Every step's drafts, from incremental context KV, equal those of the whole context at once."""
    text = prompts(1, 40, 41)[0]
    engine = block_engine(target, drafts, name, chunked_prefill_size=64)
    proposals, _ = record_calls(engine)
    (out,) = engine.generate([text], max_new_tokens=12, ignore_eos=True)
    whole = block_engine(target, drafts, name)
    _, taps = record_calls(whole)
    whole.generate([text + out], max_new_tokens=1, ignore_eos=True)
    oracle = reference(drafts[name], target)
    compute = oracle.dspark if name.startswith("dspark") else oracle.dflash
    assert len(proposals) >= 5
    for length, bonus, tokens in proposals:
        assert tokens == compute(taps[0][:length], bonus), (name, length)


def test_context_kv_written_in_pieces_equals_one_shot(target, drafts):
    """Chunked prefill and verify commits leave the rows that one pass over all tokens writes."""
    text = prompts(1, 150, 151)[0]
    engine = block_engine(target, drafts, "dflash", chunked_prefill_size=64)
    snapshots = []
    drafter = engine.built.worker._drafter
    after_verify = drafter.after_verify

    def spy(fb, output, targets, num_correct):
        after_verify(fb, output, targets, num_correct)
        length = fb.prefix_lens_cpu[0] + num_correct[0] + 1
        slots = engine.built.pools.req_pool.req_to_token[fb.req_pool_indices[0], :length].long()
        pool = engine.built.pools.draft_kv_pool
        snapshots.append([k[slots].clone() for k in (*pool.k_buffer, *pool.v_buffer)])

    drafter.after_verify = spy
    (out,) = engine.generate([text], max_new_tokens=20, ignore_eos=True)
    whole = block_engine(target, drafts, "dflash")
    _, taps = record_calls(whole)
    whole.generate([text + out], max_new_tokens=1, ignore_eos=True)
    context = reference(drafts["dflash"], target).context(taps[0])
    wanted = [k for k, _ in context] + [v for _, v in context]
    assert len(snapshots) > 5
    for snapshot in snapshots:
        for got, want in zip(snapshot, wanted, strict=True):
            torch.testing.assert_close(got, want[: len(got)], atol=2e-4, rtol=1e-4)


def test_prefix_hit_drafts_like_a_cold_run(target, drafts):
    """Draft KV is shared through the prefix cache: a resumed prompt proposes the same drafts."""
    text = prompts(1, 150, 151)[0]
    engine = block_engine(target, drafts, "dspark")
    proposals, _ = record_calls(engine)
    engine.generate([text], max_new_tokens=8, ignore_eos=True)
    cold = list(proposals)
    proposals.clear()
    rid = engine.submit(text, max_new_tokens=8, ignore_eos=True)
    engine.run()
    assert engine.last(rid).cached_tokens > 0
    assert proposals == cold


def test_mtp_draft_kv_written_in_pieces_equals_one_shot(target):
    """After any accept pattern the MTP rows below L equal those of one pass over the same tokens."""
    text = prompts(1, 150, 151)[0]
    spec = {"speculative_algorithm": "NEXTN", "max_running_requests": 8, "page_size": 64}
    engine = InProcessEngine(target, chunked_prefill_size=64, **spec)
    lengths = record_mtp_rows(engine)
    (out,) = engine.generate([text], max_new_tokens=20, ignore_eos=True)
    whole = InProcessEngine(target, **spec)
    once = record_mtp_rows(whole)
    whole.generate([text + out[:-1]], max_new_tokens=2, ignore_eos=True)
    assert len(lengths) > 5
    longest = once[0]
    for rows in lengths:
        for got, want in zip(rows, longest, strict=True):
            count = min(len(got), len(want))
            torch.testing.assert_close(got[:count], want[:count], atol=2e-4, rtol=1e-4)


def record_mtp_rows(engine):
    """Draft KV of the committed rows of request 0 after every verify."""
    drafter, snapshots = engine.built.worker._drafter, []
    after_verify = drafter.after_verify

    def spy(fb, output, targets, num_correct):
        after_verify(fb, output, targets, num_correct)
        length = fb.prefix_lens_cpu[0] + num_correct[0] + 1
        slots = engine.built.pools.req_pool.req_to_token[fb.req_pool_indices[0], :length].long()
        pool = engine.built.pools.draft_kv_pool
        snapshots.append([k[slots].clone() for k in (*pool.k_buffer, *pool.v_buffer)])

    drafter.after_verify = spy
    return snapshots


def test_mtp_block_of_another_checkpoint(target, plain, tmp_path):
    """A target without the block drafts exactly as one that has it."""
    bare = tmp_path / "bare"
    make_checkpoint(str(bare), arch="qwen3_5", dtype="fp32", seed=7, mtp=False)
    spec = {"speculative_algorithm": "NEXTN", "max_running_requests": 8, "page_size": 64}
    own = InProcessEngine(target, **spec)
    other = InProcessEngine(str(bare), speculative_draft_model_path=target, **spec)
    drafts = []
    for engine in (own, other):
        proposals = record_calls(engine, taps=False)[0]
        assert engine.generate(prompts(), max_new_tokens=24, ignore_eos=True) == plain[0]
        drafts.append(proposals)
    assert drafts[0] == drafts[1]
    make_checkpoint(str(tmp_path / "moe"), arch="qwen3_5", dtype="fp8", seed=7)
    with pytest.raises(ValueError, match="hidden_size 256 instead of 128"):
        InProcessEngine(str(bare), speculative_draft_model_path=str(tmp_path / "moe"), **spec)


@pytest.mark.parametrize("algorithm", ["NEXTN", "DFLASH", "DSPARK"])
def test_logprobs_are_the_targets_own(target, drafts, algorithm):
    """Accepted tokens carry the same log probabilities as without speculation."""
    text = prompts(1, 30, 31)[0]
    options = {"max_new_tokens": 10, "ignore_eos": True, "return_logprob": True}

    def run(**extra):
        engine = InProcessEngine(target, max_running_requests=8, page_size=64, **extra)
        rid = engine.submit(text, **options)
        engine.run()
        return [x for item in engine.outputs[rid] for x in item.output_logprobs]

    extra = {"speculative_algorithm": algorithm}
    if algorithm != "NEXTN":
        extra["speculative_draft_model_path"] = drafts[algorithm.lower()]
    plain, spec = run(), run(**extra)
    assert [x.token_id for x in plain] == [x.token_id for x in spec]
    for one, other in zip(plain, spec, strict=True):
        assert abs(one.logprob - other.logprob) < 1e-3


def test_draft_for_another_target_is_refused_by_name(target, drafts, tmp_path):
    make_draft_checkpoint(
        str(tmp_path / "bad"),
        kind="dflash",
        target_path=target,
        geometry=DraftGeometry(target_layer_ids=(0, 3)),
    )
    with pytest.raises(ValueError, match="target_layer_ids"):
        block_engine(target, {"dflash": str(tmp_path / "bad")}, "dflash")
    with pytest.raises(ValueError, match="drafter for DSPARK"):
        block_engine(target, {"dflash": drafts["dspark"]}, "dflash")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
