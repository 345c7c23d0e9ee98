"""FP8 products of many rows in CUDA C++ for compute capability 9.0: neighbouring SMs share what they fetch.

Compiled at first use with NVRTC, which needs the package ``cuda-bindings``. The arithmetic is that of
``hopper_gemm_kernel``: the same bits.
"""

from __future__ import annotations

import ctypes
import importlib.util
import struct
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from sglang.kernels.ops.quantization.launch import fits_hopper
from sglang.kernels.ops.quantization.rows import GROUP, QuantizedRows

HAS_BINDINGS: bool = importlib.util.find_spec("cuda") is not None and (
    importlib.util.find_spec("cuda.bindings") is not None
)
if HAS_BINDINGS:
    from cuda.bindings import driver, nvrtc

SOURCE = Path(__file__).with_name("csrc") / "hopper_products.cu"
HEADER = SOURCE.with_name("hopper_instructions.cuh")
TILE_ROWS = 128
SHARE_NOTHING, SHARE_WEIGHTS, SHARE_ROWS = 0, 1, 2
_HALF = 64
_THREADS = 384
_STAGES = 4
_STAGE_BYTES = 3 * TILE_ROWS * GROUP
_STAGING_BYTES = 8 * 16 * 144
_BARRIER_BYTES = (2 * _STAGES + 2) * 8
SHARED_BYTES = 1024 + _STAGES * _STAGE_BYTES + _STAGING_BYTES + _BARRIER_BYTES
"""As the source lays it out, and up to 1024 bytes to align it."""


@dataclass(frozen=True)
class CudaTile:
    """How ``hopper_product`` runs; its tile is 128 rows and two parts of 128 columns, in 4 stages of 48 KB.

    share    what two neighbouring multiprocessors fetch together: nothing, weights or rows (SHARE_*)
    turns    the two multiplying groups of a program take turns
    group_m  row tiles (with SHARE_WEIGHTS: pairs of them) that run next to each other; experts have their own order
    watch    end with an error instead of waiting for ever; for tests of the kernel
    probe    leave out fetches (1) or products (2): what bounds it; results are wrong
    """

    share: int = SHARE_WEIGHTS
    turns: bool = False
    group_m: int = 8
    watch: bool = False
    probe: int = 0

    @property
    def block_m(self) -> int:
        return TILE_ROWS


@dataclass(frozen=True)
class SlotRows:
    """Rows of experts by slot: their place in the order of pairs, in tiles of 128 of one expert.

    pairs, tile_experts  as of ``ExpertOrder`` with tiles of 128 rows
    num_pairs, top_k, shared_rows  as of ``ExpertRows``
    sorted_values        of an up projection: e4m3 [len(pairs), K], row ``pair // top_k`` at a pair's slot; None
                         of a down projection, whose rows all lie by slot, the shared expert's behind the others
    """

    pairs: Tensor
    tile_experts: Tensor
    num_pairs: int
    top_k: int
    shared_rows: int
    sorted_values: Tensor | None

    @property
    def num_tiles(self) -> int:
        return len(self.tile_experts) + -(-self.shared_rows // TILE_ROWS)


class _Params(ctypes.Structure):
    """``Params`` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x_scale", "w_scale", "out", "out_scale")),
        *((name, ctypes.c_void_p) for name in ("pairs", "tile_experts")),
        *((name, ctypes.c_int) for name in ("stride_x_scale", "stride_ws_expert", "stride_ws")),
        *((name, ctypes.c_int) for name in ("stride_out", "stride_out_scale")),
        *((name, ctypes.c_int) for name in ("tiles_m", "tiles_n", "routed_tiles")),
        *((name, ctypes.c_int) for name in ("shared_expert", "num_pairs", "extra_rows")),
        *((name, ctypes.c_int) for name in ("shared_start", "top_k", "num_columns")),
        *((name, ctypes.c_int) for name in ("num_steps", "group_m")),
    )


def _check(result: tuple) -> tuple:
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"CUDA call failed: {error}")
    return tuple(values)


def unavailable_reason(device: torch.device) -> str | None:
    """None if the kernel can run on ``device``, else why not."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{device} is no NVIDIA GPU"
    if not HAS_BINDINGS:
        return "the package 'cuda-bindings' is not installed"
    capability = torch.cuda.get_device_capability(device)
    return None if capability == (9, 0) else f"compute capability {capability} is not 9.0"


def fits_shared_rows(down: Tensor) -> bool:
    """Whether the kernel serves experts of ``down`` [E, H, I] and an up projection [E, 2I, H]."""
    size, inner = down.shape[1:]
    return size % 512 == 0 and inner % 256 == 0 and unavailable_reason(down.device) is None


def compile_cubin(tile: CudaTile, *, grouped: bool, gated: bool) -> bytes:
    """Machine code for sm_90a. Raises: RuntimeError with the compiler's log."""
    source, name = SOURCE.read_bytes(), SOURCE.name.encode()
    headers, names = [HEADER.read_bytes()], [HEADER.name.encode()]
    (program,) = _check(nvrtc.nvrtcCreateProgram(source, name, 1, headers, names))
    choices = {"SHARE": tile.share, "TURNS": tile.turns, "WATCH": tile.watch, "PROBE": tile.probe}
    choices |= {"GROUPED": grouped, "GATED": gated}
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17"]
    options += [f"-D{key}={int(value)}".encode() for key, value in choices.items()]
    error, *_ = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(error) != 0:
        (size,) = _check(nvrtc.nvrtcGetProgramLogSize(program))
        log = b" " * size
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"{SOURCE.name} does not compile: {log.decode()}")
    (size,) = _check(nvrtc.nvrtcGetCUBINSize(program))
    cubin = b" " * size
    _check(nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin


@cache
def _function(tile: CudaTile, grouped: bool, gated: bool, device_index: int) -> object:
    """The loaded kernel, once per process, choices and device; its module stays loaded."""
    torch.cuda.current_stream(device_index)
    (module,) = _check(driver.cuModuleLoadData(compile_cubin(tile, grouped=grouped, gated=gated)))
    (function,) = _check(driver.cuModuleGetFunction(module, b"hopper_product"))
    largest = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _check(driver.cuFuncSetAttribute(function, largest, SHARED_BYTES))
    return function


@lru_cache(maxsize=4096)
def _encoded_map(address: int, rows: int, columns: int, stride: int, box_rows: int) -> bytes:
    """A copy engine's map for loads of [box_rows, 128] bytes of a matrix, zero beyond its edges."""
    wide, narrow = driver.cuuint64_t, driver.cuuint32_t
    (made,) = _check(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            2,
            address,
            [wide(columns), wide(rows)],
            [wide(stride)],
            [narrow(GROUP), narrow(box_rows)],
            [narrow(1), narrow(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return struct.pack("=16Q", *(int(word) for word in made.opaque))


def _map_of(matrix: Tensor, box_rows: int) -> ctypes.Array[ctypes.c_char]:
    rows, columns = matrix.shape
    encoded = _encoded_map(matrix.data_ptr(), rows, columns, matrix.stride(0), box_rows)
    return ctypes.create_string_buffer(encoded, len(encoded))


def hopper_product(
    x: QuantizedRows,
    weight: Tensor,
    weight_scale: Tensor,
    out: Tensor,
    out_scale: Tensor | None,
    tile: CudaTile,
    *,
    slots: SlotRows | None = None,
) -> None:
    """``x weight^T`` into ``out`` bf16, gated and quantised if there is an ``out_scale``.

    Without ``slots`` as ``hopper_gemm``: weight [N, K]. With ``slots``, weight [E, N, K], its last expert the
    shared one if there are shared rows:
    an up projection (``sorted_values``) takes rows x [T, K] and writes e4m3 ``out`` [num_tiles * 128, N / 2] and
    its scales by slot, the shared expert's behind the others;
    a down projection takes x [num_tiles * 128, K] by slot and writes ``out`` [num_pairs + shared_rows, N] by pair.
    Raises: ValueError if the tile does not divide the product or the results are of another kind.
    """
    gated, depth, num_columns = out_scale is not None, weight.shape[-1], out.shape[1]
    _check_shapes(x, out, tile, depth, num_columns, gated=gated, slots=slots)
    tiles_n = num_columns // (GROUP if gated else 2 * GROUP)
    rows = x.values
    params = _Params(
        x_scale=x.scale.data_ptr(),
        w_scale=weight_scale.data_ptr(),
        out=out.data_ptr(),
        stride_x_scale=x.scale.stride(0),
        stride_ws=weight_scale.stride(-2),
        stride_out=out.stride(0),
        tiles_m=-(-len(rows) // TILE_ROWS),
        tiles_n=tiles_n,
        extra_rows=len(rows),
        top_k=1,
        num_columns=num_columns,
        num_steps=depth // GROUP,
        group_m=tile.group_m,
    )
    if out_scale is not None:
        params.out_scale, params.stride_out_scale = out_scale.data_ptr(), out_scale.stride(0)
    if slots is not None:
        params.pairs, params.tile_experts = slots.pairs.data_ptr(), slots.tile_experts.data_ptr()
        params.stride_ws_expert = weight_scale.stride(0)
        params.tiles_m, params.routed_tiles = slots.num_tiles, len(slots.tile_experts)
        params.shared_expert, params.num_pairs = weight.shape[0] - 1, slots.num_pairs
        params.extra_rows, params.top_k = slots.shared_rows, slots.top_k
        if slots.sorted_values is None:
            params.shared_start = TILE_ROWS * len(slots.tile_experts)
        else:
            rows = slots.sorted_values
    maps = (
        _map_of(rows, _HALF),
        _map_of(x.values, _HALF),
        _map_of(weight.flatten(0, -2), GROUP),
    )
    _launch(tile, maps, params, grouped=slots is not None, gated=gated, device=out.device)


def _check_shapes(
    x: QuantizedRows,
    out: Tensor,
    tile: CudaTile,
    depth: int,
    num_columns: int,
    *,
    gated: bool,
    slots: SlotRows | None,
) -> None:
    """Raises: ValueError as of ``hopper_product``."""
    if not fits_hopper(num_columns, depth, gated=gated):
        raise ValueError(f"columns of {num_columns} and depth {depth} do not make whole tiles")
    if not gated and out.dtype != torch.bfloat16 or gated and x.dtype != torch.bfloat16:
        raise ValueError(f"results of {out.dtype} for rows of {x.dtype}; only bf16 is served")
    if tile.share == SHARE_ROWS and num_columns // (GROUP if gated else 2 * GROUP) % 2:
        raise ValueError(f"columns of {num_columns} do not make pairs of tiles that share rows")
    if slots is None:
        return
    if tile.share == SHARE_WEIGHTS:
        raise ValueError(
            "row tiles of experts cannot share weights: neighbours may be two experts'"
        )
    if gated != (slots.sorted_values is not None):
        raise ValueError("an up projection is gated and has sorted rows, a down projection neither")
    by_slot = out if gated else x.values
    if len(by_slot) < TILE_ROWS * slots.num_tiles:
        raise ValueError(f"{len(by_slot)} rows by slot, but {slots.num_tiles} tiles of {TILE_ROWS}")


def _launch(
    tile: CudaTile,
    maps: tuple[ctypes.Array[ctypes.c_char], ...],
    params: _Params,
    *,
    grouped: bool,
    gated: bool,
    device: torch.device,
) -> None:
    """On PyTorch's current stream, as many programs as there are multiprocessors or fewer."""
    cluster = 1 if tile.share == SHARE_NOTHING else 2
    tiles = params.tiles_m * params.tiles_n
    cores = torch.cuda.get_device_properties(device).multi_processor_count
    programs = min(-(-tiles // cluster), cores // cluster) * cluster
    if not tiles:
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    function = _function(replace(tile, group_m=0), grouped, gated, index)
    arguments = (*maps, params)
    addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(each) for each in arguments))
    stream = torch.cuda.current_stream(device).cuda_stream
    _check(
        driver.cuLaunchKernel(
            function,
            programs,
            1,
            1,
            _THREADS,
            1,
            1,
            SHARED_BYTES,
            stream,
            ctypes.addressof(addresses),
            0,
        )
    )
