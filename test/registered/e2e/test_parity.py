"""The parity tool over real servers: passes as it should, and finds mistakes planted in the replay.

Mistakes caught: a tool that compares nothing (equal by construction), that looks at tokens alone
(an error of one unit in the last place leaves them as they are), or that never resumes a turn from
a tracked state (a commit in the wrong order spoils only that).
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from sglang.parity.cli import main
from sglang.test.ci.ci_register import register_amd_ci, register_cpu_ci, register_cuda_ci
from sglang.test.faulty_scheduler import FAULT_VARIABLE

register_cpu_ci(est_time=90, suite="e2e")
register_cuda_ci(est_time=240, stage="base-b", runner_config="1-gpu-large")
register_amd_ci(est_time=240, suite="stage-b-test-1-gpu-large-amd")
register_amd_ci(est_time=240, suite="stage-b-test-1-gpu-small-amd-mi35x")

FAULTY = ("sglang.test.launch_with_scheduler", "sglang.test.faulty_scheduler")
SHORT = ["--model-path", "demo", "--short"]


def test_lossless_equals_default(tmp_path, capsys):
    """The short form of the command that users run."""
    report, page = tmp_path / "report.json", tmp_path / "report.html"
    status = main([*SHORT, "--json", str(report), "--html", str(page)])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "verdict: equal" in printed
    (found,) = json.loads(report.read_text())["algorithms"]
    assert found["state_digests"] == found["comparisons"] == 6
    assert found["across"]["turn 2"]["cached"] == [512]
    assert found["accept_length"] > 1
    assert {side for side, groups in found["within"].items() if groups} == {"default", "lossless"}
    servers = found["servers"]
    assert servers["lossless"]["lossless"] and not servers["default"]["lossless"]
    assert servers["lossless"]["scratch_bytes"] < servers["default"]["scratch_bytes"] / 8
    assert "Parity: equal" in page.read_text()


def planted(fault, workload, tmp_path, monkeypatch):
    """Exit status and report of a run whose replay has a mistake in it."""
    monkeypatch.setenv(FAULT_VARIABLE, fault)
    report = tmp_path / "report.json"
    command = [*SHORT, "--workloads", workload, "--json", str(report)]
    status = main(command, launcher=FAULTY)
    return status, json.loads(report.read_text())["algorithms"][0]


def test_one_ulp_in_replay_is_found(tmp_path, monkeypatch):
    """The tokens stay the same; the digest tells."""
    status, found = planted("ulp", "single", tmp_path, monkeypatch)
    assert status == 1 and found["verdict"] == "NOT equal"
    differences = found["across"]["single"]["differences"]
    assert [d["position"] for d in differences] == [-1, -1]
    assert all(g["equal"] == g["total"] for g in found["within"]["lossless"].values())


def test_commit_before_track_is_found(tmp_path, monkeypatch):
    """The turn that resumes from the spoiled boundary state differs."""
    status, found = planted("order", "multi-turn", tmp_path, monkeypatch)
    assert status == 1
    assert found["across"]["turn 2"]["differences"]


def test_a_terminated_comparison_leaves_no_server_behind():
    """Both servers have a group of their own to be found by: that of the tool."""
    tool = subprocess.Popen(
        [sys.executable, "-m", "sglang.parity", *SHORT],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    for line in tool.stderr:
        if "run 1" in line:
            break
    assert len(group_members(tool.pid)) > 1
    tool.send_signal(signal.SIGTERM)
    tool.communicate(timeout=60)
    assert tool.returncode == 128 + signal.SIGTERM
    assert group_members(tool.pid) == []


def group_members(group):
    """Living processes of a process group."""
    listed = subprocess.run(["ps", "-eo", "pid=,pgid=,stat="], capture_output=True, text=True)
    rows = [line.split() for line in listed.stdout.splitlines()]
    return [int(pid) for pid, pgid, stat in rows if int(pgid) == group and "Z" not in stat]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
