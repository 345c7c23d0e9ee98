"""The real chunked prefill and its convolution on the CPU, in Triton's interpreter, and on a GPU where there
is one; and compiled for Hopper at the heads of the served models, which needs no GPU."""

from __future__ import annotations

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.kernel_cases import run_cases

register_cpu_ci(est_time=90, suite="kernels")
register_cuda_ci(est_time=60, stage="base-b", runner_config="1-gpu-large")

HEADS = [(16, 32, 128), (16, 48, 128), (2, 4, 64)]


def test_kernels_agree_with_the_reference_in_the_interpreter():
    pytest.importorskip("triton", reason="Triton is not installed")
    run_cases(__file__, "gdn_prefill_cases.py", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_agree_with_the_reference_on_the_gpu():
    run_cases(__file__, "gdn_prefill_cases.py", TRITON_INTERPRET="0")


@pytest.mark.parametrize("kind", ["bf16", "fp32"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_prefill_compiles_for_hopper(heads, kind):
    """A tile that does not fit the chip, or 16-bit products that miss the tensor cores' asynchronous path."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from sglang.kernels.ops.attention.fla import prefill_kernels
    from sglang.kernels.ops.attention.fla.prefill_launch import PRODUCTS_HALF, prefill_tiles
    from sglang.test.compile_kernels import compile_for_hopper

    tiles = prefill_tiles(4) if kind == "fp32" else PRODUCTS_HALF
    shape = {
        "HV": heads[1],
        "GROUP": heads[1] // heads[0],
        "K": heads[2],
        "V": heads[2],
        "C": 64,
        "DOT": tiles.dot_precision,
    }
    coefficients = dict.fromkeys(("a_log", "dt_bias", "q_coef", "k_coef", "decay"), "*fp32")
    rows = dict.fromkeys(("q", "k", "v", "a", "b", "w", "u", "attn", "out"), f"*{kind}")
    tables = dict.fromkeys(("chunks", "requests", "slots"), "*i32") | {"dests": "*i64"}
    pointers = rows | coefficients | tables | {"pool": "*fp32", "scale": "fp32"}
    chunk, state = tiles.chunk, tiles.state
    texts = [
        compile_for_hopper(
            prefill_kernels.prefill_chunk_kernel,
            pointers=pointers,
            constants=shape
            | {"HEADS": chunk.heads, "BASE": chunk.base, "SOLVE": chunk.solve_precision}
            | {"BLOCK_D": min(chunk.block_d, heads[2])},
            num_warps=chunk.num_warps,
            num_stages=chunk.num_stages,
        ),
        compile_for_hopper(
            prefill_kernels.prefill_state_kernel,
            pointers=pointers,
            constants=shape | {"BV": min(state.block_v, heads[2]), "HAS_DESTS": True},
            num_warps=state.num_warps,
            num_stages=state.num_stages,
        ),
    ]
    if kind == "bf16":
        assert "wgmma.mma_async" in texts[0] and ".bf16.bf16" in texts[0]
        assert ".bf16.bf16" in texts[1] and "cp.async" in texts[1]


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_lean_prefill_compiles_for_hopper(heads):
    """As above; 32-bit products in the inverse, whole chunks fetched word by word."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from sglang.kernels.ops.attention.fla import prefill_lean_kernels
    from sglang.kernels.ops.attention.fla.prefill_launch import LEAN_HALF
    from sglang.test.compile_kernels import compile_for_hopper

    chunk, state, dim = LEAN_HALF.chunk, LEAN_HALF.state, heads[2]
    block_v = min(state.block_v, dim)
    width = (2 * heads[0] + heads[1]) * dim
    shape = {"HV": heads[1], "GROUP": heads[1] // heads[0], "K": dim, "C": 64}
    shape["DOT"] = LEAN_HALF.dot_precision
    for name in ("q", "k", "v"):
        shape |= {f"stride_{name}_token": width, f"stride_{name}_head": dim}
    vectors = dict.fromkeys(
        ("a_log", "dt_bias", "q_coef", "k_coef", "s_coef", "decay", "pool"), "*fp32"
    )
    rows = dict.fromkeys(("q", "k", "v", "a", "b", "solved", "attn", "out"), "*bf16")
    tables = dict.fromkeys(("chunks", "requests", "slots"), "*i32") | {"dests": "*i64"}
    fetched = {
        "q_rows": f"tensordesc<bf16[64,{dim}]>",
        "k_rows": f"tensordesc<bf16[64,{dim}]>",
        "v_rows": f"tensordesc<bf16[64,{block_v}]>",
        "out_rows": f"tensordesc<bf16[64,{block_v}]>",
        "solved_rows": "tensordesc<bf16[64,64]>",
        "attn_rows": "tensordesc<bf16[64,64]>",
    }
    pointers = rows | vectors | tables | fetched | {"scale": "fp32"}
    solve = {"HEADS": chunk.heads, "BASE": chunk.base, "SOLVE": chunk.solve_precision}
    names = prefill_lean_kernels.lean_chunk_kernel.arg_names
    inverse = compile_for_hopper(
        prefill_lean_kernels.lean_chunk_kernel,
        pointers=pointers,
        constants={name: shape[name] for name in names if name in shape}
        | solve
        | {"BLOCK_D": min(chunk.block_d, dim)},
        num_warps=chunk.num_warps,
        num_stages=chunk.num_stages,
    )
    walk = compile_for_hopper(
        prefill_lean_kernels.lean_state_kernel,
        pointers=pointers,
        constants=shape
        | {"V": dim, "BV": block_v, "STAGES": state.num_stages}
        | {"HAS_DESTS": True, "COPY_ENGINE": True},
        num_warps=state.num_warps,
        num_stages=state.num_stages,
    )
    assert "wgmma.mma_async" in inverse and ".f16.f16" in inverse and ".tf32" not in inverse
    assert "wgmma.mma_async" in walk and ".bf16.bf16" in walk
    assert walk.count("cp.async.bulk.tensor") >= 5


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
