"""The verify kernel as outside callers use it (Triton's interpreter reads its switch at import)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="unit")

CASES = Path(__file__).with_name("contract_verify_cases.py")


def test_verify_kernel_in_the_interpreter():
    pytest.importorskip("triton", reason="Triton is not installed")
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", str(CASES)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    report = done.stdout + done.stderr
    assert done.returncode == 0, report[-6000:]
    assert " passed" in report and " skipped" not in report, report[-2000:]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
