"""The scripts of the published comparison, end to end with the bundled model.

Mistakes caught: scripts for a GPU that break without one, figures of the wrong run or arm, tables and
pictures that leave a workload out, a measurement that is lost, and a flag that is taken and cannot work.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.repo import ROOT

register_cpu_ci(est_time=55, suite="e2e")


def script(name, *words, status=0):
    """Run one of the published scripts; return what it printed."""
    command = [sys.executable, str(ROOT / "benchmark" / "published" / name), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "words", "why"),
    [
        ("in_process.py", "--demo --out no/such/x", "--out no/such/x: no folder no/such"),
        ("in_process.py", "--demo --out {out} --arms fast", "--arms: 'fast' is not one of off"),
        ("in_process.py", "--demo --out {out} --rounds 0", "--rounds 0"),
        ("in_process.py", "--out {out} --model-path no/model", "no config.json at 'no/model'"),
        ("profile_step.py", "--demo --out no/such/x", "--out no/such/x: no folder no/such"),
        ("profile_step.py", "--out {out} --model-path no/model", "no config.json at 'no/model'"),
        (
            "profile_step.py",
            "--out {out} --from-json {bad}",
            "is no profile that this script wrote",
        ),
        (
            "profile_step.py",
            "--demo --out {out} --service-prompts -1",
            "--service-prompts -1: must be at least 0",
        ),
        ("run.py", "--demo --out {out} --accept-length nan", "--accept-length nan"),
        ("run.py", "--demo --out {out} --sample-s 0", "--sample-s 0"),
        ("run.py", "--demo --out {out} --workloads big", "--workloads: 'big' is not one of pub"),
        ("run.py", "--demo --out {out} --workloads small,small", "names something twice"),
        ("run.py", "--out {out} --workloads small --concurrency 2", "leave out --workloads or --c"),
        ("run.py", "--out {out} --small-repeats 0", "--small-repeats 0: must be at least 1"),
        ("smaller.py", "--demo --out {out} --setups eagle", "--setups: 'eagle' is not one of mtp"),
        ("smaller.py", "--demo --out {out} --repeats 0", "--repeats 0: must be at least 1"),
        ("report.py", "{bad}", "is no result of run.py"),
        ("capacity.py", "--out no/such/x", "--out no/such/x: no folder no/such"),
    ],
)
def test_a_published_script_says_what_it_cannot_use(name, words, why, tmp_path):
    """Catches a traceback, and a figure that is lost because its file cannot be written."""
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    shown = script(name, *words.format(out=tmp_path / "x.json", bad=bad).split(), status=2)
    assert why in shown and "Traceback" not in shown


def test_no_time_for_a_turn_is_no_success(tmp_path):
    out = tmp_path / "x.json"
    shown = script("in_process.py", "--demo", "--out", out, "--budget-s", -1, status=1)
    assert "--budget-s -1 left no time" in shown and not out.exists()


def test_the_published_workload_in_process(tmp_path):
    """Arms in turns, every token counted, and the plan of each arm in the record."""
    out = tmp_path / "turns.json"
    script("in_process.py", "--demo", "--out", out, "--rounds", 1)
    turns = json.loads(out.read_text())["turns"]
    assert [turn["arm"] for turn in turns] == ["off", "on"]
    for turn in turns:
        assert turn["output_tokens"] == 4 * 24 and turn["most_running"] == 4
        assert 1 <= turn["accept_length"] <= 4 and turn["seconds"] > 0
    assert turns[0]["verify_scratch_bytes"] > 5 * turns[1]["verify_scratch_bytes"]


def test_the_published_comparison(tmp_path):
    """Catches a server for each workload, arms that always go in one order, a point of the sweep that
    the published run is not drawn as, a lost wait for a first token, and a table of one workload only."""
    out, table = tmp_path / "demo.json", tmp_path / "table.md"
    words = ["--workloads", "published,small,sweep", "--rounds", "2", "--small-repeats", "2"]
    words += ["--repeats", "1", "--accept-length", "3.5"]
    shown = script("run.py", "--demo", "--out", out, "--markdown", table, *words)
    document = json.loads(out.read_text())
    assert [s["arm"] for s in document["servers"]] == ["off", "on", "on", "off"]
    measured = [run for run in document["runs"] if run["measured"]]
    counts = Counter((run["workload"]["name"], run["arm"]) for run in measured)
    names = {"demo": 2, "2 x 40/8": 4, "1 x 40/8": 4, "1 x 160/24": 1, "2 x 160/24": 1}
    assert counts == {(name, arm): n for name, n in names.items() for arm in ("off", "on")}
    discarded = [run for run in document["runs"] if not run["measured"]]
    assert len(discarded) == 4 * 3 + 2 * 2, "one warm-up before each workload; one sweep an arm"
    off, on = (next(r for r in measured if r["arm"] == arm) for arm in ("off", "on"))
    assert on["capacity"]["verify_ssm_scratch_bytes"] < off["capacity"]["verify_ssm_scratch_bytes"]
    assert on["samples"] and on["figures"]["failed"] == 0 and on["num_retracted"] == 0
    assert "pretended: 3.5" in document["acceptance"] and "pretended" in shown
    assert on["figures"]["accept_length"] > 2 and len(on["figures"]["ttfts"]) == 4
    assert document["servers"][1]["flags"][-1] == "--enable-linear-lossless-verify"
    page = table.read_text()
    assert page.count("| output, tok/s |") == len(names) == len(document["on_over_off"])
    assert " to " in page and "never slower: " in page
    script("plot.py", out, "--out", tmp_path / "pictures")
    assert {path.stem.removeprefix("published_") for path in (tmp_path / "pictures").iterdir()} == {
        *("concurrency", "time", "ttft")
    }
    drawn = (tmp_path / "pictures" / "published_concurrency.svg").read_text()
    assert "160 tokens in, 24 out" in drawn and "40 tokens in" not in drawn
    assert script("report.py", out).strip() in shown


def test_the_smaller_set_ups(tmp_path):
    """Catches a drafter that does not run on random weights, an arm or set-up left out, and the accept
    length of one width used for another."""
    out, page = tmp_path / "smaller.json", tmp_path / "smaller.md"
    script("smaller.py", "--demo", "--out", out, "--markdown", page, "--repeats", 1)
    document = json.loads(out.read_text())
    assert not document["failures"] and len(document["on_over_off"]) == 8
    rows = Counter((r["workload"]["name"].split(",")[0], r["arm"]) for r in document["runs"])
    names = ("35B MTP", "35B DFlash", "27B DFlash 2", "27B DSpark")
    assert rows == {(name, arm): 2 for name in names for arm in ("off", "on")}
    for run in document["runs"]:
        wanted = 3.5 if run["workload"]["name"].startswith("35B MTP") else 5.0
        assert abs(run["figures"]["accept_length"] - wanted) < 0.7
    off, on = (
        next(r for r in document["runs"] if r["arm"] == arm)["capacity"] for arm in ("off", "on")
    )
    assert off["verify_ssm_scratch_bytes"] > 10 * on["verify_ssm_scratch_bytes"]
    assert "27B DFlash 2 5 of 8 rows" in document["acceptance"]
    text = page.read_text()
    assert all(f"| {name}, " in text for name in names) and "| output, tok/s |" in text


def test_a_set_up_that_fails_is_named_and_the_others_go_on(tmp_path):
    out = tmp_path / "x.json"
    words = ["--demo", "--out", out, "--setups", "dflash,mtp", "--arms", "on", "--repeats", 1]
    shown = script("smaller.py", *words, "--", "--speculative-eagle-topk", 2, status=1)
    document = json.loads(out.read_text())
    (failure,) = document["failures"]
    assert failure["setup"] == "35B MTP" and "--speculative-eagle-topk 1" in failure["why"]
    assert {run["workload"]["name"].split(",")[0] for run in document["runs"]} == {"35B DFlash"}
    assert "failed: 35B MTP, on: " in shown
    script("smaller.py", *words, "--budget-s", 0.5, status=1)
    assert "--budget-s" in json.loads(out.read_text())["stopped"]


def test_a_comparison_without_time_says_so(tmp_path):
    out = tmp_path / "short.json"
    script("run.py", "--out", out, "--demo", "--budget-s", "10", status=1)
    assert "--budget-s" in json.loads(out.read_text())["stopped"]
    script("run.py", "--out", tmp_path / "x.json", "--demo", "--", "--no-such-flag", status=1)
    assert "--no-such-flag" in json.loads((tmp_path / "x.json").read_text())["stopped"]
    script("plot.py", out, "--out", tmp_path, status=2)


def test_the_profile_of_a_step(tmp_path):
    out = tmp_path / "profile.json"
    words = [
        "--steps",
        "2",
        "--warmup-steps",
        "1",
        "--service-prompts",
        "3",
        "--service-steps",
        "4",
    ]
    script("profile_step.py", "--demo", "--out", out, *words)
    steps = json.loads(out.read_text())["steps"]
    assert [title.split(":")[0].split(" of ")[0] for title in steps] == [
        *("prompts in service", "prefill chunk", "verify step", "decode in service"),
    ]
    verify = next(record for title, record in steps.items() if title.startswith("verify step of 4"))
    assert verify["wall_us_per_step"] > verify["gpu_busy_us_per_step"] > 0
    assert verify["kernels"] and verify["num_steps"] == 2
    prompts, decode = steps["prompts in service: 3 x 700"], list(steps.values())[-1]
    assert prompts["num_steps"] == -(-3 * 700 // 512) and decode["num_steps"] == 4
    for record in (prompts, decode):
        assert 0 < record["gpu_idle_share_of_wall"] < 1 and record["wall_us_per_step"] > 0
        assert record["copies_to_host"] == 0 and record["copies_beside_work_share"] is None
    assert "3 prompts of 700 tokens in 5 steps" in prompts["notes"][0]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
