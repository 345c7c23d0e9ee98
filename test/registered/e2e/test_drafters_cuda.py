"""Every drafter on a GPU: the text of plain decoding, lossless equal to default, worthwhile drafts.

Known faults F04, F06. The CPU's counterpart is test_drafters_demo.py.
"""

from __future__ import annotations

import gc

import pytest
import torch

from sglang.bundled import resolve_model_path
from sglang.srt.managers.tokenizer import Tokenizer
from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.engine_harness import InProcessEngine

register_cuda_ci(est_time=120, stage="base-b", runner_config="1-gpu-large")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

PROMPTS = (
    "It was a fine morning, and the whole party",
    "The function returns a list of all the",
    "In the beginning of the year, the Government of the United States",
    "To create a new table, use the following",
)
CHAINS = {
    "mtp": ({"speculative_algorithm": "NEXTN", "speculative_num_steps": 3}, 1.8),
    "dflash": (
        {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": "demo-dflash"},
        1.5,
    ),
    "dspark": (
        {"speculative_algorithm": "DSPARK", "speculative_draft_model_path": "demo-dspark"},
        1.6,
    ),
}
TREES = {
    "mtp-tree": (
        {
            "speculative_algorithm": "NEXTN",
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 2,
            "speculative_num_draft_tokens": 8,
        },
        1.8,
    ),
    "ngram": ({"speculative_algorithm": "NGRAM"}, 1.1),
}
CASES = CHAINS | TREES
SIZES = {
    "device": "cuda",
    "device_memory_gb": 8.0,
    "max_running_requests": 8,
    "max_mamba_cache_size": 64,
    "page_size": 64,
    "max_total_tokens": 8192,
}
NUM_NEW = 128
NEAR_TIE = 0.13  # two steps of bf16 where the logits lie (8 to 16), and a little


@pytest.fixture(autouse=True)
def earlier_engines_are_gone():
    """An engine is part of cycles, so its pools go with a collection, not with its name."""
    gc.collect()
    torch.cuda.empty_cache()


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
def test_text_is_plain_up_to_near_ties(prompt_ids, plain, name):
    options, least = CASES[name]
    engine = InProcessEngine("demo", **SIZES, **options)
    rids = [engine.submit(ids, max_new_tokens=NUM_NEW, ignore_eos=True) for ids in prompt_ids]
    engine.run()
    for rid, wanted, margins in zip(rids, *plain, strict=True):
        got = engine.ids(rid)
        first = next((i for i, (a, b) in enumerate(zip(got, wanted)) if a != b), None)
        assert first is None or margins[first] < NEAR_TIE, (name, first)
    last = [engine.last(rid) for rid in rids]
    mean = sum(x.spec_accepted_tokens for x in last) / sum(x.spec_verify_ct for x in last)
    print(f"{name}: accept length {mean:.2f}")
    assert mean >= least


@pytest.mark.parametrize("name", sorted(CHAINS))
def test_lossless_equals_default_bit_for_bit(prompt_ids, name):
    """Ids and pools after every step; half of the requests sample."""
    engines = [
        InProcessEngine("demo", enable_linear_lossless_verify=lossless, **SIZES, **CHAINS[name][0])
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
    assert compared > 20


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
