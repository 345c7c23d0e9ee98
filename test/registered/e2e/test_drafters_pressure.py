"""Drafters under retraction, short pools, and stops inside accepted blocks.

Known faults F02, F33, F36, F57, F58, F59.
"""

from __future__ import annotations

import random

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.draft_checkpoints import make_draft_checkpoint
from sglang.test.engine_harness import InProcessEngine
from sglang.test.make_checkpoint import make_checkpoint

register_cpu_ci(est_time=25, suite="e2e")

CASES = {
    "mtp": {"speculative_algorithm": "NEXTN"},
    "adaptive": {"speculative_algorithm": "NEXTN", "speculative_adaptive": True},
    "mtp-tree": {
        "speculative_algorithm": "NEXTN",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 3,
        "speculative_num_draft_tokens": 8,
    },
    "ngram": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8},
    "dflash": {"speculative_algorithm": "DFLASH"},
    "dspark": {"speculative_algorithm": "DSPARK"},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    out = tmp_path_factory.mktemp("target") / "tiny"
    make_checkpoint(str(out), arch="qwen3_5", dtype="fp32", seed=7)
    return str(out)


def prompts(count=6, seed=3):
    rng = random.Random(seed)
    return [[rng.randrange(200) for _ in range(rng.randint(5, 90))] for _ in range(count)]


@pytest.fixture(scope="module")
def plain(target):
    engine = InProcessEngine(target, max_running_requests=8, page_size=64)
    return engine.generate(prompts(), max_new_tokens=60, ignore_eos=True)


def build(target, tmp_path, name, **sizes):
    options = dict(CASES[name])
    if name in ("dflash", "dspark"):
        options["speculative_draft_model_path"] = make_draft_checkpoint(
            str(tmp_path / name), kind=name, target_path=target
        )
    return InProcessEngine(target, max_running_requests=8, **options, **sizes)


@pytest.mark.parametrize("name", sorted(CASES))
def test_retracted_requests_lose_and_repeat_nothing(target, tmp_path, plain, name):
    """Six requests in a pool for four; draft state is rebuilt when one resumes."""
    engine = build(
        target, tmp_path, name, page_size=16, max_total_tokens=512, mamba_track_interval=64
    )
    assert engine.generate(prompts(), max_new_tokens=60, ignore_eos=True) == plain
    assert engine.scheduler.metrics.num_retracted > 0
    engine.run()


@pytest.mark.parametrize("name", ["ngram", "dspark"])
def test_requests_of_all_lengths_share_batches(target, tmp_path, plain, name):
    """Rows with and without drafts, finishing at different steps: each text is what it is alone."""
    engine = build(target, tmp_path, name, page_size=64)
    lengths = [1, 2, 9, 33, 60, 17]
    rids = [
        engine.submit(text, max_new_tokens=n, ignore_eos=True)
        for text, n in zip(prompts(), lengths, strict=True)
    ]
    engine.run()
    assert [engine.ids(rid) for rid in rids] == [
        text[:n] for text, n in zip(plain, lengths, strict=True)
    ]


def test_a_stop_anywhere_in_an_accepted_block_ends_there(target, tmp_path, plain):
    """Everything was seen before, so whole blocks are accepted; the stop falls at each place."""
    engine = build(target, tmp_path, "ngram", page_size=64)
    text, out = prompts()[0], plain[0]
    engine.generate([text], max_new_tokens=60, ignore_eos=True)
    steps = 0
    for place in range(1, 20):
        stop = out[place]
        rid = engine.submit(text, max_new_tokens=60, stop_token_ids=[stop], ignore_eos=True)
        engine.run()
        wanted = out[: out.index(stop) + 1]
        last = engine.last(rid)
        assert engine.ids(rid) == wanted
        assert last.completion_tokens == len(wanted)
        assert (last.finish_reason.type, last.finish_reason.matched) == ("stop", stop)
        steps += last.spec_verify_ct
    assert steps < 19 * 4, "blocks were not accepted whole; the test would show nothing"


def test_never_more_than_max_new_tokens(target, tmp_path, plain):
    engine = build(target, tmp_path, "ngram", page_size=64)
    text = prompts()[0]
    engine.generate([text], max_new_tokens=60, ignore_eos=True)
    for count in range(1, 17):
        (got,) = engine.generate([text], max_new_tokens=count, ignore_eos=True)
        assert got == plain[0][:count]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
