"""The real fused row kernels on the CPU, in Triton's interpreter, and on a GPU where there is one; and
compiled for Hopper at the shapes of the served models, which needs no GPU."""

from __future__ import annotations

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.kernel_cases import run_cases

register_cpu_ci(est_time=36, suite="kernels")
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

    ptx = compile_for_hopper(
        row_kernels.norm_rope_kernel,
        pointers=dict.fromkeys(("p_x", "p_out"), "*bf16")
        | dict.fromkeys(("p_weight", "p_cos", "p_sin"), "*fp32")
        | {"p_positions": "*i64", "eps": "fp32"},
        constants={"UNIT_OFFSET": True, "BLOCK": 256},
        num_warps=1,
    )
    assert ".target sm_90" in ptx and ".entry" in ptx


@pytest.mark.parametrize("lanes", [1, 4])
def test_narrow_linear_compiles_for_hopper(lanes):
    pytest.importorskip("triton", reason="Triton is not installed")
    from sglang.kernels.ops.fused import narrow
    from sglang.kernels.ops.fused.narrow_kernel import narrow_linear_kernel
    from sglang.test.compile_kernels import compile_for_hopper

    tile = narrow.TILE if lanes > 1 else narrow.NarrowTile(16, 16, 256, 4, 3)
    ptx = compile_for_hopper(
        narrow_linear_kernel,
        pointers=dict.fromkeys(("p_x", "p_w", "p_out"), "*bf16"),
        constants={
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "LANES": tile.lanes,
            "EVEN_K": True,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    assert "mma" in ptx and "cp.async" in ptx


def test_argmax_compiles_for_hopper():
    pytest.importorskip("triton", reason="Triton is not installed")
    from sglang.kernels.ops.fused import argmax_kernels
    from sglang.test.compile_kernels import compile_for_hopper

    ptx = compile_for_hopper(
        argmax_kernels.largest_of_parts_kernel,
        pointers={"p_scores": "*bf16", "p_keys": "*i64"},
        constants={"BLOCK": 2048, "PARTS": 32},
        aligned=("num_columns",),
    )
    assert "ld.global" in ptx
    ptx = compile_for_hopper(
        argmax_kernels.largest_part_kernel,
        pointers={"p_keys": "*i64", "p_out": "*i64"},
        constants={"PARTS": 32},
        num_warps=1,
    )
    assert ".target sm_90" in ptx


NORMS = ("rms_norm", "rms_norm_wide", "rms_norm_routed", "rms_norm_split")
GATES = ("gated_norm", "gate_mul")
KINDS = [*NORMS, "rms_norm_pairs", *GATES, *(f"{gate}_pairs" for gate in GATES)]


@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("kernel", KINDS)
def test_kernels_that_quantise_compile_for_hopper_into_one_layout(kernel, quantize):
    """FP8 stores of 16 bytes a thread would move the tile into a layout whose sums add in another order,
    and quantising in the norm would change the norm."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from sglang.kernels.ops.fused import gate_kernels, row_kernels
    from sglang.kernels.ops.fused.rows import GATE_MUL, GATED_NORM
    from sglang.test.compile_kernels import compile_for_hopper

    norm = {"DELTA": "tensor", "COUNT": 0, "HAS_SHARED": False}
    norm |= {"UNIT_OFFSET": True, "PLAIN": True, "GROUP": 128, "PAIRED": False}
    routed = {"DELTA": "routed", "COUNT": 8, "HAS_SHARED": True, "BLOCK_G": 16}
    gated = {"NUM_HEADS": 32, "SIZE": 128, "BLOCK_H": GATED_NORM.elements // 128, "BLOCK": 128}
    product = {"NUM_HEADS": 16, "SIZE": 256, "BLOCK_G": GATE_MUL.elements // 128, "GROUP": 128}
    constants, num_warps = {
        "rms_norm": (norm | {"BLOCK_G": 16}, 8),
        "rms_norm_wide": (norm | {"BLOCK_G": 64}, 8),
        "rms_norm_routed": (norm | routed, 8),
        "rms_norm_split": (norm | {"DELTA": "split", "COUNT": 4, "BLOCK_G": 16}, 8),
        "gated_norm": ({"SILU": True, "PAIRED": False} | gated, GATED_NORM.num_warps),
        "gate_mul": ({"SILU": True, "PAIRED": False} | product, GATE_MUL.num_warps),
    }[kernel.removesuffix("_pairs")]
    if kernel.endswith("_pairs"):
        constants = constants | {"PAIRED": True}
    function = {
        "gated_norm": gate_kernels.gated_norm_kernel,
        "gate_mul": gate_kernels.gate_mul_kernel,
    }.get(kernel.removesuffix("_pairs"), row_kernels.rms_norm_kernel)
    halves = ("p_x", "p_delta", "p_sum", "p_out", "p_o", "p_z", "p_gate", "p_shared", "p_weights")
    types = dict.fromkeys(halves, "*bf16") | {"p_chosen": "*i32"}
    types |= {"p_weight": "*fp32", "p_scale": "*fp32", "p_q": "*fp8e4nv", "eps": "fp32"}
    if kernel == "rms_norm_split":
        types["p_delta"] = "*fp32"
    if quantize and not kernel.startswith("rms"):
        types["p_out"] = "*fp8e4nv"
    ptx = compile_for_hopper(
        function,
        pointers={name: kind for name, kind in types.items() if name in function.arg_names},
        constants=constants | {"QUANTIZE": quantize},
        num_warps=num_warps,
        aligned=("size",),
    )
    assert "ld.global.v4" in ptx
    if kernel.endswith("pairs"):
        assert "cvt.rn.bf16.f32" not in ptx and ptx.count("div.rn.f32") <= 2 * quantize
    assert ("st.global.v2.b32" in ptx) == quantize, "8 FP8 results a thread, as many as bf16 inputs"


@pytest.mark.parametrize("units", range(4))
def test_a_reciprocal_in_two_parts_divides_exactly(units):
    """Every pair of bf16 mantissas, the reciprocal being ``units`` of its last place too small; without the
    second part some quotients are wrong (the control)."""
    mantissas = 1.0 + torch.arange(128) / 128
    scale = (mantissas / 448.0)[:, None]
    first = 1.0 / scale
    above = scale.double() * first.double() > 1.0
    first = (first.view(torch.int32) - above.int() - units).view(torch.float32)
    second = (1.0 - scale.double() * first.double()).float() * first
    wrong = 0
    for octave in range(20):
        x = (mantissas * 2.0**-octave)[None, :]
        quotient = (x.double() * first.double() + (x * second).double()).float()
        assert torch.equal(quotient, x / scale)
        wrong += int((x * first != x / scale).sum())
    assert wrong


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
