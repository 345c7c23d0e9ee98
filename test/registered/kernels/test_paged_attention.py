"""The real paged-attention kernels on the CPU, in Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang.test.ci.ci_register import register_amd_ci, register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=40, suite="kernels")
register_cuda_ci(est_time=30, stage="base-b", runner_config="1-gpu-large")
register_amd_ci(est_time=30, suite="stage-b-test-1-gpu-large-amd")
register_amd_ci(est_time=30, suite="stage-b-test-1-gpu-small-amd-mi35x")

CASES = [
    Path(__file__).with_name(name)
    for name in ("paged_attention_cases.py", "kv_store_cases.py", "attention_backend_cases.py")
]
HOPPER_CASES = Path(__file__).with_name("paged_hopper_cases.py")


def run_cases(cases: list[Path], **env: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--import-mode=importlib"]
    command += [str(path) for path in cases]
    done = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=300
    )
    report = done.stdout + done.stderr
    assert done.returncode == 0, report[-6000:]
    assert " passed" in report and " skipped" not in report, report[-2000:]


def test_kernels_agree_with_the_reference_in_the_interpreter():
    pytest.importorskip("triton", reason="Triton is not installed")
    run_cases(CASES, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


GEOMETRIES = {"16 heads, 2 KV": (8, 2), "24 heads, 4 KV": (6, 4)}
POINTERS = {
    **dict.fromkeys(("p_q", "p_k", "p_v", "p_out", "p_part"), "*bf16"),
    **dict.fromkeys(("p_lse", "p_cos", "p_sin"), "*fp32"),
    **dict.fromkeys(("p_table", "p_start"), "*i32"),
    **dict.fromkeys(("p_rows", "p_prefix", "p_slots", "p_positions"), "*i64"),
    **dict.fromkeys(("p_q_weight", "p_k_weight", "p_k_buffer", "p_v_buffer"), "*bf16"),
    **dict.fromkeys(("scale_log2", "eps"), "fp32"),
}


@pytest.mark.parametrize("group, kv_heads", GEOMETRIES.values(), ids=GEOMETRIES)
def test_attention_compiles_for_hopper(group, kv_heads):
    """The table's tiles fit the chip's shared memory and use its tensor cores."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from sglang.kernels.ops.attention.paged import attention_kernel as kernels
    from sglang.kernels.ops.attention.paged.launch import (
        SPLITS,
        few_rows,
        many_rows,
        short_chunks,
    )
    from sglang.test.compile_kernels import compile_for_hopper

    tiles = [(few_rows(256, group * 4), True), (short_chunks(256), True), (many_rows(256), False)]
    for tile, is_split in tiles:
        sizes = attention_sizes(tile, group, kv_heads, 256, SPLITS if is_split else None)
        ptx = compile_for_hopper(kernels.paged_attention_kernel, **sizes)
        assert ("mma.sync" if tile.block_m < 64 else "wgmma.mma_async") in ptx


def attention_sizes(tile, group, kv_heads, dim, rule):
    """What compiles paged_attention_kernel for a tile; a rule None means whole contexts."""
    constants = {
        "HEAD_DIM": dim,
        "BLOCK_D": dim,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "STRIDE_K": kv_heads * dim,
        "STRIDE_V": kv_heads * dim,
        "PAGE": 64,
        "GROUP": group,
        "IS_CAUSAL": True,
        "HAS_WINDOW": False,
        "MAX_SPLITS": rule.max_splits if rule else 0,
        "SPLIT_MIN": rule.min_tokens if rule else 64,
        "SPLIT_STEP": rule.step_tokens if rule else 64,
    }
    shape = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return {"pointers": POINTERS, "constants": constants, **shape}


def test_attention_compiles_for_amd():
    """Catches a tile of more shared memory than there is, a quarter of a Hopper GPU's."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from sglang.kernels.ops.attention.paged import attention_kernel as kernels
    from sglang.kernels.ops.attention.paged.launch import SPLITS, few_rows, many_rows
    from sglang.test.compile_kernels import AMD, compile_kernel

    for dim in (128, 256):
        for tile, rule in (
            (few_rows(dim, 8, amd=True), SPLITS),
            (few_rows(dim, 64, amd=True), SPLITS),
            (many_rows(dim, amd=True), SPLITS),
            (many_rows(dim, amd=True), None),
        ):
            sizes = attention_sizes(tile, 8, 2, dim, rule)
            compile_kernel(kernels.paged_attention_kernel, target=AMD[0], **sizes)


def compile_hopper_kernel(kernel, launch):
    """(shared memory, PTX) of a Gluon kernel with 16 heads and 2 KV heads of 256."""
    from triton.compiler import compile as compile_kernel
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from sglang.test.compile_kernels import HOPPER

    block = [launch.block_n, 256]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    pages = f"tensordesc<bf16{block},{layout!r}>"
    constants = {"GROUP": 8, "HEAD_DIM": 256, "BLOCK_N": launch.block_n, "IS_CAUSAL": True}
    constants |= {"STAGES": launch.num_stages}
    types = {**POINTERS, "desc_k": pages, "desc_v": pages}
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    aligned = (i for i, n in enumerate(names) if n.startswith(("p_", "stride")))
    attrs = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = GluonASTSource(kernel, signature, constants, attrs)
    compiled = compile_kernel(source, target=HOPPER, options={"num_warps": 4})
    return compiled.metadata.shared, compiled.asm["ptx"]


def test_the_hopper_kernel_compiles_without_spills():
    """Catches a change that makes the warp groups' registers overflow, or the softmax wait for its product."""
    pytest.importorskip("triton.experimental.gluon", reason="needs Triton with Gluon")
    from sglang.kernels.ops.attention.paged.hopper_kernel import hopper_prefill_kernel
    from sglang.kernels.ops.attention.paged.launch import HopperLaunch

    shared, ptx = compile_hopper_kernel(hopper_prefill_kernel, HopperLaunch())
    assert shared <= 227 * 1024
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx and "setmaxnreg" in ptx
    assert ".local" not in ptx


def test_small_kernels_compile_for_hopper():
    pytest.importorskip("triton", reason="Triton is not installed")
    from sglang.kernels.ops.attention.paged import attention_kernel, store_kernel
    from sglang.kernels.ops.attention.paged.launch import SPLITS, combine_warps
    from sglang.test.compile_kernels import compile_for_hopper

    dims = {"HEAD_DIM": 256, "BLOCK_D": 256}
    splits = {"SPLIT_MIN": SPLITS.min_tokens, "SPLIT_STEP": SPLITS.step_tokens}
    splits |= {"MAX_SPLITS": SPLITS.max_splits}
    kernels = {
        attention_kernel.combine_splits_kernel: splits,
        store_kernel.store_kv_kernel: {},
        store_kernel.norm_rope_store_kernel: {"UNIT_OFFSET": True},
    }
    for kernel, constants in kernels.items():
        warps = combine_warps(SPLITS.max_splits)
        sizes = {"constants": {**dims, **constants}, "num_warps": warps}
        compile_for_hopper(kernel, pointers=POINTERS, **sizes)
        for dtype in ("*fp8e4nv",) if "p_k_buffer" in kernel.arg_names else ():
            pools = {**POINTERS, "p_k_buffer": dtype, "p_v_buffer": dtype}
            compile_for_hopper(kernel, pointers=pools, **sizes)


def heads_sizes(launch, pool, *, paired):
    """What compiles norm_rope_store_heads_kernel for a launch and pools of a type."""
    constants = {"HEAD_DIM": 256, "BLOCK_D": 256, "NUM_HEADS": 16, "NUM_KV_HEADS": 2, "HALF": 32}
    constants |= {"BLOCK_H": launch.heads, "UNIT_OFFSET": True, "PAIRED": paired}
    pointers = {**POINTERS, "p_k_buffer": pool, "p_v_buffer": pool}
    return {"pointers": pointers, "constants": constants, "num_warps": launch.num_warps}


@pytest.mark.parametrize("pool", ["*bf16", "*fp8e4nv"])
def test_heads_of_a_row_exchange_halves_in_registers(pool):
    """Through shared memory, or with each head loaded twice, it would be no better than one head a program;
    stores of 16 FP8 results a thread would add the squares in another order than without FP8."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from sglang.kernels.ops.attention.paged.store import STORE_FEW, STORE_MANY
    from sglang.kernels.ops.attention.paged.store_heads_kernel import norm_rope_store_heads_kernel
    from sglang.test.compile_kernels import HOPPER, compile_kernel

    for launch in (STORE_FEW, STORE_MANY):
        sizes = heads_sizes(launch, pool, paired=True)
        texts = compile_kernel(norm_rope_store_heads_kernel, target=HOPPER, **sizes)
        ptx = texts["ptx"]
        assert launch.num_warps > 1 or "shared" not in ptx.split(".entry")[1]
        assert "shfl.sync.bfly" in ptx and "cvt.rn.bf16.f32" not in ptx
        assert ("st.global.v2.b32" in ptx) == (pool == "*fp8e4nv")
        assert "[1, 8]" in texts["ttgir"] and "[1, 16]" not in texts["ttgir"]


def test_heads_of_a_row_compile_for_amd():
    """Catches instructions of NVIDIA's in the plain forms, and the two launches adding in two orders."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from sglang.kernels.ops.attention.paged.store import STORE_FEW, STORE_MANY
    from sglang.kernels.ops.attention.paged.store_heads_kernel import norm_rope_store_heads_kernel
    from sglang.test.compile_kernels import AMD, compile_kernel

    for target, fp8 in zip(AMD, ("*fp8e4b8", "*fp8e4nv"), strict=True):
        for launch in (STORE_FEW, STORE_MANY):
            sizes = heads_sizes(launch, fp8, paired=False)
            texts = compile_kernel(norm_rope_store_heads_kernel, target=target, **sizes)
            assert "[1, 8]" in texts["ttgir"] and "[1, 16]" not in texts["ttgir"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_agree_with_the_reference_on_the_gpu():
    run_cases(CASES, TRITON_INTERPRET="0")


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs compute capability 9.0",
)
def test_the_hopper_kernel_agrees_with_the_reference():
    run_cases([HOPPER_CASES], TRITON_INTERPRET="0")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
