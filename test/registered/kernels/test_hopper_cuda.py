"""The CUDA kernel of FP8 products: on a GPU of compute capability 9.0 against the Gluon kernel; compiled where
NVRTC is installed, which needs no GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from sglang.kernels.ops.quantization import hopper_cuda
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.kernel_cases import run_cases

register_cpu_ci(est_time=5, suite="kernels")
register_cuda_ci(est_time=60, stage="base-b", runner_config="1-gpu-large")


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a GPU of compute capability 9.0",
)
def test_the_cuda_product_has_the_bits_of_the_gluon_kernel():
    # for what it shares with the checks of the Gluon kernel
    path = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    run_cases(__file__, "hopper_cuda_cases.py", TRITON_INTERPRET="0", PYTHONPATH=path)


@pytest.mark.skipif(not hopper_cuda.HAS_BINDINGS, reason="needs cuda-bindings with NVRTC")
@pytest.mark.parametrize(
    ("share", "grouped", "gated"), [(1, False, False), (2, True, True), (2, True, False)]
)
def test_the_cuda_product_compiles(share, grouped, gated):
    tile = hopper_cuda.CudaTile(share, turns=True)
    assert hopper_cuda.compile_cubin(tile, grouped=grouped, gated=gated)[:4] == b"\x7fELF"


def test_a_device_that_cannot_run_it_is_named():
    assert "no NVIDIA GPU" in str(hopper_cuda.unavailable_reason(torch.device("cpu")))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
