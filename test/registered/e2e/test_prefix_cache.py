"""The prefix cache under the real engine: stored states, retraction, churn.

Catches what only real kernels show: a stored state that differs from the one plain decoding stores
(F13, F14), tokens lost or repeated by retraction (F33), leaks under churn (F25, F35, F37).
"""

from __future__ import annotations

import random

import pytest
import torch

from sglang.srt.managers.io_struct import AbortReq
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.engine_harness import InProcessEngine
from sglang.test.make_checkpoint import make_checkpoint

register_cpu_ci(est_time=60, suite="e2e")

WIDTH = 4
PLAIN = {
    "page_size": 64,
    "mamba_radix_cache_strategy": "extra_buffer",
    "mamba_track_interval": 64,
    "max_running_requests": 4,
}
SPEC = PLAIN | {
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": WIDTH - 1,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": WIDTH,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    out = tmp_path_factory.mktemp("ckpt") / "tiny"
    make_checkpoint(str(out), arch="qwen3_5", dtype="fp32", seed=11)
    return str(out)


def prompt_of(length, seed):
    rng = random.Random(seed)
    return [rng.randrange(200) for _ in range(length)]


def tree_of(engine):
    return engine.built.memory._tree


def states_by_prefix(engine):
    """Every state in the tree, under the tokens it is filed under."""
    tensors = engine.state_tensors()
    return {
        node.token_bytes(): {name: t[:, node.state_slot].clone() for name, t in tensors.items()}
        for node in tree_of(engine).nodes()
        if node.state_slot >= 0
    }


LENGTHS = (30, 95, 200)
"""Output lengths after 40 prompt tokens whose last boundaries are 64, 128 and 192."""


@pytest.fixture(scope="module")
def plain_runs(checkpoint):
    """Ids and stored states of plain decoding, per output length."""
    text = prompt_of(40, 1)
    runs = {}
    for length in LENGTHS:
        engine = InProcessEngine(checkpoint, **PLAIN)
        (out,) = engine.generate([text], max_new_tokens=length, ignore_eos=True)
        runs[length] = (out, states_by_prefix(engine))
    return text, runs


PATTERNS = {
    "none": lambda req, step: 0,
    "one": lambda req, step: 1,
    "two": lambda req, step: 2,
    "all": lambda req, step: 3,
    "cycle": lambda req, step: step % WIDTH,
}


@pytest.mark.parametrize("lossless", [False, True], ids=["snapshots", "tuples"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_stored_states_equal_those_of_plain_decoding(checkpoint, plain_runs, pattern, lossless):
    """The state at the boundary, bit for bit, wherever in the accepted block the boundary fell."""
    text, runs = plain_runs
    compared = 0
    for length, (out, want) in runs.items():
        engine = InProcessEngine(
            checkpoint,
            accept_plan=PATTERNS[pattern],
            enable_linear_lossless_verify=lossless,
            **SPEC,
        )
        engine.submit(text, rid="r0", max_new_tokens=length, ignore_eos=True)
        engine.scripted.expected = {"r0": text + out}
        engine.run()
        assert engine.ids("r0") == out
        found = states_by_prefix(engine)
        assert sorted(len(prefix) // 4 for prefix in found) == [(40 + length) // 64 * 64]
        assert set(found) == set(want)
        for prefix, state in found.items():
            for name, tensor in state.items():
                assert torch.equal(tensor, want[prefix][name]), (len(prefix) // 4, name)
                compared += 1
    assert compared >= 2 * len(LENGTHS)


@pytest.mark.parametrize("spec", [False, True], ids=["plain", "spec"])
def test_retraction_loses_and_repeats_nothing(checkpoint, spec):
    """More requests than the pool can finish together: some go back, all give their own text."""
    prompts = [prompt_of(50 + i, i) for i in range(5)]
    alone = InProcessEngine(checkpoint, disable_radix_cache=True)
    want = [alone.generate([p], max_new_tokens=150, ignore_eos=True)[0] for p in prompts]
    engine = InProcessEngine(
        checkpoint,
        **(SPEC if spec else PLAIN) | {"max_total_tokens": 512, "schedule_conservativeness": 0.01},
    )
    assert engine.generate(prompts, max_new_tokens=150, ignore_eos=True) == want
    assert engine.scheduler.metrics.num_retracted > 0


def test_churn_leaks_nothing(checkpoint):
    """Requests of different lengths, some aborted while queued or running; then a flush."""
    engine = InProcessEngine(checkpoint, **SPEC | {"max_total_tokens": 1024})
    memory = engine.built.memory
    start = memory.stats()
    rng = random.Random(5)
    rids = []
    for i in range(60):
        text = prompt_of(30, i % 3) * rng.randint(1, 4)
        rids.append(engine.submit(text[: rng.randint(5, 120)], max_new_tokens=rng.randint(1, 12)))
        for _ in range(rng.randint(0, 3)):
            engine.scheduler.step()
            memory.check_integrity()
        if rng.random() < 0.25:
            engine.scheduler.handle(AbortReq(rid=rng.choice(rids[-6:])))
            memory.check_integrity()
    engine.run()
    assert memory.stats()["states_cached"] > 0
    assert memory.flush()
    assert memory.stats() == start


def test_evicted_and_restarted_prefixes_give_the_same_text(checkpoint, tmp_path):
    """Turns that return after eviction, and again after a restart over the same files."""
    prompts = [prompt_of(130, 20 + i) for i in range(6)]
    cold = InProcessEngine(checkpoint, disable_radix_cache=True, page_size=64)
    want = [cold.generate([p], max_new_tokens=20, ignore_eos=True)[0] for p in prompts]
    for expected_cached in ((0, 128), (128, 128)):
        engine = InProcessEngine(
            checkpoint,
            max_total_tokens=512,
            enable_hierarchical_cache=True,
            hicache_ratio=8.0,
            hicache_storage_backend="file",
            hicache_storage_dir=str(tmp_path),
            **SPEC,
        )
        for cached in expected_cached:
            for prompt, out in zip(prompts, want, strict=True):
                rid = engine.submit(prompt, max_new_tokens=20, ignore_eos=True)
                engine.run()
                assert (engine.ids(rid), engine.last(rid).cached_tokens) == (out, cached)
        assert engine.built.host_tier.stats()["loads_ct"] >= len(prompts)
        engine.built.close()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
