"""FP8 experts of prompts with rows by slot: sorted by expert, in whole tiles, so that the copy engine loads them."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang.kernels import triton_support
from sglang.kernels.ops.moe.sort import ExpertOrder, ExpertRows
from sglang.kernels.ops.quantization.fp8 import check_block_scales
from sglang.kernels.ops.quantization.hopper_cuda import (
    TILE_ROWS,
    SlotRows,
    hopper_product,
    hopper_tile,
)
from sglang.kernels.ops.quantization.launch import HopperTile
from sglang.kernels.ops.quantization.rows import QuantizedRows

if triton_support.AVAILABLE:
    from sglang.kernels.ops.moe.slot_kernels import sort_rows_kernel

_ROWS = 4
_WORDS = 512
_WORD_BYTES = 4


def slot_tile(
    num_tokens: int, gate_up: Tensor, down: Tensor, dtype: torch.dtype
) -> HopperTile | None:
    """The table's tile if the CUDA kernel serves both products of experts [E, 2I, H] and [E, H, I], else None."""
    up = hopper_tile(num_tokens, gate_up, dtype, gated=True)
    return None if up is None else hopper_tile(num_tokens, down, dtype, gated=False)


def sort_rows(values: Tensor, order: ExpertOrder, top_k: int) -> Tensor:
    """Row ``pair // top_k`` of ``values`` [T, K], a type of one byte, at each pair's slot of ``order``.

    K is a multiple of 16. Returns [len(order.pairs), K]; slots without a pair are undefined.
    Raises: ValueError if K is not such a multiple.
    """
    columns = values.shape[1]
    if columns % 16 or values.stride(0) % 16 or values.element_size() != 1:
        raise ValueError(f"rows of {columns} {values.dtype} are not whole vectors of 16 bytes")
    made = torch.empty((len(order.pairs), columns), dtype=values.dtype, device=values.device)
    if made.numel():
        sort_rows_kernel[(len(order.pairs) // _ROWS,)](
            values.view(torch.int32),
            made.view(torch.int32),
            order.pairs,
            order.tile_experts,
            columns // _WORD_BYTES,
            values.stride(0) // _WORD_BYTES,
            top_k,
            BLOCK_M=order.block_m,
            ROWS=_ROWS,
            BLOCK_W=_WORDS,
            num_warps=4,
        )
    return made


def up_by_slot(
    x: QuantizedRows, weight: Tensor, weight_scale: Tensor, rows: ExpertRows, tile: HopperTile
) -> QuantizedRows:
    """``grouped_gated`` of rows by token, results by slot [num_tiles * 128, I], the shared expert's behind the others.

    Raises: ValueError if the scales, the order's tiles or the product do not fit the kernel.
    """
    check_block_scales(weight, weight_scale)
    slots = _slots(rows, sort_rows(x.values, rows.order, rows.top_k))
    size = TILE_ROWS * slots.num_tiles
    out = QuantizedRows.empty(size, weight.shape[1] // 2, dtype=x.dtype, device=x.device)
    hopper_product(x, weight, weight_scale, out.values, out.scale, tile, slots=slots)
    return out


def down_by_slot(
    inner: QuantizedRows, weight: Tensor, weight_scale: Tensor, rows: ExpertRows, tile: HopperTile
) -> Tensor:
    """``grouped_linear`` by pair of rows that lie by slot, as ``up_by_slot`` makes them.

    Raises: ValueError if the scales, the order's tiles or the product do not fit the kernel.
    """
    check_block_scales(weight, weight_scale)
    shape = (rows.num_results, weight.shape[1])
    out = torch.empty(shape, dtype=inner.dtype, device=inner.device)
    hopper_product(inner, weight, weight_scale, out, None, tile, slots=_slots(rows, None))
    return out


def _slots(rows: ExpertRows, sorted_values: Tensor | None) -> SlotRows:
    """Raises: ValueError if the order is not in tiles of the kernel's height."""
    order = rows.order
    if order.block_m != TILE_ROWS:
        raise ValueError(f"an order in tiles of {order.block_m} rows, not {TILE_ROWS}")
    return SlotRows(
        order.pairs,
        order.tile_experts,
        rows.num_pairs,
        rows.top_k,
        rows.shared_rows,
        sorted_values,
    )
