"""CUDA C++ sources compiled when they are needed; takes the package `cuda-bindings`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

HAS_BINDINGS: bool = importlib.util.find_spec("cuda") is not None and (
    importlib.util.find_spec("cuda.bindings") is not None
)
NO_BINDINGS = "the package 'cuda-bindings' is not installed"

if HAS_BINDINGS:
    from cuda.bindings import nvrtc


def check(result: tuple) -> tuple:
    """The values of a call of the driver or the compiler. Raises: RuntimeError with its error."""
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"CUDA call failed: {error}")
    return tuple(values)


def compile_source(
    source: Path, *, arch: str, defines: dict[str, int], headers: Sequence[Path] = ()
) -> bytes:
    """Machine code for ``arch`` ("sm_90"). Raises: RuntimeError with the compiler's log."""
    texts = [header.read_bytes() for header in headers]
    names = [header.name.encode() for header in headers]
    (program,) = check(
        nvrtc.nvrtcCreateProgram(
            source.read_bytes(), source.name.encode(), len(texts), texts, names
        )
    )
    options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17"]
    options += [f"-D{name}={value}".encode() for name, value in defines.items()]
    error, *_ = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(error) != 0:
        (size,) = check(nvrtc.nvrtcGetProgramLogSize(program))
        log = b" " * size
        check(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"{source.name} does not compile for {arch}: {log.decode()}")
    (size,) = check(nvrtc.nvrtcGetCUBINSize(program))
    cubin = b" " * size
    check(nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin
