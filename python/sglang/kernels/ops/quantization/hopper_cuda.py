"""FP8 products of many rows in CUDA C++ for compute capability 9.0: which the kernel serves, and its launch.

Compiled with NVRTC when the first product of a kind is chosen; needs the package ``cuda-bindings``.
"""

from __future__ import annotations

import ctypes
import logging
import struct
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from sglang.kernels.nvrtc import HAS_BINDINGS, NO_BINDINGS, check, compile_source
from sglang.kernels.ops.quantization import launch
from sglang.kernels.ops.quantization.launch import HopperTile, fits_hopper
from sglang.kernels.ops.quantization.rows import GROUP, QuantizedRows

if HAS_BINDINGS:
    from cuda.bindings import driver

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("csrc") / "hopper_products.cu"
HEADER = SOURCE.with_name("hopper_instructions.cuh")
TILE_ROWS = HopperTile().block_m
_HALF = TILE_ROWS // 2
_THREADS = 384
_STAGES = 4
_STAGE_BYTES = 3 * TILE_ROWS * GROUP
_STAGING_BYTES = 8 * 16 * 144
_BARRIER_BYTES = 2 * _STAGES * 8
SHARED_BYTES = 1024 + _STAGES * _STAGE_BYTES + _STAGING_BYTES + _BARRIER_BYTES
"""As the source lays it out, and up to 1024 bytes to align it."""


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


def unavailable_reason(device: torch.device) -> str | None:
    """None if the kernel can run on ``device``, else why not."""
    if not _is_hopper(device):
        return f"{device} is no GPU of compute capability 9.0"
    return None if HAS_BINDINGS else NO_BINDINGS


def hopper_tile(
    num_rows: int, weight: Tensor, dtype: torch.dtype, *, gated: bool
) -> HopperTile | None:
    """The table's tile if the kernel serves products of ``num_rows`` rows with ``weight``, else None.

    weight [N, K], or [E, N, K] of experts, of which a row meets a few; dtype: of the results; gated: halves of N
    are a gate's and an up projection's. The first question about a kind of product compiles it; where that
    cannot be, one line of the log says why.
    """
    tile = launch.MANY_ON_HOPPER
    if tile is None or num_rows <= launch.SMALL_ROWS or dtype != torch.bfloat16:
        return None
    columns = weight.shape[-2] // 2 if gated else weight.shape[-2]
    if not _is_hopper(weight.device) or not fits_hopper(columns, weight.shape[-1], gated=gated):
        return None
    return tile if _is_ready(tile, weight.device, weight.dim() == 3, gated) else None


@cache
def _is_hopper(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


@cache
def _is_ready(tile: HopperTile, device: torch.device, grouped: bool, gated: bool) -> bool:
    reason = unavailable_reason(device)
    if reason is None:
        try:
            _function(_compiled_as(tile), grouped, gated, _index_of(device))
        except (RuntimeError, OSError) as error:
            reason = str(error)
    if reason is not None:
        _say_once(reason)
    return reason is None


@cache
def _say_once(reason: str) -> None:
    logger.warning("FP8 products of prompts take Triton's tiles, which are slower: %s", reason)


def compile_cubin(tile: HopperTile, *, grouped: bool, gated: bool) -> bytes:
    """Machine code for sm_90a. Raises: RuntimeError with the compiler's log."""
    defines = {"GROUPED": int(grouped), "GATED": int(gated), "WATCH": int(tile.watch)}
    return compile_source(SOURCE, arch="sm_90a", defines=defines, headers=(HEADER,))


def _compiled_as(tile: HopperTile) -> HopperTile:
    """Tiles that are compiled alike are one: ``group_m`` is an argument."""
    return replace(tile, group_m=0)


@cache
def _function(tile: HopperTile, grouped: bool, gated: bool, device_index: int) -> object:
    """The loaded kernel, once per process, choices and device; its module stays loaded."""
    torch.cuda.current_stream(device_index)
    cubin = compile_cubin(tile, grouped=grouped, gated=gated)
    (module,) = check(driver.cuModuleLoadData(cubin))
    (function,) = check(driver.cuModuleGetFunction(module, b"hopper_product"))
    largest = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(driver.cuFuncSetAttribute(function, largest, SHARED_BYTES))
    return function


def _index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def _num_cores(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


@lru_cache(maxsize=4096)
def _encoded_map(address: int, rows: int, columns: int, stride: int, box_rows: int) -> bytes:
    """A copy engine's map for loads of [box_rows, 128] bytes of a matrix, zero beyond its edges."""
    wide, narrow = driver.cuuint64_t, driver.cuuint32_t
    (made,) = check(
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
    tile: HopperTile,
    *,
    slots: SlotRows | None = None,
) -> None:
    """``x weight^T`` into ``out`` bf16, gated and quantised if there is an ``out_scale``.

    Without ``slots`` weight is [N, K]. With ``slots`` it is [E, N, K], its last expert the shared one if there
    are shared rows:
    an up projection (``sorted_values``) takes rows x [T, K] and writes e4m3 ``out`` [num_tiles * 128, N / 2] and
    its scales by slot, the shared expert's behind the others;
    a down projection takes x [num_tiles * 128, K] by slot and writes ``out`` [num_pairs + shared_rows, N] by pair.
    Raises: ValueError if the tile does not divide the product or the results are of another kind.
    """
    gated, depth, num_columns = out_scale is not None, weight.shape[-1], out.shape[1]
    _check_shapes(x, out, depth, num_columns, gated=gated, slots=slots)
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
    if slots is None:
        return
    if gated != (slots.sorted_values is not None):
        raise ValueError("an up projection is gated and has sorted rows, a down projection neither")
    by_slot = out if gated else x.values
    if len(by_slot) < TILE_ROWS * slots.num_tiles:
        raise ValueError(f"{len(by_slot)} rows by slot, but {slots.num_tiles} tiles of {TILE_ROWS}")


def _launch(
    tile: HopperTile,
    maps: tuple[ctypes.Array[ctypes.c_char], ...],
    params: _Params,
    *,
    grouped: bool,
    gated: bool,
    device: torch.device,
) -> None:
    """On PyTorch's current stream, as many programs as there are multiprocessors or fewer."""
    tiles, index = params.tiles_m * params.tiles_n, _index_of(device)
    if not tiles:
        return
    function = _function(_compiled_as(tile), grouped, gated, index)
    arguments = (*maps, params)
    addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(each) for each in arguments))
    stream = torch.cuda.current_stream(device).cuda_stream
    check(
        driver.cuLaunchKernel(
            function,
            min(tiles, _num_cores(index)),
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
