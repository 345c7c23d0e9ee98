"""Requests made up from the server's own OpenAPI description."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.front_end_case import FakeServer, write_front_end_model

register_cpu_ci(est_time=30, suite="e2e")

EXAMPLES = 6


@pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None, reason="schemathesis is not installed"
)
def test_generated_requests_never_break_the_server(tmp_path):
    """Catches a body that the description allows and the server answers with a 5xx, or not at all
    (F88); and a description that the tool cannot read."""
    model = write_front_end_model(tmp_path / "model")
    with FakeServer(model) as server:
        server.wait_ready()
        command = [
            *(sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"),
            *("run", server.url + "/openapi.json", "--checks", "not_a_server_error"),
            *("--phases", "coverage,fuzzing", "--max-examples", str(EXAMPLES), "--seed", "1"),
            *("--request-timeout", "20", "--no-color"),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=500, cwd=tmp_path, check=False
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        tested = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
        assert tested and int(tested[1]) == int(tested[2]) > 500
        assert server.counts()["num_running"] == 0
        assert server.status("/health") == 200
        assert "Traceback" not in server.log()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
