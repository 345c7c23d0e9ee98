"""The real paged-attention kernels on the CPU, in Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang.test.ci.ci_register import register_amd_ci, register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=25, suite="kernels")
register_cuda_ci(est_time=30, stage="base-b", runner_config="1-gpu-large")
register_amd_ci(est_time=30, suite="stage-b-test-1-gpu-large-amd")
register_amd_ci(est_time=30, suite="stage-b-test-1-gpu-small-amd-mi35x")

CASES = Path(__file__).with_name("paged_attention_cases.py")


def run_cases(**env: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--import-mode=importlib", str(CASES)]
    done = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=300
    )
    report = done.stdout + done.stderr
    assert done.returncode == 0, report[-6000:]
    assert " passed" in report and " skipped" not in report, report[-2000:]


def test_kernels_agree_with_the_reference_in_the_interpreter():
    pytest.importorskip("triton", reason="Triton is not installed")
    run_cases(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_agree_with_the_reference_on_the_gpu():
    run_cases(TRITON_INTERPRET="0")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
