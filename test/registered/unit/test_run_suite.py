"""The suite runner: what it selects, what it counts, and when it fails."""

from __future__ import annotations

import argparse
import re

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.repo import load_script

register_cpu_ci(est_time=15, suite="unit")

BODY = """
import pytest
register_cpu_ci(est_time=1, suite="{suite}"{extra})
def test_pass(): pass
@pytest.mark.skip(reason="needs a GPU")
def test_skip(): pass
{more}
if __name__ == "__main__":
    pytest.main([__file__])
"""
IMPORT = "from sglang.test.ci.ci_register import register_cpu_ci"


@pytest.fixture
def runner(tmp_path, monkeypatch):
    module = load_script("test/run_suite.py")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "REGISTERED", tmp_path / "test" / "registered")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # a quicker start
    return module


@pytest.fixture
def add(tmp_path):
    def add_file(name: str, suite: str = "unit", extra: str = "", more: str = "") -> None:
        folder = tmp_path / "test" / "registered" / suite
        folder.mkdir(parents=True, exist_ok=True)
        body = IMPORT + BODY.format(suite=suite, extra=extra, more=more)
        (folder / name).write_text(body)

    return add_file


def options(**changes) -> argparse.Namespace:
    values = {
        "backend": "cpu",
        "suite": None,
        "nightly": False,
        "partition_id": 0,
        "partition_size": 1,
    }
    return argparse.Namespace(**{**values, **changes})


def test_a_suite_in_two_processes(runner, add, capfd):
    """A file that no process or both run, a failure or an output lost in the second one."""
    for i, more in enumerate(("", 'def test_no(): raise ValueError("from the second")', "")):
        add(f"test_k{i}.py", suite="kernels", more=more)
    add("test_alone.py")
    suites = runner.select(options())
    outcome = runner.run_suite("kernels", suites["kernels"], [])
    assert (outcome.passed, outcome.failed, outcome.skipped) == (3, 1, 3)
    shown = capfd.readouterr().out
    assert "from the second" in shown and shown.count(" passed") == min(2, runner.os.cpu_count())
    alone = runner.run_suite("kernels", suites["unit"], [])
    assert (alone.passed, alone.failed) == (1, 0)


def test_selects_by_backend_suite_and_cadence(runner, add, capsys):
    add("test_e.py", "e2e")
    add("test_u.py")
    add("test_n.py", extra=", nightly=True")
    add("test_d.py", extra=", disabled='waits for a fix'")
    suites = runner.select(options())
    assert list(suites) == ["unit", "e2e"]
    assert [t.filename for t in suites["unit"]] == ["test/registered/unit/test_u.py"]
    assert "waits for a fix" in capsys.readouterr().out
    assert len(runner.select(options(nightly=True))["unit"]) == 2
    assert list(runner.select(options(suite="e2e"))) == ["e2e"]
    assert runner.select(options(backend="cuda")) == {}


def test_partitions_cover_everything_once(runner, add):
    for name in "abc":
        add(f"test_{name}.py")
    shares = [runner.select(options(partition_id=i, partition_size=2)) for i in range(2)]
    names = sorted(t.filename for share in shares for t in share["unit"])
    assert [n[-4] for n in names] == ["a", "b", "c"]


def run(runner, capfd, monkeypatch, *words: str) -> tuple[int, list[str]]:
    monkeypatch.setattr("sys.argv", ["run_suite.py", *words, "--", "-p", "no:cacheprovider"])
    status = runner.main()
    return status, capfd.readouterr().out.splitlines()


def test_counts_and_reasons_close_the_output(runner, add, capfd, monkeypatch):
    add("test_a.py")
    add("test_b.py", "e2e")
    status, lines = run(runner, capfd, monkeypatch)
    assert status == 0, "\n".join(lines)
    assert lines[-1] == "2 passed, 0 failed, 2 skipped"
    assert any(re.match(r"slowest: (unit/test_a|e2e/test_b) \d+ s, ", line) for line in lines)
    assert any("skipped 2: needs a GPU" in line for line in lines)


@pytest.mark.parametrize(
    ("more", "closing"),
    [
        ("def test_bad(): assert False", "1 passed, 1 failed, 1 skipped"),
        ("raise OSError('no import')", "0 passed, 1 failed, 0 skipped"),
        ("import os; os._exit(9)", "0 passed, 1 failed, 0 skipped"),
    ],
)
def test_failures_of_every_kind_fail_the_run(more, closing, runner, add, capfd, monkeypatch):
    add("test_a.py", more=more)
    status, lines = run(runner, capfd, monkeypatch)
    assert status == 1
    assert lines[-1] == closing


def test_a_run_without_tests_fails(runner, add, capfd, monkeypatch):
    add("test_a.py")
    assert run(runner, capfd, monkeypatch, "--suite", "absent")[0] == 1


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
