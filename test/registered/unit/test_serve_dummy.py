"""benchmark/gpu_smoke/serve_dummy.py on a tiny geometry on the CPU: what it runs, checks and writes."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.make_checkpoint import make_checkpoint
from sglang.test.repo import ROOT

register_cpu_ci(est_time=10, suite="unit")

SMALL = ["--requests", "3", "--input-len", "90", "--output-len", "5", "--chunk", "64"]
HOST = ["--device", "cpu", "--device-memory-gb", "2", "--max-total-tokens", "1024"]


@pytest.fixture(scope="module")
def script():
    path = ROOT / "benchmark" / "gpu_smoke" / "serve_dummy.py"
    spec = importlib.util.spec_from_file_location("serve_dummy", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = make_checkpoint(tmp_path_factory.mktemp("tiny") / "m", arch="qwen3_5_moe", dtype="fp8")
    return str(path / "config.json")


@pytest.mark.parametrize("more", [[], ["--algorithm", "none"], ["--no-lossless"]])
def test_a_good_run_is_reported(more, script, config, tmp_path):
    out = tmp_path / "deep" / "out.json"
    assert script.main(["--model", config, *SMALL, *HOST, "--out", str(out), *more]) == 0
    report = json.loads(out.read_text())
    assert report["errors"] == []
    assert report["serving"]["output_tokens"] == 15
    assert report["serving"]["input_tokens"] == 270
    assert report["memory"]["planned_total"] > 0
    assert report["plan"]["max_total_num_tokens"] == 1024


def test_what_goes_wrong_is_named_and_gives_status_1(script, config, tmp_path, monkeypatch):
    """Lost tokens, NaN in the state and a spent budget must not pass."""
    out = tmp_path / "out.json"
    command = ["--model", config, *SMALL, *HOST, "--out", str(out)]
    assert script.main([*command, "--budget-s", "0"]) == 1
    assert "not done after 0 s" in json.loads(out.read_text())["errors"][0]
    started = script.start

    def broken(options):
        engine = started(options)
        engine.state_tensors()["temporal"][:, -1] = float("nan")
        options.output_len += 1
        return engine

    monkeypatch.setattr(script, "start", broken)
    submit = script.InProcessEngine.submit

    def shorter(engine, ids, *, max_new_tokens, **rest):
        return submit(engine, ids, max_new_tokens=max_new_tokens - 1, **rest)

    monkeypatch.setattr(script.InProcessEngine, "submit", shorter)
    assert script.main(command) == 1
    errors = json.loads(out.read_text())["errors"]
    assert "request r0 got 5 of 6 tokens" in errors and "NaN or infinity in temporal" in errors


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
