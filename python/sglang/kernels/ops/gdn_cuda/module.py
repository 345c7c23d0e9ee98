"""Compiles the CUDA C++ kernels at first use (NVRTC) and launches them through the driver.

Needs the package `cuda-bindings` and a device of compute capability 9.0 or later (bulk copies).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from sglang.kernels.nvrtc import HAS_BINDINGS, NO_BINDINGS, check, compile_source
from sglang.kernels.ops.gdn_cuda.launch_table import VerifyTile

if HAS_BINDINGS:
    from cuda.bindings import driver

SOURCE = Path(__file__).with_name("csrc") / "gdn_verify.cu"
MIN_CAPABILITY = (9, 0)
HEAD_DIM = 128
MAX_DRAFT_TOKENS = 32


@cache
def unavailable_reason() -> str | None:
    """None if the kernels can run on the current device, else why not."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.version.hip is not None:
        return "ROCm build; the Triton kernels serve it"
    if not HAS_BINDINGS:
        return NO_BINDINGS
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is below 9.0"
    return None


def compile_cubin(tile: VerifyTile, *, state_is_bf16: bool, arch: str) -> bytes:
    """Machine code of the kernels for `arch` ("sm_90"). Raises: RuntimeError with the compiler's log."""
    defines = {
        "NW": tile.num_warps,
        "RPL": tile.rows_per_lane,
        "MIN_CTAS": tile.min_ctas,
        "STATE_BF16": int(state_is_bf16),
        "PAIRS": int(tile.pairs),
    }
    return compile_source(SOURCE, arch=arch, defines=defines)


class GdnCudaModule:
    """The loaded kernels of one tile, state dtype and device."""

    def __init__(self, tile: VerifyTile, *, state_is_bf16: bool, device: torch.device) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        torch.cuda.current_stream(device)
        self.tile = tile
        self.state_bytes = 2 if state_is_bf16 else 4
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        cubin = compile_cubin(tile, state_is_bf16=state_is_bf16, arch=f"sm_{major}{minor}")
        (self._module,) = check(driver.cuModuleLoadData(cubin))
        self._functions = {
            name: check(driver.cuModuleGetFunction(self._module, name.encode()))[0]
            for name in ("gdn_verify", "gdn_deferred_commit", "gdn_deferred_clear")
        }
        self._resident: dict[int, int] = {}

    def smem_bytes(self, num_tokens: int) -> int:
        """Dynamic shared memory of one CTA; the layout is `carve` in the source."""
        rows = self.tile.unit_rows
        per_token = (2 * HEAD_DIM + 4) * 4 + 2 * (2 * HEAD_DIM + rows) * 2
        return rows * HEAD_DIM * self.state_bytes + num_tokens * per_token

    def resident_ctas(self, num_tokens: int) -> int:
        """CTAs of the verify that fit one multiprocessor at once."""
        if num_tokens not in self._resident:
            smem = self.smem_bytes(num_tokens)
            function = self._functions["gdn_verify"]
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            largest = max([smem, *(self.smem_bytes(t) for t in self._resident)])
            check(driver.cuFuncSetAttribute(function, attribute, largest))
            (count,) = check(
                driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    function, self.tile.num_warps * 32, smem
                )
            )
            self._resident[num_tokens] = count
        return self._resident[num_tokens]

    def grid_for(self, num_units: int, num_tokens: int) -> int:
        """CTAs to launch: as many as fit at once, fewer if each shall work through several units."""
        places = max(1, self.num_sms * self.resident_ctas(num_tokens))
        if num_units <= places // self.tile.min_rounds:
            return num_units
        return min(places, -(-num_units // self.tile.min_rounds))

    def launch(
        self,
        name: str,
        grid: int,
        threads: int,
        smem: int,
        arguments: Sequence[ctypes._SimpleCData | ctypes.Structure],
        *,
        overlap_previous: bool = False,
    ) -> None:
        """Launch on PyTorch's current stream. Arguments are ctypes values or structures, by value.

        overlap_previous: start while the kernel before ends; the kernel itself waits for its results.
        """
        addresses = (ctypes.c_void_p * len(arguments))(
            *(ctypes.addressof(argument) for argument in arguments)
        )
        parameters = ctypes.addressof(addresses)
        stream = torch.cuda.current_stream().cuda_stream
        function = self._functions[name]
        if not overlap_previous:
            check(
                driver.cuLaunchKernel(
                    function, grid, 1, 1, threads, 1, 1, smem, stream, parameters, 0
                )
            )
            return
        attribute = driver.CUlaunchAttribute()
        kind = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.id = kind
        attribute.value.programmaticStreamSerializationAllowed = 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = smem
        config.hStream = stream
        config.attrs = [attribute]
        config.numAttrs = 1
        check(driver.cuLaunchKernelEx(config, function, parameters, 0))


@cache
def load_module(tile: VerifyTile, state_is_bf16: bool, device_index: int) -> GdnCudaModule:
    """The compiled kernels, once per process, tile, dtype and device."""
    device = torch.device("cuda", device_index)
    return GdnCudaModule(tile, state_is_bf16=state_is_bf16, device=device)
