"""Triton kernel that copies FP8 rows to the slots of their pairs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=("top_k",))
def sort_rows_kernel(
    p_x,
    p_sorted,
    p_pairs,
    p_tile_experts,
    words,
    stride_x,
    top_k,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """sorted[slot] = x[pair // top_k] of every slot with a pair, in words of 4 bytes. Grid (slots / ROWS,).

    Slots of padding and of tiles that are nobody's stay as they are. sorted's rows have ``words`` words.
    """
    first = tl.program_id(0) * ROWS
    if tl.load(p_tile_experts + first // BLOCK_M) >= 0:
        slot = first + tl.arange(0, ROWS)
        pair = tl.load(p_pairs + slot)
        p_from = p_x + (pair // top_k).to(tl.int64)[:, None] * stride_x
        p_to = p_sorted + slot.to(tl.int64)[:, None] * words
        for start in range(0, words, BLOCK_W):
            word = start + tl.arange(0, BLOCK_W)
            mask = (pair >= 0)[:, None] & (word < words)[None, :]
            x = tl.load(p_from + word[None, :], mask=mask)
            tl.store(p_to + word[None, :], x, mask=mask)
