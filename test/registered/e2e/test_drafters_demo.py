"""Every drafter on the bundled model: the plain text, and drafts that are worth their cost."""

from __future__ import annotations

import pytest
import torch

from sglang.bundled import resolve_model_path
from sglang.srt.managers.tokenizer import Tokenizer
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.engine_harness import InProcessEngine

register_cpu_ci(est_time=60, suite="e2e")

PROMPTS = (
    "It was a fine morning, and the whole party",
    "The function returns a list of all the",
    "In the beginning of the year, the Government of the United States",
    "To create a new table, use the following",
    "The captain of the ship stood upon the deck and",
    "My dear sir, I have the honour to",
)
# Least mean accept length on these prompts: well below the model card's figures for held-out text,
# well above 1, which is what a drafter that reads wrong features or positions reaches.
CASES = {
    "mtp": ({"speculative_algorithm": "NEXTN", "speculative_num_steps": 3}, 2.0),
    "mtp-tree": (
        {
            "speculative_algorithm": "NEXTN",
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 2,
            "speculative_num_draft_tokens": 8,
        },
        2.0,
    ),
    "dflash": (
        {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": "demo-dflash"},
        1.6,
    ),
    "dspark": (
        {"speculative_algorithm": "DSPARK", "speculative_draft_model_path": "demo-dspark"},
        1.8,
    ),
    "ngram": ({"speculative_algorithm": "NGRAM"}, 1.2),
}
CHAINS = ("mtp", "dflash", "dspark")
SIZES = {"max_running_requests": 8, "page_size": 64, "dtype": "float32"}
NUM_NEW = 72


@pytest.fixture(scope="module")
def prompt_ids():
    tokenizer = Tokenizer(resolve_model_path("demo"))
    return [tokenizer.encode(text) for text in PROMPTS]


@pytest.fixture(scope="module")
def plain(prompt_ids):
    engine = InProcessEngine("demo", **SIZES)
    rids = [
        engine.submit(
            ids, max_new_tokens=NUM_NEW, ignore_eos=True, return_logprob=True, top_logprobs_num=2
        )
        for ids in prompt_ids
    ]
    engine.run()
    margins = [
        [x.top[0][0] - x.top[1][0] for item in engine.outputs[rid] for x in item.output_logprobs]
        for rid in rids
    ]
    return [engine.ids(rid) for rid in rids], margins


@pytest.mark.parametrize("name", sorted(CASES))
def test_text_is_plain_and_drafts_are_accepted(prompt_ids, plain, name):
    options, least = CASES[name]
    engine = InProcessEngine("demo", **SIZES, **options)
    rids = [engine.submit(ids, max_new_tokens=NUM_NEW, ignore_eos=True) for ids in prompt_ids]
    engine.run()
    for rid, wanted, margins in zip(rids, *plain, strict=True):
        got = engine.ids(rid)
        first = next((i for i, (a, b) in enumerate(zip(got, wanted)) if a != b), None)
        assert first is None or margins[first] < 1e-3, (name, first)
    last = [engine.last(rid) for rid in rids]
    mean = sum(x.spec_accepted_tokens for x in last) / sum(x.spec_verify_ct for x in last)
    print(f"{name}: accept length {mean:.2f}")
    assert mean >= least


@pytest.mark.parametrize("name", CHAINS)
def test_lossless_equals_default_with_real_acceptance(prompt_ids, name):
    """F04: over 400 tokens, ids and pools after every step, with the accept lengths that drafts have;
    half of the requests sample."""
    engines = [
        InProcessEngine("demo", enable_linear_lossless_verify=lossless, **SIZES, **CASES[name][0])
        for lossless in (False, True)
    ]
    for engine in engines:
        for i, ids in enumerate(prompt_ids):
            engine.submit(
                ids,
                max_new_tokens=NUM_NEW,
                ignore_eos=True,
                temperature=0.7 * (i % 2),
                sampling_seed=i,
            )
    compared = 0
    while not all(engine.scheduler.is_idle for engine in engines):
        for engine in engines:
            engine.scheduler.step()
        first, second = (engine.state_tensors() for engine in engines)
        assert all(torch.equal(first[key], second[key]) for key in first), compared
        compared += 1
    rids = [f"r{i}" for i in range(len(prompt_ids))]
    assert [engines[0].ids(r) for r in rids] == [engines[1].ids(r) for r in rids]
    assert compared > 20 and sum(len(engines[0].ids(r)) for r in rids) >= 400


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
