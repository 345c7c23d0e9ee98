"""What happens to a step that is in flight: requests aborted in it, a flush behind it, prompts before it."""

from __future__ import annotations

import logging

import pytest

from sglang.srt.managers.io_struct import FlushCacheReqInput, TokenizedGenerateReqInput
from sglang.srt.managers.scheduler_builder import graph_sizes
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.engine_harness import InProcessEngine

register_cpu_ci(est_time=15, suite="e2e")

TEXT = [(i * 37 + 11) % 3000 + 20 for i in range(600)]
PROMPTS = [TEXT[i * 40 : i * 40 + 30 + 9 * i] for i in range(4)]
AHEAD = {"device_steps": True, "disable_overlap_schedule": False, "mamba_track_interval": 64}
HOST = {"device_steps": False, "mamba_track_interval": 64}
REJECTION = {"speculative_algorithm": "NEXTN", "speculative_use_rejection_sampling": True}


def steps_ahead(engine) -> list[int]:
    """How many steps each request had in flight, launch by launch."""
    worker, seen = engine.built.worker, []
    decode = worker.decode

    def watched(plan):
        seen.append(max(r.num_in_flight for r in plan.reqs))
        return decode(plan)

    worker.decode = watched
    return seen


@pytest.mark.parametrize("when", (2, 5, 8))
def test_device_continues_after_a_step_of_the_host(when):
    """The request that needed the host is aborted while its step is not yet taken in: the device has
    not seen that step's outcome, so continuing from what it knows repeats tokens."""
    (want,) = InProcessEngine("demo", **HOST, **REJECTION).generate(PROMPTS[:1], max_new_tokens=40)
    engine = InProcessEngine("demo", **AHEAD, **REJECTION)
    ahead = steps_ahead(engine)
    kept = engine.submit(PROMPTS[0], max_new_tokens=40)
    drawn = engine.submit(PROMPTS[1], max_new_tokens=40, temperature=0.9, sampling_seed=3)
    for _ in range(when):
        engine.scheduler.step()
    engine.abort(drawn)
    engine.run()
    assert engine.ids(kept) == want
    assert max(ahead) == 1


def test_flush_behind_the_last_step():
    """All requests have ended, but one step more was launched: that is no reason to refuse."""
    engine = InProcessEngine("demo", **AHEAD)
    (plain,) = engine.generate(PROMPTS[:1], max_new_tokens=20)
    rid = engine.submit(PROMPTS[0], max_new_tokens=20, stop_token_ids=[plain[9]])
    while not (engine.outputs.get(rid) and engine.last(rid).finish_reason):
        engine.scheduler.step()
    assert not engine.scheduler.is_idle
    engine.scheduler.handle(FlushCacheReqInput(req_id="flush"))
    assert engine.messages[-1].success, engine.messages[-1].message
    assert engine.scheduler.is_idle
    stats = engine.built.memory.stats()
    assert stats["kv_tokens_available"] == stats["kv_tokens_total"]
    assert engine.generate(PROMPTS[:1], max_new_tokens=20) == [plain]


def test_runs_ahead_without_a_prefix_cache():
    """Without boundary states no grid limits how far two steps may reach."""
    options = {"speculative_algorithm": "NEXTN", "disable_radix_cache": True}
    engine = InProcessEngine("demo", **AHEAD, **options)
    ahead = steps_ahead(engine)
    want = InProcessEngine("demo", **HOST).generate(PROMPTS, max_new_tokens=30)
    assert engine.generate(PROMPTS, max_new_tokens=30) == want
    assert max(ahead) == 1


def test_graph_sizes_that_no_step_has_are_named(caplog):
    """Catches graphs captured for more requests than ever run, without a word."""
    plan = InProcessEngine("demo", max_running_requests=3).built.plan
    args = ServerArgs("demo", cuda_graph_bs=[1, 2, 8, 64], cuda_graph_max_bs=64)
    with caplog.at_level(logging.INFO):
        assert graph_sizes(args, plan) == [1, 2, 3]
    (line,) = caplog.messages
    assert line.startswith("--cuda-graph-bs 8 64 ") and "at most 3 requests run at once" in line
    caplog.clear()
    assert graph_sizes(ServerArgs("demo", cuda_graph_bs=[1, 3]), plan) == [1, 3]
    assert not caplog.messages


def test_prompt_chunks_do_not_queue_up():
    """No chunk but a prompt's last samples anything, yet each is waited for: two in the queue at most."""
    engine = InProcessEngine("demo", **AHEAD, chunked_prefill_size=16)
    worker, open_fences, most = engine.built.worker, set(), []
    prefill = worker.prefill

    def watched(plan):
        step = prefill(plan)
        open_fences.add(id(step.fence))
        wait = step.fence.wait

        def waited():
            open_fences.discard(id(step.fence))
            wait()

        step.fence.wait = waited
        most.append(len(open_fences))
        return step

    worker.prefill = watched
    want = InProcessEngine("demo", **HOST).generate([TEXT[:200]], max_new_tokens=4)
    assert engine.generate([TEXT[:200]], max_new_tokens=4) == want
    assert len(most) == 13 and max(most) == 2


@pytest.mark.parametrize("algorithm", [None, "NEXTN"])
def test_boundaries_passed_ahead_are_cached(algorithm):
    """A step ahead starts up to a step beyond what the host knows: it needs its slot that much earlier."""
    engine = InProcessEngine("demo", **AHEAD, speculative_algorithm=algorithm)
    ahead = steps_ahead(engine)
    prompts = [TEXT[i * 70 : i * 70 + 48 + 2 * i] for i in range(8)]
    outputs = engine.generate(prompts, max_new_tokens=40)
    assert max(ahead) == 1
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = prompt + output
        boundary = (len(tokens) - 1) // 64 * 64
        assert engine.built.memory.match(tokens).cached_len == boundary, len(prompt)


@pytest.mark.parametrize("algorithm", [None, "NEXTN"])
def test_digests_are_of_the_last_step(algorithm):
    """A request ends by a stop token, which the step behind it would have run over."""
    (plain,) = InProcessEngine("demo", **HOST).generate(PROMPTS[:1], max_new_tokens=40)
    found = []
    for mode in (HOST, AHEAD):
        engine = InProcessEngine("demo", **mode, speculative_algorithm=algorithm)
        found.append([])
        for stop in plain[5:40:5]:
            params = SamplingParams(temperature=0.0, max_new_tokens=60, stop_token_ids=[stop])
            params.normalize()
            engine.scheduler.handle(
                TokenizedGenerateReqInput(
                    rid=f"{stop}",
                    input_ids=PROMPTS[0],
                    sampling_params=params,
                    return_state_digest=True,
                )
            )
            engine.run()
            found[-1].append((engine.last(f"{stop}").state_digest, engine.ids(f"{stop}")))
    assert found[0] == found[1]
    assert len({digest for digest, _ in found[0]}) > 3


def test_counters_leave_out_dropped_rows():
    """Steps that ran for requests which had ended count for nobody."""
    engine = InProcessEngine("demo", **AHEAD, speculative_algorithm="NEXTN")
    plain = engine.generate(PROMPTS, max_new_tokens=30)
    first = engine.scheduler.metrics.verify_ct
    assert first == sum(items[-1].spec_verify_ct for items in engine.outputs.values())
    rids = [
        engine.submit(prompt, max_new_tokens=30, stop_token_ids=[ids[11]])
        for prompt, ids in zip(PROMPTS, plain, strict=True)
    ]
    engine.run()
    second = engine.scheduler.metrics.verify_ct - first
    assert second == sum(engine.last(rid).spec_verify_ct for rid in rids)


def test_nothing_is_kept_between_steps():
    """Logits and hidden states of a step that is over: one set for every batch size is gigabytes."""
    engine = InProcessEngine("demo", **AHEAD, speculative_algorithm="NEXTN")
    engine.generate(PROMPTS, max_new_tokens=20)
    sized = engine.built.worker._device_decode._steps
    assert sized and all(step._current is None for step in sized.values())


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
