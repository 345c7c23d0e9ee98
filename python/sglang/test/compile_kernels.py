"""Compile a Triton kernel for a GPU that is not there."""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
AMD = (GPUTarget("hip", "gfx942", 64), GPUTarget("hip", "gfx950", 64))
SHARED_BYTES = {"cuda": 227 * 1024, "hip": 64 * 1024}
_MEMORY_ACCESS = re.compile(
    r"\b(?:ld|st|atom|red)\.(?:\w+\.)*?global|\bcp\.async|ld\.(?:acquire|relaxed)"
)


def compile_kernel(
    kernel: Any,
    *,
    target: GPUTarget,
    pointers: dict[str, str],
    constants: dict[str, Any],
    num_warps: int = 4,
    num_stages: int = 3,
    aligned: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Texts of ``kernel`` by dialect; arguments that are not named are int32; pointers, strides and ``aligned``
    are multiples of 16. A tensor descriptor is a pointer of type ``tensordesc<type[shape]>``.

    Raises: triton's error if it does not compile; AssertionError if it needs more shared memory than there is.
    """
    names = kernel.arg_names
    if "OVERLAP" in names:
        constants = {**constants, "OVERLAP": target.backend == "cuda" and target.arch >= 90}
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
        target=target,
        options={"num_warps": num_warps, "num_stages": num_stages},
    )
    assert compiled.metadata.shared <= SHARED_BYTES[target.backend], compiled.metadata.shared
    if constants.get("OVERLAP"):
        assert_waits_first(compiled.asm["ptx"])
    return compiled.asm


def assert_waits_first(ptx: str) -> None:
    """A kernel launched over the end of another one touches no device memory before it has waited for that.

    Raises: AssertionError if it does, or does not wait, or touches none at all.
    """
    body = ptx[ptx.index(".entry") :]
    access = _MEMORY_ACCESS.search(body)
    assert access, "no access to device memory was found"
    before = body[: access.start()]
    assert "griddepcontrol.wait" in before, f"{access.group()} comes before griddepcontrol.wait"


def compile_for_hopper(
    kernel: Any,
    *,
    pointers: dict[str, str],
    constants: dict[str, Any],
    num_warps: int = 4,
    num_stages: int = 3,
    aligned: tuple[str, ...] = (),
) -> str:
    """PTX for sm_90 of ``kernel``; see ``compile_kernel``."""
    return compile_kernel(
        kernel,
        target=HOPPER,
        pointers=pointers,
        constants=constants,
        num_warps=num_warps,
        num_stages=num_stages,
        aligned=aligned,
    )["ptx"]
