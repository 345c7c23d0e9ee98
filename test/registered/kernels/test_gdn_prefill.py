"""The real chunked prefill and its convolution on the CPU, in Triton's interpreter, and on a GPU where there
is one; and compiled for Hopper at the heads of the served models, which needs no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.kernel_cases import run_cases

register_cpu_ci(est_time=80, suite="kernels")
register_cuda_ci(est_time=90, stage="base-b", runner_config="1-gpu-large")

HEADS = [(16, 32, 128), (16, 48, 128), (2, 4, 64)]
MOST_STACK = 64
"""Bytes a thread that may leave registers outside the loops."""


def test_kernels_agree_with_the_reference_in_the_interpreter():
    pytest.importorskip("triton", reason="Triton is not installed")
    run_cases(__file__, "gdn_prefill_cases.py", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_agree_with_the_reference_on_the_gpu():
    run_cases(__file__, "gdn_prefill_cases.py", TRITON_INTERPRET="0")


def compiled_prefill(target, kind: str, heads: tuple[int, int, int], tiles):
    """Texts of the chunk kernel and of the state kernel that serves every GPU."""
    from sglang.kernels.ops.attention.fla import prefill_kernels
    from sglang.test.compile_kernels import compile_kernel

    chunk, state, dim = tiles.chunk, tiles.state, heads[2]
    block_v = min(state.block_v, dim)
    shape = {"HV": heads[1], "GROUP": heads[1] // heads[0], "K": dim, "C": 64}
    shape["DOT"] = tiles.dot_precision
    for name in ("q", "k", "v"):
        shape |= {f"stride_{name}_token": (2 * heads[0] + heads[1]) * dim}
        shape |= {f"stride_{name}_head": dim}
    vectors = dict.fromkeys(
        ("a_log", "dt_bias", "q_coef", "k_coef", "s_coef", "decay", "pool"), "*fp32"
    )
    rows = dict.fromkeys(("q", "k", "v", "a", "b", "solved", "attn", "out"), f"*{kind}")
    tables = dict.fromkeys(("chunks", "requests", "slots"), "*i32") | {"dests": "*i64"}
    columns = {"q": dim, "k": dim, "v": block_v, "solved": 64, "attn": 64, "out": block_v}
    fetched = {f"{name}_rows": f"tensordesc<{kind}[64,{size}]>" for name, size in columns.items()}
    pointers = rows | vectors | tables | {"scale": "fp32"}
    names = prefill_kernels.prefill_chunk_kernel.arg_names
    inverse = compile_kernel(
        prefill_kernels.prefill_chunk_kernel,
        target=target,
        pointers=pointers,
        constants={name: shape[name] for name in names if name in shape}
        | {"SOLVE": chunk.solve_precision, "BLOCK_D": min(chunk.block_d, dim)},
        num_warps=chunk.num_warps,
        num_stages=chunk.num_stages,
        max_registers=chunk.max_registers,
    )
    walk = compile_kernel(
        prefill_kernels.prefill_state_kernel,
        target=target,
        pointers=pointers | (fetched if state.copy_engine else {}),
        constants=shape
        | {"V": dim, "BV": block_v, "STAGES": state.num_stages}
        | {"HAS_DESTS": True, "COPY_ENGINE": state.copy_engine}
        | ({} if state.copy_engine else dict.fromkeys(fetched)),
        num_warps=state.num_warps,
        num_stages=state.num_stages,
    )
    return inverse, walk


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_prefill_compiles_for_hopper(heads):
    """A tile that does not fit the chip or its bound on registers, products that miss the tensor cores'
    asynchronous path, 32-bit products in the inverse, a value of a block of 16 that leaves its thread (only
    products of the whole matrix go through memory), whole chunks fetched word by word."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from sglang.kernels.ops.attention.fla.prefill_launch import HALF
    from sglang.test.compile_kernels import HOPPER, registers_and_stack

    inverse, walk = compiled_prefill(HOPPER, "bf16", heads, HALF)
    registers, stack = registers_and_stack(inverse["cubin"])
    assert registers <= HALF.chunk.max_registers and stack <= MOST_STACK
    inverse, walk = inverse["ptx"], walk["ptx"]
    assert "wgmma.mma_async" in inverse and "mma.sync" in inverse
    assert ".f16.f16" in inverse and ".tf32" not in inverse and "st.shared.b16" not in inverse
    assert "wgmma.mma_async" in walk and ".bf16.bf16" in walk
    assert walk.count("cp.async.bulk.tensor") >= 5


@pytest.mark.parametrize(("kind", "pool"), [("bf16", "fp32"), ("bf16", "bf16"), ("fp16", "fp32")])
@pytest.mark.parametrize("has_dests", [True, False])
@pytest.mark.parametrize("heads", HEADS[:2], ids=str)
def test_walk_in_order_compiles_for_hopper(heads, has_dests, kind, pool):
    """Accumulators that overflow the registers, more shared memory than there is, short chunks not padded."""
    pytest.importorskip("triton.experimental.gluon", reason="needs Triton with Gluon")
    from triton.compiler import compile as compile_kernel
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from sglang.kernels.ops.attention.fla.prefill_hopper import BLOCK_V, STAGES
    from sglang.kernels.ops.attention.fla.prefill_hopper_kernel import (
        prefill_state_hopper_kernel as kernel,
    )
    from sglang.test.compile_kernels import HOPPER, SHARED_KB, registers_and_stack

    def descriptor(columns: int) -> str:
        element = {"bf16": gl.bfloat16, "fp16": gl.float16}[kind]
        layout = gl.NVMMASharedLayout.get_default_for([64, columns], element)
        return f"tensordesc<{kind}[64, {columns}],{layout!r}>"

    width = (2 * heads[0] + heads[1]) * heads[2]
    constants = {"HV": heads[1], "GROUP": heads[1] // heads[0], "K": 128, "V": 128, "C": 64}
    constants |= {"BV": BLOCK_V, "STAGES": STAGES, "HAS_DESTS": has_dests}
    constants |= dict.fromkeys(("stride_k_token", "stride_v_token"), width)
    constants |= dict.fromkeys(("stride_q_head", "stride_k_head", "stride_v_head"), 128)
    types = {f"desc_{name}": descriptor(128) for name in "qk"}
    types |= {f"desc_{name}": descriptor(64) for name in ("v", "x", "a", "out")}
    types |= dict.fromkeys(("q_coef", "k_coef", "s_coef", "decay"), "*fp32")
    types |= dict.fromkeys(("k", "v", "out"), f"*{kind}") | {"pool": f"*{pool}"}
    types |= {"slots": "*i32", "requests": "*i32", "dests": "*i64"}
    if not has_dests:
        constants["dests"] = None
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    wide = {n for n in names if types.get(n, "").startswith("*")} | {"stride_slot"}
    attrs = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in wide}
    source = GluonASTSource(kernel, signature, constants, attrs)
    compiled = compile_kernel(source, target=HOPPER, options={"num_warps": 4})
    assert compiled.metadata.shared <= SHARED_KB[90] * 1024
    _, stack = registers_and_stack(compiled.asm["cubin"])
    assert stack <= MOST_STACK
    ptx = compiled.asm["ptx"]
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx and "setmaxnreg" in ptx
    assert "wgmma.wait_group.sync.aligned 1" in ptx
    assert ".local" not in ptx


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_prefill_in_fp32_compiles_for_hopper(heads):
    """A tile that does not fit the chip."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from sglang.kernels.ops.attention.fla.prefill_launch import SINGLE
    from sglang.test.compile_kernels import HOPPER

    for asm in compiled_prefill(HOPPER, "fp32", heads, SINGLE):
        assert ".tf32" in asm["ptx"] and ".bf16" not in asm["ptx"]


@pytest.mark.parametrize("copy_engine", [True, False])
def test_prefill_compiles_for_other_nvidia_gpus(copy_engine):
    """More shared memory than the smaller chips have, an instruction of Hopper alone."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from sglang.kernels.ops.attention.fla.prefill_launch import HALF
    from sglang.test.compile_kernels import OTHER_NVIDIA

    tiles = replace(HALF, state=replace(HALF.state, copy_engine=copy_engine))
    for target in OTHER_NVIDIA:
        for asm in compiled_prefill(target, "bf16", HEADS[0], tiles):
            assert "mma" in asm["ptx"]


@pytest.mark.parametrize("kind", ["bf16", "fp32"])
def test_prefill_compiles_for_amd(kind):
    """More shared memory than 64 KB, a precision or a copy that only NVIDIA has."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from sglang.kernels.ops.attention.fla.prefill_launch import AMD_HALF, AMD_SINGLE
    from sglang.test.compile_kernels import AMD

    tiles = AMD_HALF if kind == "bf16" else AMD_SINGLE
    for target in AMD:
        for asm in compiled_prefill(target, kind, HEADS[0], tiles):
            assert "v_mfma_f32" in asm["amdgcn"]


def test_convolution_compiles_for_hopper():
    """Loads narrower than 8 bytes along the channels."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from sglang.kernels.ops.mamba import conv_kernels
    from sglang.kernels.ops.mamba.conv_launch import PREFILL_TILE
    from sglang.test.compile_kernels import compile_for_hopper

    ptx = compile_for_hopper(
        conv_kernels.conv_prefill_kernel,
        pointers=dict.fromkeys(("x", "out", "weight", "conv_state"), "*bf16")
        | dict.fromkeys(("slots", "cu_seqlens"), "*i32"),
        constants={
            "bias": None,
            "has_initial_state": None,
            "x_stride_dim": 1,
            "out_stride_dim": 1,
            "state_stride_col": 1,
            "dim": 8192,
            "x_stride_token": 8192,
            "out_stride_token": 8192,
            "WIDTH": 4,
            "HAS_BIAS": False,
            "SILU": True,
            "HAS_STATE": True,
            "HAS_MASK": False,
            "BLOCK_T": PREFILL_TILE.block_t,
            "ROWS": PREFILL_TILE.rows,
            "BLOCK": PREFILL_TILE.block,
        },
        num_warps=PREFILL_TILE.num_warps,
    )
    assert ptx.count("ld.global.v2.b32") >= PREFILL_TILE.rows
    assert ptx.count("st.global.v2.b32") >= PREFILL_TILE.rows


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
