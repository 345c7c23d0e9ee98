"""Steps led by the device, one ahead of the host: the same answers, memory and states as one by one.

The CPU engine can lead steps this way too, which is what these tests use; on a GPU it is the default
and test_engine_cuda.py compares it with captured graphs. Known faults F04, F06, F27.
"""

from __future__ import annotations

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.engine_harness import InProcessEngine

register_cpu_ci(est_time=60, suite="e2e")

TEXT = [(i * 37 + 11) % 3000 + 20 for i in range(1200)]
PROMPTS = [TEXT[i * 40 : i * 40 + 12 + 9 * i] for i in range(6)]
FEW = PROMPTS[3:]
ALGORITHMS = {
    "none": {},
    "NEXTN": {"speculative_algorithm": "NEXTN"},
    "DFLASH": {
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": "demo-dflash",
    },
    "DSPARK": {
        "speculative_algorithm": "DSPARK",
        "speculative_draft_model_path": "demo-dspark",
    },
}
HOST = {"device_steps": False}
DEVICE = {"device_steps": True, "disable_overlap_schedule": True}
AHEAD = {"device_steps": True, "disable_overlap_schedule": False}
MODES = [HOST, DEVICE, AHEAD]


def engine(mode, algorithm="NEXTN", **options):
    common = {"mamba_track_interval": 64, "enable_linear_lossless_verify": algorithm != "none"}
    return InProcessEngine("demo", **(ALGORITHMS[algorithm] | common | options | mode))


def count_ahead(built) -> list[int]:
    """Records how many steps were in flight at each launch."""
    worker, seen = built.built.worker, []
    launch = worker.decode

    def watched(plan):
        seen.append(max(r.num_in_flight for r in plan.reqs))
        return launch(plan)

    worker.decode = watched
    return seen


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_conversations_are_those_of_the_host(algorithm):
    """Two turns in every mode: the second resumes from a boundary state that a step ahead stored."""
    found = []
    for mode in MODES:
        one = engine(mode, algorithm)
        ahead = count_ahead(one)
        first = one.generate(FEW, max_new_tokens=70, ignore_eos=True)
        rid = one.submit(FEW[2] + first[2] + TEXT[:5], max_new_tokens=20, ignore_eos=True)
        one.run()
        assert max(ahead) == (1 if mode is AHEAD else 0)
        found.append((first, one.ids(rid), one.last(rid).cached_tokens))
    assert found[0] == found[1] == found[2]
    assert found[0][2] >= 64


def test_lossless_states_equal_default_ones_while_running_ahead():
    """Every pool tensor after every step; the control differs by one token of one prompt."""

    def run(lossless, prompts):
        one = engine(AHEAD, enable_linear_lossless_verify=lossless)
        for prompt in prompts:
            one.submit(prompt, max_new_tokens=30, ignore_eos=True)
        while not one.scheduler.is_idle:
            one.scheduler.step()
            yield {name: tensor.clone() for name, tensor in one.state_tensors().items()}

    compared = 0
    for a, b in zip(run(False, FEW), run(True, FEW), strict=True):
        for name in a:
            assert torch.equal(a[name], b[name]), name
            compared += 1
    assert compared > 20
    changed = [[*FEW[0][:-1], FEW[0][-1] + 1], *FEW[1:]]
    pairs = zip(run(False, FEW), run(True, changed), strict=False)
    assert any(not torch.equal(a[name], b[name]) for a, b in pairs for name in a)


def test_requests_that_need_the_host_beside_requests_that_do_not():
    """Sampling, penalties, log probabilities and digests make the batch wait, and change nothing."""
    needs = [
        {},
        {"temperature": 0.8, "sampling_seed": 5},
        {"repetition_penalty": 1.2},
        {"return_logprob": True, "top_logprobs_num": 2},
        {"min_new_tokens": 9},
        {},
    ]
    found = []
    for mode in MODES:
        one = engine(mode)
        rids = [
            one.submit(prompt, max_new_tokens=10 + 7 * i, ignore_eos=True, **own)
            for i, (prompt, own) in enumerate(zip(PROMPTS, needs, strict=True))
        ]
        one.run()
        logprobs = [x for item in one.outputs[rids[3]] for x in item.output_logprobs]
        found.append(([one.ids(r) for r in rids], [x.token_id for x in logprobs]))
    assert found[0] == found[1] == found[2]
    assert found[0][1] == found[0][0][3]


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_short_outputs(limit):
    """A request may end in the prefill or in the step that is in flight: nothing more comes out."""
    found = []
    for mode in MODES:
        one = engine(mode)
        found.append(one.generate(PROMPTS, max_new_tokens=limit, ignore_eos=True))
    assert found[0] == found[1] == found[2]
    assert all(len(ids) == limit for ids in found[0])


def test_stop_token_found_one_step_late():
    """The step launched before the stop was seen must leave no token, state or page behind."""
    (plain,) = engine(HOST).generate([PROMPTS[3]], max_new_tokens=40, ignore_eos=True)
    stop = plain[17]
    found = []
    for mode in MODES:
        one = engine(mode)
        rid = one.submit(PROMPTS[3], max_new_tokens=40, stop_token_ids=[stop])
        other = one.submit(PROMPTS[4], max_new_tokens=40, ignore_eos=True)
        one.run()
        stats = one.built.memory.stats()
        del stats["states_total"]  # overlap keeps two boundary states a request
        found.append((one.ids(rid), one.ids(other), stats))
    assert found[0] == found[1] == found[2]
    assert found[0][0] == plain[: plain.index(stop) + 1]


def test_abort_while_in_flight():
    one = engine(AHEAD)
    rids = [one.submit(p, max_new_tokens=60, ignore_eos=True) for p in PROMPTS]
    for _ in range(6):
        one.scheduler.step()
    assert any(r.num_in_flight for r in one.scheduler.running)
    one.abort(rids[2])
    one.run()
    want = engine(HOST).generate(PROMPTS, max_new_tokens=60, ignore_eos=True)
    assert [one.ids(r) for i, r in enumerate(rids) if i != 2] == want[:2] + want[3:]
    got = one.ids(rids[2])
    assert got == want[2][: len(got)] and len(got) < 60


def test_retraction_in_a_small_pool():
    """Pages run out while a step is in flight: it is taken in before anybody loses memory."""
    found = []
    for mode in MODES:
        one = engine(mode, max_total_tokens=512, page_size=16)
        found.append(one.generate(PROMPTS, max_new_tokens=90, ignore_eos=True))
        assert one.scheduler.metrics.num_retracted > 0
    assert found[0] == found[1] == found[2]


def test_a_narrow_track_grid_never_runs_ahead():
    """Two steps may cross one boundary each only if the grid is wider than both together."""
    one = engine(AHEAD, "DFLASH", mamba_track_interval=64)
    one.built.worker._device_decode._grid = 2 * one.built.worker.draft_token_num - 1
    ahead = count_ahead(one)
    one.generate(PROMPTS[:2], max_new_tokens=20, ignore_eos=True)
    assert max(ahead) == 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
