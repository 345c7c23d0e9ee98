"""Lossless verify on against off, and speculation against none, with every acceptance pattern.

Known faults F03, F05, F06, F08, F11, F13, F14. The engines run in lockstep on the CPU, so that the
recurrent pools can be compared after every single commit.
"""

from __future__ import annotations

import random

import pytest
import torch

from sglang.kernels.ops.cpu import library
from sglang.srt.layers.attention import hybrid_linear_attn_backend
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.engine_harness import InProcessEngine
from sglang.test.make_checkpoint import make_checkpoint

register_cpu_ci(est_time=60, suite="e2e")

WIDTH = 4
SPEC = {
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": WIDTH - 1,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": WIDTH,
    "page_size": 64,
    "mamba_radix_cache_strategy": "extra_buffer",
    "mamba_track_interval": 64,
    "max_running_requests": 8,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    out = tmp_path_factory.mktemp("ckpt") / "tiny"
    make_checkpoint(str(out), arch="qwen3_5", dtype="fp32", seed=7)
    return str(out)


def prompts(count, low=5, high=90, seed=3):
    rng = random.Random(seed)
    return [[rng.randrange(200) for _ in range(rng.randint(low, high))] for _ in range(count)]


def cyclic(req, step):
    """Every number of accepted drafts in turn, shifted per request."""
    return (step + int(req.rid[1:])) % WIDTH


def lockstep(first, second):
    """Step both until idle; compare the whole pool after each step. Returns comparisons made."""
    compared = 0
    while not (first.scheduler.is_idle and second.scheduler.is_idle):
        first.scheduler.step()
        second.scheduler.step()
        for name, tensor in first.state_tensors().items():
            assert torch.equal(tensor, second.state_tensors()[name]), (name, compared)
            compared += 1
    first.scheduler.check_integrity()
    second.scheduler.check_integrity()
    return compared


def run_pair(checkpoint, texts, num_new, **options):
    plain = InProcessEngine(checkpoint, max_running_requests=8, page_size=64)
    expected = plain.generate(texts, max_new_tokens=num_new, ignore_eos=True)
    pair = []
    for lossless in (False, True):
        engine = InProcessEngine(
            checkpoint,
            accept_plan=cyclic,
            enable_linear_lossless_verify=lossless,
            **(SPEC | options),
        )
        for text in texts:
            engine.submit(text, max_new_tokens=num_new, ignore_eos=True)
        engine.scripted.expected = {
            f"r{i}": text + out for i, (text, out) in enumerate(zip(texts, expected, strict=True))
        }
        pair.append(engine)
    return expected, *pair


@pytest.mark.parametrize("ssm_dtype", ["float32", "bfloat16"])
def test_lossless_equals_default_after_every_commit(checkpoint, ssm_dtype):
    """2,560 tokens; ids, SSM and conv (working and track slots) equal bit for bit at every step."""
    texts = prompts(8)
    expected, default, lossless = run_pair(checkpoint, texts, 320, mamba_ssm_dtype=ssm_dtype)
    compared = lockstep(default, lossless)
    assert compared > 200
    rids = [f"r{i}" for i in range(8)]
    assert [default.ids(r) for r in rids] == [lossless.ids(r) for r in rids]
    assert sum(len(default.ids(r)) for r in rids) == 2560
    if ssm_dtype == "float32":
        assert [default.ids(r) for r in rids] == expected
    assert set(default.scripted.seen) == set(range(WIDTH)), "every acceptance length must occur"
    print(f"{compared} pool comparisons, accept plan {default.scripted.seen}")


@pytest.fixture
def without_compiler():
    library.select("torch")
    yield
    library.select("auto")


def test_lossless_equals_default_without_a_compiler(checkpoint, without_compiler):
    """The PyTorch twin is a step routine of its own: 408 tokens, equal after every commit (F04)."""
    _, default, lossless = run_pair(checkpoint, prompts(4, high=20), 102)
    assert default.built.runner.model.fused_step is None
    assert lockstep(default, lossless) > 50
    rids = [f"r{i}" for i in range(4)]
    assert [default.ids(r) for r in rids] == [lossless.ids(r) for r in rids]
    assert sum(len(default.ids(r)) for r in rids) == 408
    assert set(default.scripted.seen) == set(range(WIDTH))


def test_snapshot_and_tuple_scratch_differ_in_kind(checkpoint):
    """Control for the pair: the two engines really use the two implementations."""
    _, default, lossless = run_pair(checkpoint, prompts(1), 8)
    snapshot = default.built.pools.req_pool.mamba_pool.mamba_cache
    tuples = lossless.built.pools.req_pool.mamba_pool.mamba_cache
    assert snapshot.intermediate_ssm is not None and snapshot.intermediate_ssm_u is None
    assert tuples.intermediate_ssm is None and tuples.intermediate_ssm_u.dtype == torch.float32


@pytest.mark.parametrize("lossless", [False, True], ids=["snapshots", "tuples"])
def test_second_turn_resumes_from_the_tracked_state(checkpoint, lossless):
    """A conversation of 700 tokens crosses track boundaries; its second turn hits the last one."""
    text = prompts(1, 180, 181)[0]
    options = SPEC | {"mamba_track_interval": 256, "max_total_tokens": 8192}

    def follow_up(**more):
        engine = InProcessEngine(
            checkpoint, enable_linear_lossless_verify=lossless, **(options | more)
        )
        (first,) = engine.generate([text], max_new_tokens=520, ignore_eos=True)
        rid = engine.submit(
            text + first + prompts(1, 9, 9, seed=8)[0], max_new_tokens=60, ignore_eos=True
        )
        engine.run()
        return first, engine.ids(rid), engine.last(rid).cached_tokens

    warm_first, warm, cached = follow_up()
    cold_first, cold, none = follow_up(disable_radix_cache=True, mamba_radix_cache_strategy="auto")
    assert cached == 512 and none == 0
    assert warm_first == cold_first and warm == cold


def test_commit_before_track_is_caught(checkpoint, monkeypatch):
    """Control: advancing in place first stores a different track state, and the pair shows it."""
    replay = hybrid_linear_attn_backend._reconstruct_ssm_from_tuples

    def in_place_first(ssm, u, k, g, rows, slots, steps, track_slots, track_steps):
        replay(ssm, u, k, g, rows, slots, steps)
        if track_slots is not None:
            replay(ssm, u, k, g, rows, slots, track_steps, track_slots)

    texts = prompts(8)
    _, default, lossless = run_pair(checkpoint, texts, 160)
    monkeypatch.setattr(hybrid_linear_attn_backend, "commit_tuples", in_place_first)
    with pytest.raises(AssertionError, match="temporal"):
        lockstep(default, lossless)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
