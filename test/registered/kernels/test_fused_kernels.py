"""The real fused row kernels on the CPU, in Triton's interpreter, and on a GPU where there is one; and
compiled for Hopper at the shapes of the served models, which needs no GPU."""

from __future__ import annotations

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.kernel_cases import run_cases

register_cpu_ci(est_time=25, suite="kernels")
register_cuda_ci(est_time=20, stage="base-b", runner_config="1-gpu-large")


def test_kernels_agree_with_the_reference_in_the_interpreter():
    pytest.importorskip("triton", reason="Triton is not installed")
    run_cases(__file__, "fused_interpreter_cases.py", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_agree_with_the_reference_on_the_gpu():
    run_cases(__file__, "fused_interpreter_cases.py", TRITON_INTERPRET="0")


def test_kernels_compile_for_hopper():
    pytest.importorskip("triton", reason="Triton is not installed")
    from sglang.kernels.ops.fused import row_kernels
    from sglang.test.compile_kernels import compile_for_hopper

    bf16 = dict.fromkeys(("p_x", "p_delta", "p_sum", "p_out", "p_o", "p_z"), "*bf16")
    fp32 = dict.fromkeys(("p_weight", "p_cos", "p_sin"), "*fp32")
    types = bf16 | fp32 | {"p_positions": "*i64", "eps": "fp32"}
    cases = (
        (row_kernels.rms_norm_kernel, {"UNIT_OFFSET": True, "HAS_DELTA": True, "BLOCK": 2048}, 8),
        (row_kernels.gated_norm_kernel, {"SILU": True, "BLOCK": 128}, 1),
        (row_kernels.norm_rope_kernel, {"UNIT_OFFSET": True, "BLOCK": 256}, 1),
    )
    for kernel, constants, num_warps in cases:
        own = {name: kind for name, kind in types.items() if name in kernel.arg_names}
        ptx = compile_for_hopper(kernel, pointers=own, constants=constants, num_warps=num_warps)
        assert ".target sm_90" in ptx and ".entry" in ptx


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
