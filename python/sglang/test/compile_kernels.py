"""Compile a Triton kernel for a GPU that is not there."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
AMD = (GPUTarget("hip", "gfx942", 64), GPUTarget("hip", "gfx950", 64))
OTHER_NVIDIA = tuple(GPUTarget("cuda", arch, 32) for arch in (80, 100, 120))
SHARED_KB = {80: 163, 90: 227, 100: 227, 120: 99} | {target.arch: 64 for target in AMD}
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
    max_registers: int | None = None,
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
    options = {"num_warps": num_warps, "num_stages": num_stages}
    if max_registers is not None and target.backend == "cuda":
        options["maxnreg"] = max_registers
    source = ASTSource(kernel, signature, constants, attrs)
    compiled = triton.compile(source, target=target, options=options)
    assert compiled.metadata.shared <= SHARED_KB[target.arch] * 1024, compiled.metadata.shared
    if constants.get("OVERLAP"):
        assert_waits_first(compiled.asm["ptx"])
    return compiled.asm


def registers_and_stack(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack (values spilled) a thread of the kernel in ``cubin``, by Triton's cuobjdump."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


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
