"""The compile audit: what machine code every state update becomes, on every target, without a GPU."""

from __future__ import annotations

import pytest

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=35, suite="kernels")

pytest.importorskip("triton", reason="Triton is not installed")


from sglang.kernels import triton_support  # noqa: E402
from sglang.kernels.audit.assembly import count_pairs  # noqa: E402

if triton_support.INTERPRETING:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from sglang.kernels.audit.compile import (  # noqa: E402
    CUDA_TARGETS,
    audit_cuda_source,
    audit_variant,
    has_nvcc,
)
from sglang.kernels.audit.variants import TARGETS, all_variants  # noqa: E402
from sglang.kernels.ops.mamba.conv_kernels import conv_update_kernel  # noqa: E402
from sglang.test.compile_kernels import AMD, HOPPER, compile_kernel  # noqa: E402


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_every_variant_pairs_one_product_with_one_fma(target):
    """Catches: a compiler that fuses the state's multiply, or a kernel written so that it may.

    The planted variants are in the list and must come out as not exact.
    """
    findings = [audit_variant(v, target) for v in all_variants() if v.serves(target)]
    wrong = [f for f in findings if not f.ok]
    assert not wrong, wrong
    assert sum(not f.planted for f in findings) >= 10
    assert sum(f.planted for f in findings) == 2


@pytest.mark.parametrize("arch", CUDA_TARGETS)
def test_the_cuda_source_pairs_them_too(arch):
    """Catches: a contraction in the CUDA C++ kernel."""
    if not has_nvcc():
        pytest.skip("needs nvcc")
    finding = audit_cuda_source(arch)
    assert finding.ok, finding


@pytest.mark.parametrize("form", ["decode", "verify", "tree"])
def test_the_convolution_compiles_without_a_gpu(form):
    """Catches: what the interpreter accepts and the compiler does not, such as a constant named twice."""
    pointers = dict.fromkeys(("x", "out", "weight", "conv_state", "windows"), "*bf16")
    pointers |= {"slots": "*i32", "rows": "*i32", "parents": "*i64"}
    constants = {
        "bias": None,
        "WIDTH": 4,
        "HAS_BIAS": False,
        "SILU": True,
        "HAS_SLOTS": True,
        "RECORD": form != "decode",
        "TREE": form == "tree",
        "BLOCK": 256,
        "BLOCK_W": 4,
    }
    for target in (HOPPER, AMD[0]):
        assert compile_kernel(
            conv_update_kernel, target=target, pointers=pointers, constants=constants
        )


SASS_GOOD = """
  /*0010*/ FMUL R4, R9.reuse, R4 ;
  /*0020*/ FMUL R5, R9, R5 ;
  /*0030*/ FFMA R4, R16.reuse, R20, R4 ;
  /*0040*/ FFMA R5, R17, R20, R5 ;
"""


def test_the_reader_follows_values_not_names():
    """Catches: a reader that counts instructions: moved values, overwritten registers, flushes."""
    assert count_pairs(SASS_GOOD, "sass").pairs == 2
    overwritten = SASS_GOOD.replace("/*0030*/", "/*0028*/ LDS R4, [R1] ;\n  /*0030*/")
    assert count_pairs(overwritten, "sass").pairs == 1
    moved = SASS_GOOD.replace(
        "/*0030*/ FFMA R4, R16.reuse, R20, R4",
        "/*0028*/ MOV R7, R4 ;\n  /*0030*/ FFMA R4, R16, R20, R7",
    )
    assert count_pairs(moved, "sass").pairs == 2
    contracted = SASS_GOOD.replace("FFMA R4, R16.reuse, R20, R4", "FFMA R4, R9, R20, R4")
    assert count_pairs(contracted, "sass").contracted == 1
    assert count_pairs(SASS_GOOD.replace("FFMA R5", "FFMA.FTZ R5"), "sass").flushes == 1


def test_packed_amd_instructions_read_before_they_write():
    """Catches: a packed multiply whose first half clobbers the factor of its second."""
    text = """
    v_pk_mul_f32 v[2:3], v[2:3], v[8:9] op_sel_hi:[0,1]
    v_pk_fma_f32 v[4:5], v[6:7], v[10:11], v[2:3]
    """
    assert count_pairs(text, "amdgcn").pairs == 2


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
