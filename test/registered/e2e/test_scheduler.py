"""Continuous batching, admission, retraction, finish rules and logprobs, without HTTP.

Known faults F01, F02, F25 to F37, F57 to F61, F65 to F73.
"""

from __future__ import annotations

import random

import pytest
import torch

from sglang.srt.managers.io_struct import AbortReq, FlushCacheReqInput, FlushCacheReqOutput
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.engine_harness import InProcessEngine
from sglang.test.make_checkpoint import make_checkpoint

register_cpu_ci(est_time=90, suite="e2e")

SPEC = {"speculative_algorithm": "NEXTN", "enable_linear_lossless_verify": True}
MODES = [{}, SPEC]
MODE_IDS = ["plain", "mtp-lossless"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    out = tmp_path_factory.mktemp("ckpt") / "tiny"
    make_checkpoint(str(out), arch="qwen3_5", dtype="fp32", seed=11)
    return str(out)


def prompts(count, low=5, high=60, seed=3):
    rng = random.Random(seed)
    return [[rng.randrange(200) for _ in range(rng.randint(low, high))] for _ in range(count)]


@pytest.fixture(scope="module")
def alone(checkpoint):
    """Reference: greedy, no speculation, no prefix cache, one request at a time."""
    engine = InProcessEngine(checkpoint, disable_radix_cache=True)
    return [engine.generate([p], max_new_tokens=48, ignore_eos=True)[0] for p in prompts(6)]


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
@pytest.mark.parametrize("chunk", [16, 2048], ids=["chunked", "whole"])
def test_batched_equals_alone(checkpoint, alone, mode, chunk):
    """F02, F06: a batch, chunked or not, speculated or not, gives what each request gives alone."""
    engine = InProcessEngine(checkpoint, chunked_prefill_size=chunk, **mode)
    assert engine.generate(prompts(6), max_new_tokens=48, ignore_eos=True) == alone


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_requests_that_end_at_different_steps(checkpoint, alone, mode):
    """F35: rows are vacated and reused while others run."""
    engine = InProcessEngine(checkpoint, max_running_requests=3, **mode)
    lengths = [3, 48, 10, 25, 1, 30]
    rids = [
        engine.submit(p, max_new_tokens=n, ignore_eos=True)
        for p, n in zip(prompts(6), lengths, strict=True)
    ]
    engine.run()
    assert [engine.ids(r) for r in rids] == [ids[:n] for ids, n in zip(alone, lengths, strict=True)]


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
@pytest.mark.parametrize("page_size", [1, 64])
def test_retraction_loses_and_repeats_nothing(checkpoint, alone, mode, page_size):
    """F32, F33: a pool too small for all requests sends some back to the queue."""
    strategy = "extra_buffer" if page_size > 1 else "auto"
    total = 64 * 7 if page_size > 1 else 330
    engine = InProcessEngine(
        checkpoint,
        max_total_tokens=total,
        page_size=page_size,
        mamba_radix_cache_strategy=strategy,
        schedule_conservativeness=0.01,
        **mode,
    )
    assert engine.generate(prompts(6), max_new_tokens=48, ignore_eos=True) == alone
    assert engine.scheduler.metrics.num_retracted > 0


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_many_short_requests_leak_nothing(checkpoint, mode):
    """F25 to F27, F36, F37: after 300 requests, some aborted at random times, a flush restores all."""
    engine = InProcessEngine(checkpoint, max_total_tokens=1024, max_running_requests=4, **mode)
    memory = engine.built.memory
    start = memory.available_tokens()
    rng = random.Random(5)
    for round_id in range(60):
        rids = [
            engine.submit(p, max_new_tokens=rng.randint(1, 6))
            for p in prompts(5, seed=rng.random())
        ]
        for _ in range(rng.randint(0, 6)):
            engine.scheduler.step()
        engine.scheduler.handle(AbortReq(rid=rng.choice(rids)))
        if round_id % 7 == 0:
            engine.scheduler.handle(AbortReq(abort_all=True))
        engine.run()
    engine.scheduler.handle(FlushCacheReqInput(req_id="f"))
    assert isinstance(engine.messages[-1], FlushCacheReqOutput) and engine.messages[-1].success
    assert memory.available_tokens() == start
    assert memory.stats()["states_used"] == memory.stats()["states_cached"] == 0


@pytest.mark.parametrize("position", range(12))
def test_an_end_token_at_any_position_of_a_block(checkpoint, alone, position):
    """F58: declare an emitted token the end token and run again."""
    engine = InProcessEngine(checkpoint, **SPEC)
    stop = alone[0][position]
    rid = engine.submit(prompts(6)[0], max_new_tokens=48, stop_token_ids=[stop])
    engine.run()
    assert engine.ids(rid) == alone[0][: alone[0].index(stop) + 1]
    assert engine.last(rid).finish_reason.matched == stop
    assert engine.last(rid).completion_tokens == alone[0].index(stop) + 1


@pytest.mark.parametrize("limit", range(1, 9))
def test_length_limit_at_every_value(checkpoint, alone, limit):
    """F59: never more than max_new_tokens, for 1 to twice the draft width."""
    engine = InProcessEngine(checkpoint, **SPEC)
    rid = engine.submit(prompts(6)[0], max_new_tokens=limit, ignore_eos=True)
    engine.run()
    assert engine.ids(rid) == alone[0][:limit]
    assert engine.last(rid).finish_reason.type == "length"


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8, "sampling_seed": 5},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "sampling_seed": 6},
        {"temperature": 0.0, "frequency_penalty": 0.7, "presence_penalty": 0.3},
        {"temperature": 0.9, "repetition_penalty": 1.3, "sampling_seed": 9, "min_p": 0.02},
    ],
    ids=["temperature", "top-k-p", "penalties", "repetition"],
)
def test_sampling_is_the_same_with_speculation(checkpoint, options):
    """F65, F66, F70: seeds, filters and penalties give the same text with and without drafts."""
    outputs = []
    for mode in MODES:
        engine = InProcessEngine(checkpoint, **mode)
        outputs.append(engine.generate(prompts(4), max_new_tokens=40, ignore_eos=True, **options))
    assert outputs[0] == outputs[1]
    if options.get("temperature"):
        again = InProcessEngine(checkpoint).generate(
            prompts(4), max_new_tokens=40, ignore_eos=True, **(options | {"sampling_seed": 1234})
        )
        assert again != outputs[0]


def test_logprobs_are_the_targets_and_complete(checkpoint):
    """F68, F73: output and prompt log probabilities agree with and without speculation and cache."""
    text = prompts(1, 80, 80)[0]
    seen = []
    for mode in MODES:
        engine = InProcessEngine(checkpoint, **mode)
        engine.generate([text], max_new_tokens=8, ignore_eos=True)
        for start in (0, 1, 40):
            rid = engine.submit(
                text,
                max_new_tokens=8,
                ignore_eos=True,
                return_logprob=True,
                logprob_start_len=start,
                top_logprobs_num=2,
            )
            engine.run()
            items = engine.outputs[rid]
            prompt = items[0].input_logprobs
            output = [p for item in items for p in item.output_logprobs]
            assert [p.token_id for p in prompt] == text[start:]
            assert [p.token_id for p in output] == engine.ids(rid)
            assert (prompt[0].logprob is None) == (start == 0)
            seen.append((prompt, output))
    values = [torch.tensor([p.logprob for p in prompt[-30:] + output]) for prompt, output in seen]
    for other in values[1:]:
        torch.testing.assert_close(other, values[0], atol=1e-4, rtol=1e-4)


def test_a_prompt_retracted_half_way_is_scored_once(checkpoint):
    """Catches prompt log probabilities that a retraction in the middle of the prompt doubles."""
    text = prompts(1, 80, 80)[0]
    engine = InProcessEngine(checkpoint, chunked_prefill_size=16, disable_radix_cache=True)
    rid = engine.submit(
        text, max_new_tokens=2, ignore_eos=True, return_logprob=True, logprob_start_len=0
    )
    engine.scheduler.step()
    engine.scheduler.step()
    engine.scheduler._retract(engine.scheduler.prefilling[0], engine.scheduler.prefilling)
    engine.run()
    assert [p.token_id for p in engine.outputs[rid][0].input_logprobs] == text


def test_oversized_and_bad_requests_disturb_nobody(checkpoint, alone):
    """F89, F90: a refused request gets its reason; the running one never notices."""
    engine = InProcessEngine(checkpoint, max_total_tokens=512, **SPEC)
    good = engine.submit(prompts(6)[0], max_new_tokens=48, ignore_eos=True)
    engine.scheduler.step()
    empty = engine.submit([], max_new_tokens=4)
    long = engine.submit([1] * 600, max_new_tokens=4)
    wild = engine.submit([10**6], max_new_tokens=4)
    engine.run()
    assert engine.ids(good) == alone[0]
    for rid, word in ((empty, "empty"), (long, "600"), (wild, "1000000")):
        reason = engine.last(rid).finish_reason
        assert reason.type == "abort" and reason.status_code == 400 and word in reason.message


@pytest.mark.parametrize("mode", MODES, ids=MODE_IDS)
def test_a_context_that_serves_nobody_is_refused(checkpoint, mode):
    """F90: a server that could take no prompt says so by the flag's name; one token more works."""
    with pytest.raises(ValueError, match="--context-length must be at least 2, got 1"):
        InProcessEngine(checkpoint, context_length=1, **mode)
    engine = InProcessEngine(checkpoint, context_length=2, **mode)
    assert len(engine.generate([[5]], max_new_tokens=4, ignore_eos=True)[0]) == 1


def test_a_pool_that_serves_nobody_is_refused(checkpoint):
    """F90: a pool of one step's rows and one token has no room for an answer; one page more works."""
    tiny = {"page_size": 1, "mamba_radix_cache_strategy": "no_buffer"}
    with pytest.raises(ValueError, match="KV cache of 5 tokens .* raise --max-total-tokens"):
        InProcessEngine(checkpoint, max_total_tokens=5, **tiny, **SPEC)
    engine = InProcessEngine(checkpoint, max_total_tokens=6, **tiny, **SPEC)
    assert len(engine.generate([[5]], max_new_tokens=4, ignore_eos=True)[0]) == 1


def test_a_plan_for_another_machine_is_refused(checkpoint):
    """F44: pools that this machine cannot hold are refused by the flag, not by an allocator."""
    wish = {"device_memory_gb": 8e6, "max_total_tokens": 10**10}
    with pytest.raises(ValueError, match="--device-memory-gb 8e.06: .* this machine has"):
        InProcessEngine(checkpoint, **wish)


def test_queue_limit_answers_503(checkpoint):
    """F93: every request over the queue limit gets an answer."""
    engine = InProcessEngine(checkpoint, max_queued_requests=2)
    rids = [engine.submit(p, max_new_tokens=2) for p in prompts(4)]
    engine.run()
    codes = [engine.last(r).finish_reason.status_code for r in rids]
    assert codes == [None, None, 503, 503]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
