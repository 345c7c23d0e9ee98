"""Workloads, tables and timelines of the published comparison, without a server.

Mistakes caught: a sweep whose lengths are not the published ones, arms that always go in one order, a
ratio of unequal things, a slower workload that a table hides, and flags that are taken and cannot work.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from sglang.srt.arg_groups import basic_hook
from sglang.srt.arg_groups.pipeline import run_resolution_pipeline
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.planner import make_plan
from sglang.srt.server_args import prepare_server_args
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.plan_cases import model
from sglang.test.repo import ROOT

register_cpu_ci(est_time=3, suite="unit")


@pytest.fixture(scope="module", autouse=True)
def published_on_path():
    folder = str(ROOT / "benchmark" / "published")
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)


def workloads(*words):
    from run import chosen_workloads, read_arguments

    return chosen_workloads(read_arguments(["--out", "x.json", *words]))


def test_workloads_of_a_command_line():
    from setups import PUBLISHED, SMALL, is_in

    assert workloads() == [PUBLISHED]
    every = workloads("--workloads", "small,published,sweep")
    assert tuple(every[:2]) == SMALL and every[2] == PUBLISHED
    assert [is_in("small", w) for w in every] == [True] * 2 + [False] * 5
    assert [is_in("sweep", w) for w in every] == [False] * 3 + [True] * 4
    assert {(w.input_len, w.output_len) for w in every[2:]} == {(26_000, 2_000)}
    assert [(w.requests, w.concurrency) for w in every[2:]] == [
        *((25, 25), (1, 1), (4, 4), (8, 8), (16, 16)),
    ]
    names = [w.name for w in every]
    assert len(set(names)) == len(names), "results are told apart by name"
    own = workloads("--concurrency", "1,2", "--waves", "3", "--output-len", "8")
    assert [(w.requests, w.concurrency, w.output_len) for w in own] == [(3, 1, 8), (6, 2, 8)]
    (other,) = workloads("--requests", "3", "--demo")
    assert other.requests == other.concurrency == 3 and other.input_len == 160


def test_every_second_round_goes_backwards():
    from setups import in_turn

    assert [in_turn(["off", "on"], i) for i in range(3)] == [
        *(["off", "on"], ["on", "off"], ["off", "on"]),
    ]


def test_a_budget_expects_starts_as_fast_as_the_fastest(monkeypatch):
    """Catches a first start, which compiles, that keeps a later one from its turn; and runs that are
    begun without the time of the longest of their kind."""
    import served_turn

    clock = [0.0]
    monkeypatch.setattr(served_turn.time, "monotonic", lambda: clock[0])
    session = served_turn.Session(Namespace(budget_s=115.0), "m", [], started=0.0)
    assert session.left_s() == 100 and session.has_time_for_a_server()
    session.started_in(90.0)
    session.took("run", 20.0)
    session.took("run", 10.0)
    session.started_in(40.0)
    clock[0] = 50.0
    assert session.has_time_for_a_server(), "40 s in 50"
    clock[0] = 60.0
    assert session.has_time_for("run") and "stopped" not in session.document
    assert not session.has_time_for_a_server()
    assert "no time for a server's start and first run: 40 s left" in session.document["stopped"]
    clock[0] = 79.0
    assert not session.has_time_for("run")


def document(**rates):
    """A result whose workloads are named by the keys: (off rates, on rates)."""
    figures = dict.fromkeys(
        ("input_throughput", "mean_ttft_ms", "mean_tpot_ms", "p99_itl_ms", "failed"), 1.0
    )
    capacity = dict.fromkeys(
        ("verify_ssm_scratch_bytes", "verify_scratch_bytes", "max_total_num_tokens"), 64
    )
    runs = [
        {
            "arm": arm,
            "measured": rate > 0,
            "workload": {"name": name},
            "figures": figures
            | {"output_throughput": abs(rate), "duration": 100 / abs(rate), "accept_length": 2.0},
            "capacity": capacity,
            "max_running_seen": 1,
        }
        for name, both in rates.items()
        for arm, values in zip(("off", "on"), both, strict=True)
        for rate in values
    ]
    machine = {"gpu": "a GPU", "torch": "2", "triton": "3", "commit": "c"}
    words = dict.fromkeys(("date", "model", "weights", "acceptance", "warm_up"), "said")
    return {"machine": machine, **words, "arms": {"off": [], "on": []}, "runs": runs}


def test_ratios_are_of_medians_and_leave_warm_ups_out():
    from report import markdown, never_slower, ratios

    made = document(
        fast=([-1, 10, 12, 11], [22, 1000, 20]),
        slow=([10], [9]),
        near=([10, 12], [11, 13]),
        lone=([5], []),
    )
    fast, slow, near = ratios(made)
    assert fast == {"workload": "fast", "ratio": 2.0, "runs": [3, 3], "overlap": False}
    assert slow["ratio"] == 0.9 and not slow["overlap"] and near["overlap"]
    line = never_slower(made)
    assert line.startswith("never slower: no, in 1 of 3;") and "slow: 0.900" in line
    assert "near: 1.091 (runs overlap)" in line
    assert never_slower(document(fast=([1], [2]))).startswith("never slower: yes;")
    assert "not known" in never_slower(document(lone=([5], [])))
    page = markdown(made)
    assert "| output, tok/s | 11.0 (10.0 to 12.0) | 22.0 (20.0 to 1,000.0) | +100.0 % |" in page
    assert "| output, tok/s | 10.0 | 9.0 | -10.0 % |" in page, "one run has no spread"
    assert "| output over accept length, 1/s | 5.5 | 11.0 | +100.0 % |" in page
    assert page.rstrip().endswith(line)


def test_the_published_run_is_the_last_point_of_the_sweep():
    """Catches a sweep drawn with points of other lengths, and a single point drawn as a sweep."""
    from plot import of_one_length

    runs = [
        {"workload": vars(w)}
        for w in workloads("--workloads", "small,published,sweep")
        for _ in "ab"
    ]
    swept = of_one_length(runs)
    assert sorted({run["workload"]["concurrency"] for run in swept}) == [1, 4, 8, 16, 25]
    assert {run["workload"]["input_len"] for run in swept} == {26_000} and len(swept) == 10
    assert of_one_length(runs[4:6]) == []


def test_a_result_from_before_waits_were_kept_is_drawn(tmp_path, capsys):
    """Catches a picture that needs what older results do not hold."""
    import plot

    made, stored = document(one=([10], [20])), tmp_path / "old.json"
    for run in made["runs"]:
        run["workload"] |= {"concurrency": 4, "input_len": 9, "output_len": 9}
        run["samples"] = []
    stored.write_text(json.dumps(made))
    assert plot.main([str(stored), "--out", str(tmp_path)]) == 0
    assert [Path(line).stem for line in capsys.readouterr().out.split()] == [
        *("published_time", "published_ttft"),
    ]
    drawn = (tmp_path / "published_ttft.svg").read_text()
    assert drawn.count("(dashed: mean, 0.00 s)") == 2


@pytest.mark.parametrize("runs", ["3", "[{}]", "[3]", '[{"measured": true, "workload": {}}]'])
def test_what_is_no_result_is_not_drawn(runs, tmp_path, capsys):
    """Catches a traceback for JSON that another program wrote."""
    import plot
    import report

    stored = tmp_path / "other.json"
    stored.write_text(f'{{"runs": {runs}, "machine": {{}}, "arms": {{}}}}')
    for program, words in ((plot, ["--out", str(tmp_path)]), (report, [])):
        with pytest.raises(SystemExit, match="2"):
            program.main([str(stored), *words])
        assert f"{stored}: " in capsys.readouterr().err


def test_files_that_cannot_be_written_are_refused_first(tmp_path, capsys):
    """Catches a run that is measured and then lost."""
    import capacity
    import run
    import smaller

    for program in (run, smaller):
        for words in (["--out", str(tmp_path)], ["--out", "x", "--markdown", str(tmp_path)]):
            with pytest.raises(SystemExit, match="2"):
                program.read_arguments(words)
            assert "is a folder; name a file in it" in capsys.readouterr().err
    for program, words in (
        (capacity.main, ["--device-memory-gb", "nan"]),
        (run.read_arguments, ["--out", "x", "--accept-length", "inf"]),
        (run.read_arguments, ["--out", "x", "--accept-length", "99"]),
        (run.read_arguments, ["--out", "x", "--demo", "--model-path", "m"]),
        (run.read_arguments, ["--out", "x", "--concurrency", "1,2,1"]),
    ):
        with pytest.raises(SystemExit, match="2"):
            program(words)


def test_a_result_is_whole_or_the_one_before(tmp_path):
    """Catches a file cut in half by a kill in the middle of a write."""
    from setups import write_json

    out = tmp_path / "x.json"
    write_json(out, {"runs": [1]})
    with pytest.raises(TypeError):
        write_json(out, {"runs": [object()]})
    assert json.loads(out.read_text()) == {"runs": [1]}
    write_json(out, {"runs": [2]})
    assert json.loads(out.read_text()) == {"runs": [2]}
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_a_profile_of_something_else_is_refused(tmp_path, capsys):
    """Catches a traceback for steps that are no table of steps."""
    import profile_step

    stored = tmp_path / "steps.json"
    stored.write_text('{"steps": []}')
    words = ["--from-json", str(stored), "--out", str(tmp_path / "again.json")]
    assert profile_step.main(words) == 2
    assert "is no profile that this script wrote" in capsys.readouterr().err


def test_steps_of_nothing_are_not_profiled():
    """Catches tables of idle steps, after requests that were refused or had ended."""
    from step_bench import StepBench

    bench = object.__new__(StepBench)
    bench._args, bench._scheduler = Namespace(requests=4), Namespace(running=[1, 2, 3])
    assert bench._still_running() == 3, "as many as fit"
    with pytest.raises(ValueError, match="3 of 4 requests still decode"):
        bench._still_running(4)
    bench._scheduler.running.clear()
    with pytest.raises(ValueError, match="0 of 4 requests still decode.*lower --context"):
        bench._still_running()


def test_an_ended_program_ends_its_server(tmp_path, monkeypatch):
    """Catches a server that outlives `timeout run.py`, and results that are then lost."""
    import run

    def ended(session, arm, round_index):
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("SIGTERM was not taken")

    monkeypatch.setattr(run, "run_arm", ended)
    out, before = tmp_path / "x.json", signal.getsignal(signal.SIGTERM)
    assert run.main(["--out", str(out), "--demo"]) == 1
    assert json.loads(out.read_text())["stopped"] == "interrupted"
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_interrupted_set_up_is_told(tmp_path, monkeypatch, capsys):
    """Catches tables that are lost with the set-up that Ctrl-C ended."""
    import smaller
    from setups import in_plain_words

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(smaller, "run_turn", interrupted)
    out = tmp_path / "x.json"
    assert smaller.main(["--out", str(out), "--demo", "--setups", "mtp"]) == 1
    assert json.loads(out.read_text())["stopped"] == "interrupted"
    assert in_plain_words(interrupted) == 130
    assert "--out holds what was measured" in capsys.readouterr().err


def test_copies_to_the_host_beside_kernels():
    """Catches a copy that counts as work of the GPU, overlap counted twice, and waits of other steps."""
    from kernel_table import Event, overlap_us, service_notes, service_record

    copy = "Memcpy DtoH (Device -> Pinned)"
    events = [
        Event("gemm_kernel", 0, 100),
        Event("gemm_kernel", 50, 100),  # two streams: 0 to 150 is busy
        Event(copy, 100, 100),  # 50 of it beside kernels, then alone
        Event("Memcpy HtoD (Pinned -> Device)", 155, 5),
        Event("rms_norm_kernel", 230, 20),
        Event(copy, 240, 20),
    ]
    record = service_record(events, num_steps=2, wall_us=500.0)
    assert record["gpu_busy_us_per_step"] * 2 == 150 + 5 + 20
    assert record["gpu_idle_share"] == pytest.approx(75 / 250)
    assert record["gpu_idle_share_of_wall"] == pytest.approx(1 - 175 / 500)
    assert (record["copies_to_host"], record["copies_to_host_us"]) == (2, 120)
    assert record["copies_beside_work_share"] == pytest.approx((50 + 5 + 10) / 120)
    assert record["long_waits_per_step"] == 0.5 and record["longest_wait_us"] == 70
    assert record["long_waits_share"] == pytest.approx(70 / 250), "5 us is a short wait"
    assert all(row["name"] != copy for row in record["kernels"])
    assert "54.2 % of it beside other work" in service_notes(record)[2]
    alone = service_record(events[:2], num_steps=1, wall_us=150.0)
    assert alone["copies_beside_work_share"] is None and alone["long_waits_per_step"] == 0
    assert overlap_us(events[:2], events[:2]) == 150


def test_floors_of_whole_prompts():
    """Catches chunks that all start at 0, a short last chunk taken for a full one, and prompts summed
    where a step is asked for."""
    from floors import StepShape, floors, prompts_floors

    config = model("Qwen3.6-35B-A3B-FP8")
    chunks = [
        floors(config, StepShape(1, n, at)) for n, at in ((8192, 0), (8192, 8192), (1616, 16384))
    ]
    found = prompts_floors(config, 4, 18_000, 8_192, num_steps=9)
    for family, us in found.items():
        assert us == pytest.approx(4 / 9 * sum(chunk[family] for chunk in chunks))


@pytest.mark.parametrize("name", ["mtp", "dflash", "dflash2", "dspark"])
def test_the_smaller_set_ups_plan_as_published(name, tmp_path, monkeypatch):
    """The script's own flags on a GPU of 80 GB, and what they free: no width, slot or drafter is off."""
    from smaller import ACCEPT_LENGTHS, KINDS, flags_of

    monkeypatch.setattr(basic_hook, "has_nvidia_driver", lambda: True)
    setup, plans = KINDS[name], []
    for arm in ("off", "on"):
        flags = flags_of(setup, tmp_path / arm, arm, demo=False)
        args = run_resolution_pipeline(prepare_server_args(flags))
        plans.append(make_plan(ModelConfig.from_path(args.model_path), args))
    for plan, scratch in zip(plans, setup.scratch_gib, strict=True):
        assert round(plan.verify_ssm_scratch_bytes / (1 << 30), 2) == scratch
        assert (plan.max_running_requests, plan.num_state_slots) == (8, 40)
        assert plan.draft_tokens == setup.draft_tokens > ACCEPT_LENGTHS[setup.draft_tokens]
    gained = plans[1].max_total_num_tokens - plans[0].max_total_num_tokens
    assert gained == pytest.approx(setup.gained_tokens, abs=64)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
