"""The real MoE kernels on the CPU, in Triton's interpreter, and on a GPU where there is one; and
compiled for Hopper at the shapes of the served models, which needs no GPU."""

from __future__ import annotations

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.kernel_cases import run_cases

register_cpu_ci(est_time=22, suite="kernels")
register_cuda_ci(est_time=40, stage="base-b", runner_config="1-gpu-large")


def test_kernels_agree_with_the_reference_in_the_interpreter():
    pytest.importorskip("triton", reason="Triton is not installed")
    run_cases(__file__, "moe_interpreter_cases.py", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_agree_with_the_reference_on_the_gpu():
    run_cases(__file__, "moe_interpreter_cases.py", TRITON_INTERPRET="0")


def arguments(tile, kind: str) -> dict:
    """Of ``compile_kernel`` for a grouped product; kind "gated" is FP8 and makes FP8 rows."""
    import triton.language as tl

    fp8, gated = kind in ("fp8", "gated"), kind == "gated"
    part = tile.block_n // tile.parts
    element = "*fp8e4nv" if fp8 else f"*{kind}"
    scale = "*fp32" if fp8 else element
    constants = {
        "TOP_K": 8,
        "X_BY_PAIR": not gated,
        "FP8": fp8,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": part,
        "BLOCK_K": 128 if fp8 else tile.block_k,
        "PARTS": tile.parts,
        "EVEN_K": True,
        "DESCRIPTORS": tile.descriptors,
        "WEIGHTS_FIRST": tile.weights_first,
        "SCALE_STAGES": tile.num_stages if tile.scales_ahead else None,
        "GATED": gated,
        "ROUND_TO": tl.bfloat16,
    }
    pointers = {
        "p_x": element,
        "w": f"tensordesc<fp8e4nv[{part}, 128]>" if tile.descriptors else element,
        "p_x_scale": scale,
        "p_w_scale": scale,
        "p_out": {"fp32": "*fp32", "gated": "*fp8e4nv"}.get(kind, "*bf16"),
        "p_out_scale": "*fp32",
        "p_pairs": "*i32",
        "p_tile_experts": "*i32",
    }
    return {
        "pointers": pointers,
        "constants": constants,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


@pytest.mark.parametrize("kind", ["fp8", "bf16", "fp32", "gated"])
@pytest.mark.parametrize("rows", [100, 8192])
def test_grouped_product_compiles_for_hopper(kind, rows):
    """A tile that does not fit the chip, or FP8 that is widened to 16 bits first."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from sglang.kernels.ops.moe.grouped_gemm_kernel import grouped_gemm_kernel
    from sglang.kernels.ops.moe.launch import expert_tiles
    from sglang.test.compile_kernels import compile_for_hopper

    fp8 = kind in ("fp8", "gated")
    tiles = expert_tiles(rows, 4 if kind == "fp32" else 2, fp8=fp8)
    tile = tiles.down if kind == "fp8" else tiles.up
    ptx = compile_for_hopper(grouped_gemm_kernel, **arguments(tile, kind))
    if kind != "fp32":
        operands = ".e4m3.e4m3" if fp8 else ".bf16.bf16"
        assert operands in ptx and "wgmma.mma_async" in ptx


def test_grouped_product_compiles_for_amd():
    """A tile of more shared memory than there is. gfx942 has no e4m3 of this kind and widens it."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from sglang.kernels.ops.moe.grouped_gemm_kernel import grouped_gemm_kernel
    from sglang.kernels.ops.moe.launch import fp8_expert_tiles
    from sglang.test.compile_kernels import AMD, compile_kernel

    for target in AMD:
        for few in (True, False):
            tiles = fp8_expert_tiles(few=few, amd=True)
            for tile, kind in ((tiles.up, "gated"), (tiles.down, "fp8")):
                texts = compile_kernel(grouped_gemm_kernel, target=target, **arguments(tile, kind))
                assert ("f8f6f4" in texts["amdgcn"]) == (target.arch == "gfx950")


def test_small_kernels_compile_for_hopper():
    pytest.importorskip("triton", reason="Triton is not installed")
    from sglang.kernels.ops.fused.sum_kernels import combine_kernel
    from sglang.kernels.ops.moe import moe_kernels, sort, sort_kernels
    from sglang.test.compile_kernels import compile_for_hopper

    route = compile_for_hopper(
        moe_kernels.route_kernel,
        pointers={"p_logits": "*bf16", "p_weights": "*bf16", "p_chosen": "*i32"},
        constants={"TOP_K": 8, "BLOCK_K": 8, "BLOCK_E": 256, "RENORMALISE": True},
        num_warps=1,
    )
    ints = dict.fromkeys(("p_chosen", "p_counts", "p_pairs", "p_tile_experts"), "*i32")
    blocks = {"BLOCK": sort.BLOCK, "BLOCK_E": 256}
    more = {"BLOCK_B": 16, "BLOCK_M": 16}
    place = ""
    for launch in (sort.FEW, sort.MANY):
        sizes = {"PART": launch.part, "CHUNK": launch.chunk, "COUNTED": launch is sort.MANY}
        place += compile_for_hopper(
            sort_kernels.place_kernel,
            pointers=ints,
            constants=blocks | more | sizes,
            num_warps=launch.num_warps,
        )
    combine = compile_for_hopper(
        combine_kernel,
        pointers=dict.fromkeys(("p_parts", "p_weights", "p_shared", "p_gate", "p_out"), "*bf16")
        | {"p_chosen": "*i32"},
        constants={"TOP_K": 8, "HAS_SHARED": True, "BLOCK": 1024},
    )
    assert all(".target sm_90" in ptx for ptx in (route, place, combine))
    assert "atom.global" not in place and "red.global" not in place, "order must not be a race's"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
