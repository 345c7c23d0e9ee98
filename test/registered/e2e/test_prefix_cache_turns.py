"""Conversations over the real engine: what a second turn resumes from, and what server info promises.

Catches: a boundary state that depends on the acceptance pattern or on the kind of scratch (F13, F14),
a state of another chunk (F15), a hit that writes to the state it reads (F18), siblings that miss or
share (F20, F22), runs that do not repeat (F24), promised sizes that do not hold (F29, F44).
"""

from __future__ import annotations

import random

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.draft_checkpoints import DraftGeometry, make_draft_checkpoint
from sglang.test.engine_harness import InProcessEngine
from sglang.test.make_checkpoint import make_checkpoint

register_cpu_ci(est_time=60, suite="e2e")

WIDTH = 4
PLAIN = {"page_size": 64, "mamba_radix_cache_strategy": "extra_buffer", "max_running_requests": 4}
SPEC = PLAIN | {
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": WIDTH - 1,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": WIDTH,
}
PATTERNS = {
    "none": lambda req, step: 0,
    "one": lambda req, step: 1,
    "two": lambda req, step: 2,
    "all": lambda req, step: 3,
    "cycle": lambda req, step: step % WIDTH,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    out = tmp_path_factory.mktemp("ckpt") / "tiny"
    make_checkpoint(str(out), arch="qwen3_5", dtype="fp32", seed=11)
    return str(out)


def prompt_of(length, seed):
    rng = random.Random(seed)
    return [rng.randrange(200) for _ in range(length)]


def draft_of(checkpoint, folder, algorithm):
    """Path of a drafter with random weights."""
    return make_draft_checkpoint(
        str(folder / "draft"),
        kind=algorithm.lower(),
        target_path=checkpoint,
        geometry=DraftGeometry(),
    )


def states_by_length(engine):
    """Copies of every state in the tree, under the number of tokens it has consumed."""
    tensors = engine.state_tensors()
    return {
        node.end: {name: t[:, node.state_slot].clone() for name, t in tensors.items()}
        for node in engine.built.memory._tree.nodes()
        if node.state_slot >= 0
    }


def assert_equal_states(found, want):
    for name, tensor in found.items():
        assert torch.equal(tensor, want[name]), name


def turn(engine, text, num_new, expected=None):
    """One request; returns its output and the cached length that it reports."""
    rid = engine.submit(text, max_new_tokens=num_new, ignore_eos=True)
    if expected is not None:
        engine.scripted.expected[rid] = text + expected
    engine.run()
    return engine.ids(rid), engine.last(rid).cached_tokens


@pytest.fixture(scope="module")
def cold(checkpoint):
    """Two turns without speculation and without a cache."""
    engine = InProcessEngine(checkpoint, disable_radix_cache=True)
    text = prompt_of(180, 1)
    first, _ = turn(engine, text, 520)
    follow_up = text + first + prompt_of(9, 8)
    second, cached = turn(engine, follow_up, 24)
    assert cached == 0
    return text, first, follow_up, second


@pytest.mark.parametrize("pattern", PATTERNS)
def test_turns_of_every_acceptance_pattern(checkpoint, cold, pattern):
    """700 tokens pass 256 and 512; the second turn resumes at 512, the same bits in both modes."""
    text, first, follow_up, second = cold
    states = []
    for lossless in (False, True):
        engine = InProcessEngine(
            checkpoint,
            accept_plan=PATTERNS[pattern],
            enable_linear_lossless_verify=lossless,
            **SPEC,
        )
        assert turn(engine, text, 520, first) == (first, 0)
        states.append(states_by_length(engine))
        assert turn(engine, follow_up, 24, second) == (second, 512)
        states[-1] |= {-1: states_by_length(engine)[512]}
    default, lossless = states
    assert set(default) == set(lossless) and 512 in default
    for length, state in default.items():
        assert_equal_states(state, lossless[length])
    assert_equal_states(default[512], default[-1])


@pytest.mark.parametrize("algorithm", ["DFLASH", "DSPARK", "NGRAM"])
def test_boundary_states_of_every_algorithm(checkpoint, tmp_path, algorithm):
    """F14: block drafts accepted up to every position, and trees: plain decoding's states, bit for bit."""
    options = PLAIN | {"mamba_track_interval": 64}
    text = prompt_of(10, 4) * 4
    engine = InProcessEngine(checkpoint, **options)
    out, _ = turn(engine, text, 130)
    want = states_by_length(engine)
    options["speculative_algorithm"] = algorithm
    is_block = algorithm != "NGRAM"
    if is_block:
        options["speculative_draft_model_path"] = draft_of(checkpoint, tmp_path, algorithm)
    for lossless in (False, True) if is_block else (False,):
        engine = InProcessEngine(
            checkpoint,
            accept_plan=(lambda req, step: step % 4) if is_block else None,
            enable_linear_lossless_verify=lossless,
            **options,
        )
        assert turn(engine, text, 130, out if is_block else None) == (out, 0)
        found = states_by_length(engine)
        assert max(found) == max(want) == 128
        assert_equal_states(found[128], want[128])
        if is_block:
            assert engine.scripted.seen.keys() >= {0, 1, 2, 3}
        match = engine.built.memory.match(text + out)
        assert match.cached_len == 128


def test_states_of_chunks_are_those_of_the_prompt_cut_there(checkpoint):
    """F15: chunk by chunk, every stored state is the one that a prompt of that length leaves."""
    text = prompt_of(210, 2)
    chunked = InProcessEngine(checkpoint, chunked_prefill_size=64, **PLAIN)
    turn(chunked, text, 1)
    found = states_by_length(chunked)
    assert sorted(found) == [64, 128, 192]
    for length, state in found.items():
        whole = InProcessEngine(checkpoint, chunked_prefill_size=2048, **PLAIN)
        turn(whole, text[: length + 3], 1)
        assert_equal_states(state, states_by_length(whole)[length])
    with pytest.raises(AssertionError):
        assert_equal_states(found[64], found[128])


@pytest.mark.parametrize("options", [PLAIN, SPEC], ids=["plain", "mtp"])
def test_short_continuations_leave_the_cached_state_alone(checkpoint, options):
    """F18, F20, F22: siblings whose new part is shorter than the conv window, one by one and together."""
    shared = prompt_of(128, 3)
    siblings = [shared + prompt_of(extra, 40 + i) for i, extra in enumerate((1, 2, 3, 1, 4))]
    cold = InProcessEngine(checkpoint, disable_radix_cache=True)
    want = [turn(cold, text, 12)[0] for text in siblings]
    engine = InProcessEngine(checkpoint, **options)
    assert turn(engine, siblings[0], 12) == (want[0], 0)
    before = states_by_length(engine)[128]
    for text, out in zip(siblings, want, strict=True):
        assert turn(engine, text, 12) == (out, 128)
        assert_equal_states(states_by_length(engine)[128], before)
    rids = [engine.submit(text, max_new_tokens=12, ignore_eos=True) for text in siblings]
    engine.run()
    assert [engine.ids(rid) for rid in rids] == want
    assert [engine.last(rid).cached_tokens for rid in rids] == [128] * len(rids)
    assert_equal_states(states_by_length(engine)[128], before)


def test_two_runs_are_the_same_bits(checkpoint):
    """F24: the same requests in the same order give the same text and the same stored states."""
    runs = []
    for _ in range(2):
        engine = InProcessEngine(checkpoint, **SPEC)
        texts = [prompt_of(100, seed) for seed in range(3)]
        outs = engine.generate(texts + texts, max_new_tokens=40, ignore_eos=True)
        assert outs[:3] == outs[3:]
        runs.append((outs, states_by_length(engine)))
    assert runs[0][0] == runs[1][0] and set(runs[0][1]) == set(runs[1][1])
    for length, state in runs[0][1].items():
        assert_equal_states(state, runs[1][1][length])


def test_server_info_tells_what_the_state_pool_serves(checkpoint):
    """F29: ten slots at five each serve two requests; more wait, and the start says which flag to move."""
    engine = InProcessEngine(
        checkpoint, **PLAIN | {"max_running_requests": 8, "max_mamba_cache_size": 10}
    )
    info = engine.built.info
    served = info["max_running_requests"]
    assert served == 10 // info["memory_plan"]["slots_per_request"] < 8
    (note,) = [n for n in info["memory_plan"]["notes"] if "--max-running-requests 8" in n]
    assert f"becomes {served}" in note and "raise --max-mamba-cache-size to" in note
    for seed in range(6):
        engine.submit(prompt_of(20, seed), max_new_tokens=10, ignore_eos=True)
    most = 0
    while not engine.scheduler.is_idle:
        engine.scheduler.step()
        most = max(most, len(engine.scheduler.running) + len(engine.scheduler.prefilling))
    assert most == served


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("algorithm", [None, "NEXTN", "DFLASH", "DSPARK", "NGRAM"])
def test_the_largest_request_that_is_promised_is_served(checkpoint, tmp_path, algorithm, page_size):
    """F44: exactly the advertised length runs to its end; one token more is refused with the number.

    Catches a plan and a server that count the rows of a step differently.
    """
    options = {"page_size": page_size, "max_total_tokens": 320}
    if page_size == 1:
        options |= {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True}
    if algorithm is not None:
        options["speculative_algorithm"] = algorithm
    if algorithm in ("DFLASH", "DSPARK"):
        options["speculative_draft_model_path"] = draft_of(checkpoint, tmp_path, algorithm)
    engine = InProcessEngine(checkpoint, **options)
    info = engine.built.info
    longest, prompt = info["max_req_len"], info["max_req_input_len"]
    assert longest == prompt + 1 < info["model_context_length"]
    assert longest == info["memory_plan"]["largest_request_tokens"]
    assert any("the longest request" in note for note in info["memory_plan"]["notes"])
    out, _ = turn(engine, prompt_of(100, 5), longest - 100)
    assert len(out) == longest - 100
    out, _ = turn(engine, prompt_of(prompt, 6), 1)
    assert len(out) == 1
    rid = engine.submit(prompt_of(longest, 7), max_new_tokens=1)
    engine.run()
    reason = engine.last(rid).finish_reason
    assert reason.type == "abort" and str(longest) in reason.message


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
