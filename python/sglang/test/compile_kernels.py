"""Compile a Triton kernel for a GPU that is not there."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)


def compile_for_hopper(
    kernel: Any,
    *,
    pointers: dict[str, str],
    constants: dict[str, Any],
    num_warps: int = 4,
    num_stages: int = 3,
    aligned: tuple[str, ...] = (),
) -> str:
    """PTX for sm_90 of ``kernel``; arguments that are neither named are int32; pointers, strides and
    ``aligned`` are multiples of 16. A tensor descriptor is a pointer of type ``tensordesc<type[shape]>``.

    Raises: triton's error if it does not compile or needs more shared memory than the chip has.
    """
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names
    }
    wide = {name for name in names if name.startswith("stride") or name in (*pointers, *aligned)}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name in wide
        and signature[name] != "fp32"
        and not signature[name].startswith("tensordesc")
    }
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attrs),
        target=HOPPER,
        options={"num_warps": num_warps, "num_stages": num_stages},
    )
    assert compiled.metadata.shared <= 227 * 1024, compiled.metadata.shared
    return compiled.asm["ptx"]
