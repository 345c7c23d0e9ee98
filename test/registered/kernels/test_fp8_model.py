"""Whole tiny models, bf16 and FP8, through the module path that GPUs take, in Triton's interpreter."""

from __future__ import annotations

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.kernel_cases import run_cases

register_cpu_ci(est_time=35, suite="kernels")


def test_models_agree_with_the_cpu_path_in_the_interpreter():
    pytest.importorskip("triton", reason="Triton is not installed")
    cases = "fp8_model_interpreter_cases.py"
    run_cases(__file__, cases, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
