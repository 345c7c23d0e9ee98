"""The engine on a GPU: equal to the CPU up to near ties; lossless, graphs and overlap change no bit.

Known faults F04, F06, F14, F16, F17, F46 to F49, F122. Registered for CUDA; skipped elsewhere.
"""

from __future__ import annotations

import gc
import itertools
import time

import pytest
import torch

from sglang.test.ci.ci_register import register_amd_ci, register_cuda_ci
from sglang.test.engine_harness import InProcessEngine
from sglang.test.engine_workloads import (
    NUM_BATCHED,
    TEXT,
    WORKLOADS,
    Outcome,
    few,
    flush,
    poison,
    recorded_slots,
    written_outside,
    written_scratch_rows,
)

register_cuda_ci(est_time=120, stage="base-b", runner_config="1-gpu-large")
register_amd_ci(est_time=120, suite="stage-b-test-1-gpu-large-amd")
register_amd_ci(est_time=120, suite="stage-b-test-1-gpu-small-amd-mi35x")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

GPU = {
    "device": "cuda",
    "device_memory_gb": 8.0,
    "max_running_requests": 8,
    "max_mamba_cache_size": 64,
    "page_size": 64,
    "mamba_radix_cache_strategy": "extra_buffer",
    "mamba_track_interval": 64,
}
EAGER = {"disable_cuda_graph": True, "disable_overlap_schedule": True}
DRAFTS = {
    "NEXTN": {},
    "DFLASH": {"speculative_draft_model_path": "demo-dflash"},
    "DSPARK": {"speculative_draft_model_path": "demo-dspark"},
}
ALGORITHMS = pytest.mark.parametrize("algorithm", list(DRAFTS))
PROMPTS = [TEXT[i * 40 : i * 40 + 12 + 9 * i] for i in range(8)]
NEAR_TIE = 0.13  # two steps of bf16 where the logits lie (8 to 16), and a little


@pytest.fixture(autouse=True)
def earlier_engines_are_gone():
    """An engine is part of cycles, so its pools go with a collection, not with its name."""
    gc.collect()
    torch.cuda.empty_cache()


def gpu_engine(algorithm: str | None = None, **options) -> InProcessEngine:
    chosen = {} if algorithm is None else {"speculative_algorithm": algorithm, **DRAFTS[algorithm]}
    return InProcessEngine("demo", **(GPU | chosen | options))


def same_until_near_tie(want, got, engine, prompt, margin=0.05):
    """True if equal, or the first difference lies at a near tie of the two best tokens."""
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        if a == b:
            continue
        rid = engine.submit(
            prompt + want[:i],
            max_new_tokens=1,
            ignore_eos=True,
            return_logprob=True,
            top_logprobs_num=2,
        )
        engine.run()
        (first, _), (second, _) = engine.outputs[rid][0].output_logprobs[0].top
        return first - second < margin
    return True


def test_gpu_equals_cpu_up_to_near_ties():
    cpu = InProcessEngine("demo")
    gpu = gpu_engine(dtype="float32")
    want = cpu.generate(PROMPTS, max_new_tokens=64, ignore_eos=True)
    got = gpu.generate(PROMPTS, max_new_tokens=64, ignore_eos=True)
    for prompt, a, b in zip(PROMPTS, want, got, strict=True):
        assert same_until_near_tie(a, b, cpu, prompt, margin=5e-3)


@ALGORITHMS
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_lossless_equals_default_in_lockstep(algorithm, dtype):
    """Ids, SSM, conv, working and track slots after every step: bit for bit."""
    pair = [
        gpu_engine(algorithm, dtype=dtype, enable_linear_lossless_verify=lossless, **EAGER)
        for lossless in (False, True)
    ]
    for engine in pair:
        for prompt in PROMPTS:
            engine.submit(prompt, max_new_tokens=160, ignore_eos=True)
    compared = 0
    while not pair[0].scheduler.is_idle:
        for engine in pair:
            engine.scheduler.step()
        other = pair[1].state_tensors()
        for name, tensor in pair[0].state_tensors().items():
            assert torch.equal(tensor[:, 1:], other[name][:, 1:]), (name, compared)
            compared += 1
    assert compared > 50
    rids = [f"r{i}" for i in range(8)]
    assert [pair[0].ids(r) for r in rids] == [pair[1].ids(r) for r in rids]
    accept = pair[0].scheduler.metrics.accept_length()
    print(f"{algorithm} {dtype}: {compared} pool comparisons, accept length {accept:.2f}")


@ALGORITHMS
def test_no_step_waits_for_the_device(algorithm):
    """Catches copies from ordinary memory: each holds the host until the device has caught up.

    What a step waits for it waits for by an event, which this mode of torch does not mind.
    """
    engine = gpu_engine(algorithm, enable_linear_lossless_verify=True, chunked_prefill_size=128)
    prompts = [TEXT[i * 40 : i * 40 + 300 + 9 * i] for i in range(4)]
    want = engine.generate(prompts, max_new_tokens=40, ignore_eos=True)
    flush(engine)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.zeros(4, device="cuda")[1] = 5  # the control
        assert engine.generate(prompts, max_new_tokens=40, ignore_eos=True) == want
    finally:
        torch.cuda.set_sync_debug_mode("default")


Runs = dict[str, Outcome]
Setting = tuple[bool, bool, bool]  # lossless, graphs, overlap


def run_twice(algorithm: str, setting: Setting) -> Runs:
    """Every workload of an engine, each twice with a flush between; the second equals the first."""
    lossless, graphs, overlap = setting
    started = time.monotonic()
    engine = gpu_engine(
        algorithm,
        enable_linear_lossless_verify=lossless,
        disable_cuda_graph=not graphs,
        disable_overlap_schedule=not overlap,
        # A graph of every batch size: no padding, so that eager steps have the same rows.
        max_running_requests=NUM_BATCHED,
        cuda_graph_bs=list(range(1, NUM_BATCHED + 1)) if graphs else None,
    )
    built = time.monotonic() - started
    outcomes = {}
    for name, workload in WORKLOADS.items():
        outcomes[name] = workload(engine)
        flush(engine)
        again = workload(engine)
        flush(engine)
        found = again.first_difference(outcomes[name], pools=False)
        assert found is None, f"{setting} {name}: after a flush {found} differs"
    took = time.monotonic() - started - built
    print(f"{algorithm} {setting}: built in {built:.1f} s, ran in {took:.1f} s")
    return outcomes


def same_up_to_near_ties(want: Outcome, got: Outcome) -> bool:
    """For greedy requests; a sampled one may draw otherwise from the first difference on."""
    return all(
        got.ids[rid] == ids
        or int(rid.split()[1]) % 3 == 2
        or same_until_near_tie(ids, got.ids[rid], gpu_engine(**EAGER), want.prompts[rid], NEAR_TIE)
        for rid, ids in want.ids.items()
    )


@ALGORITHMS
def test_lossless_graphs_and_overlap_change_nothing(algorithm):
    """Ids, cached lengths, cached KV and states: equal for all eight settings, each run twice.

    Lossless on and off also agree in every state slot. An overlapped batch may keep a finished request for
    one more step, so there the number of rows, and with it a kernel's order of sums, may differ.
    """
    runs = {
        setting: run_twice(algorithm, setting)
        for setting in itertools.product((False, True), repeat=3)
    }
    values = comparisons = 0
    for lossless, graphs, overlap in runs:
        others = {
            "lossless": (False, graphs, overlap),
            "graphs": (lossless, False, overlap),
            "overlap": (lossless, graphs, False),
        }
        for what, other in others.items():
            if other == (lossless, graphs, overlap):
                continue
            for name in WORKLOADS:
                want, got = runs[other][name], runs[lossless, graphs, overlap][name]
                values += want.num_values
                comparisons += 1
                if what == "overlap" and name == "batch":
                    assert same_up_to_near_ties(want, got), (other, what, name)
                    continue
                found = got.first_difference(want, pools=what == "lossless")
                assert found is None, f"{what} on against off, from {other}, {name}: {found}"
    cached = runs[False, False, False]["turns"].cached
    assert list(cached.values()) == [0, 128, 192]
    assert comparisons == 12 * len(WORKLOADS)
    print(f"{algorithm}: {comparisons} pairs of runs, {values} values compared")


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "padded-graph"])
@ALGORITHMS
def test_poisoned_memory_and_padded_rows(algorithm, graphs):
    """Free slots, padding slots, scratch and free memory hold NaN: nothing reads or writes them.

    F46 to F49: an index clamped to 0 or to a live slot, a padded row that is computed and stored, a masked
    product of 0 and NaN. With graphs, three requests run in a captured batch of eight.
    """
    options = EAGER | {"disable_cuda_graph": False, "cuda_graph_bs": [8]} if graphs else EAGER
    outcomes: dict[bool, Outcome] = {}
    values = 0
    for lossless in (False, True):
        engine = gpu_engine(algorithm, enable_linear_lossless_verify=lossless, **options)
        clean = few(engine)
        flush(engine)
        poison(engine)
        with recorded_slots(engine) as touched:
            poisoned = few(engine)
        found = poisoned.first_difference(clean, pools=False)
        assert found is None, f"lossless {lossless}: NaN in unused memory changes {found}"
        stray = written_outside(engine, touched)
        assert not stray, f"lossless {lossless}: written without being held: {stray[:5]}"
        for name, rows in written_scratch_rows(engine).items():
            assert 1 <= len(rows) <= 3, f"{name}: rows {sorted(rows)} for three requests"
        outcomes[lossless] = clean
        values += clean.num_values + len(touched.states) + len(touched.kv)
    assert outcomes[True].first_difference(outcomes[False], pools=True) is None
    print(f"{algorithm} graphs {graphs}: {values} values and slots checked")


def test_poison_is_seen():
    """The control of the test above: a live state slot that holds NaN changes what is sampled."""
    engine = gpu_engine(**EAGER)
    clean = few(engine)
    flush(engine)
    for i in range(3):
        engine.submit(TEXT[i * 50 : i * 50 + 30 + 7 * i], max_new_tokens=60, ignore_eos=True)
    engine.scheduler.step()
    held = engine.scheduler.running[0].kv.mamba_pool_idx
    engine.state_tensors()["temporal"][:, held] = float("nan")
    engine.run()
    ids = [engine.ids(f"r{3 + i}") for i in range(3)]
    assert ids[0] != clean.ids["request 0"]
    assert ids[1:] == [clean.ids["request 1"], clean.ids["request 2"]]


def test_second_turn_resumes_and_equals_cold():
    options = {"speculative_algorithm": "NEXTN", "enable_linear_lossless_verify": True}

    def two_turns(**more):
        auto = {"mamba_radix_cache_strategy": "auto"}
        engine = gpu_engine(dtype="float32", **(options | auto | more))
        (first,) = engine.generate([TEXT[:180]], max_new_tokens=520, ignore_eos=True)
        rid = engine.submit(TEXT[:180] + first + TEXT[700:709], max_new_tokens=60, ignore_eos=True)
        engine.run()
        return engine, first, engine.ids(rid), engine.last(rid).cached_tokens

    _, first, warm, cached = two_turns()
    engine, cold_first, cold, none = two_turns(disable_radix_cache=True)
    assert cached == 640 and none == 0
    prompt = TEXT[:180] + first + TEXT[700:709]
    assert same_until_near_tie(cold_first, first, engine, TEXT[:180])
    assert same_until_near_tie(cold, warm, engine, prompt)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
