"""The real FP8 kernels on the CPU, in Triton's interpreter, and on a GPU where there is one; and
compiled for Hopper at the shapes of the served models, which needs no GPU."""

from __future__ import annotations

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.kernel_cases import run_cases

register_cpu_ci(est_time=35, suite="kernels")
register_cuda_ci(est_time=60, stage="base-b", runner_config="1-gpu-large")


def test_kernels_agree_with_the_reference_in_the_interpreter():
    pytest.importorskip("triton", reason="Triton is not installed")
    run_cases(__file__, "fp8_interpreter_cases.py", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_agree_with_the_reference_on_the_gpu():
    run_cases(__file__, "fp8_interpreter_cases.py", TRITON_INTERPRET="0")


def arguments(tile, *, gated: bool) -> dict:
    """Of ``compile_kernel`` for a product of one tile at the shapes of the served models."""
    import triton.language as tl

    part = tile.block_n // tile.parts
    kinds = [
        f"tensordesc<fp8e4nv[{rows}, 128]>" if tile.descriptors else "*fp8e4nv"
        for rows in (tile.block_m, part)
    ]
    constants = {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": part,
        "PARTS": tile.parts,
        "GROUP": 128,
        "GROUP_M": tile.group_m,
        "EVEN_K": True,
        "DESCRIPTORS": tile.descriptors,
        "WEIGHTS_FIRST": tile.weights_first,
        "SCALE_STAGES": tile.num_stages if tile.scales_ahead else None,
        "SPLITS": tile.splits,
        "GATED": gated,
        "ROUND_TO": tl.bfloat16,
    }
    return {
        "pointers": dict(zip(("x", "w"), kinds, strict=True))
        | dict.fromkeys(("p_x_scale", "p_w_scale", "p_out_scale"), "*fp32")
        | {"p_out": "*fp8e4nv" if gated else "*bf16" if tile.splits == 1 else "*fp32"},
        "constants": constants,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def tiles_of(*, amd: bool) -> set:
    """(tile, whether it is gated) of one maker's table."""
    from sglang.kernels.ops.quantization.launch import gemm_tiles

    table = gemm_tiles(amd=amd)
    plain = {(tile, False) for tile in (table.few, table.few_wide, table.many, table.split_few)}
    return plain | {(tile, True) for tile in (table.gated_few, table.gated_many)}


def test_product_compiles_for_hopper_into_fp8_instructions():
    """A tile that does not fit the chip, or a product that is widened to 16 bits first."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from sglang.kernels.ops.quantization.fp8_kernels import block_scaled_gemm_kernel
    from sglang.test.compile_kernels import compile_for_hopper

    for tile, gated in tiles_of(amd=False):
        ptx = compile_for_hopper(block_scaled_gemm_kernel, **arguments(tile, gated=gated))
        assert "wgmma.mma_async" in ptx and ".e4m3.e4m3" in ptx
        assert ("cp.async.bulk.tensor" in ptx) == tile.descriptors


def test_product_compiles_for_amd():
    """A tile of more shared memory than there is. gfx942 has no e4m3 of this kind and widens it."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from sglang.kernels.ops.quantization.fp8_kernels import block_scaled_gemm_kernel
    from sglang.test.compile_kernels import AMD, compile_kernel

    for target in AMD:
        for tile, gated in tiles_of(amd=True):
            texts = compile_kernel(
                block_scaled_gemm_kernel, target=target, **arguments(tile, gated=gated)
            )
            assert ("f8f6f4" in texts["amdgcn"]) == (target.arch == "gfx950")


def test_quantiser_compiles_for_hopper_with_wide_accesses():
    """Narrow loads and stores would make it the slowest part of a product of few rows."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from sglang.kernels.ops.quantization import launch
    from sglang.kernels.ops.quantization.fp8_kernels import quantize_kernel
    from sglang.test.compile_kernels import compile_for_hopper

    ptx = compile_for_hopper(
        quantize_kernel,
        pointers={
            "p_x": "*bf16",
            "p_q": "*fp8e4nv",
            "p_scale": "*fp32",
            "num_columns": "i32",
        },
        constants={"GROUP": 128, "BLOCK_G": launch.QUANTIZE_GROUPS},
        num_warps=launch.QUANTIZE_WARPS,
    )
    assert "ld.global.v4" in ptx and "cvt.rn.satfinite.e4m3x2.f32" in ptx


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
