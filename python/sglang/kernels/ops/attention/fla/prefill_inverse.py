"""The inverse of a unit lower triangular matrix, inside a Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK: tl.constexpr = tl.constexpr(16)
"""Rows of the diagonal blocks that are inverted first."""


@triton.jit
def diagonal_inverse(a, C: tl.constexpr):
    """Inverse of I + the diagonal blocks of a [C, C], column after column; exact zeros outside the blocks."""
    N: tl.constexpr = C // BLOCK
    i = tl.arange(0, C)
    same = (i // BLOCK)[:, None] == (i // BLOCK)[None, :]
    blocks = tl.reshape(tl.where(same, a, 0.0), [N, BLOCK, N, BLOCK])
    blocks = tl.sum(blocks, axis=2)
    o_b = tl.arange(0, BLOCK)
    row_of = o_b[None, :, None]
    column_of = o_b[None, None, :]
    # The product with zero keeps the layout of `blocks`, in which a warp holds a block of its own.
    inverse = tl.where(row_of == column_of, 1.0, blocks * 0.0)
    for r in range(BLOCK - 1):
        column = tl.sum(tl.where(column_of == r, blocks, 0.0), axis=2)
        row = tl.sum(tl.where(row_of == r, inverse, 0.0), axis=1)
        inverse -= column[:, :, None] * row[:, None, :]
    full = tl.broadcast_to(inverse[:, :, None, :], [N, BLOCK, N, BLOCK])
    return tl.where(same, tl.reshape(full, [C, C]), 0.0)


@triton.jit
def lower_inverse(a, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 of a strictly lower a [C, C] in fp32: row i depends on rows up to i alone, bit for bit.

    PRECISION is that of `tl.dot`.
    """
    i = tl.arange(0, C)
    inverse = diagonal_inverse(a, C)
    for level in tl.static_range(4, 6):
        if (1 << level) < C:
            # [[P, 0], [L, Q]] -> [[P, 0], [-Q L P, Q]]: of inverse @ a only Q L is kept.
            moved = tl.dot(inverse, a, input_precision=PRECISION)
            pair = (i >> level)[:, None] == ((i >> level) ^ 1)[None, :]
            moved = tl.where(pair, moved, 0.0)
            inverse -= tl.dot(moved, inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def _partner(i, level: tl.constexpr):
    """Number of the block of 2^level rows before row i's own where the two are merged, else -1."""
    block = i >> level
    return tl.where((block & 1) == 1, block - 1, -1)


@triton.jit
def block_inverse(a, C: tl.constexpr):
    """[C / BLOCK, BLOCK, BLOCK] fp32: the inverses of I + the diagonal blocks of a [C, C], by products alone.

    Of a, only what lies below the diagonal enters. A warp holds a block, and its inverse beside its transpose:
    the layout of a product's result is that of a left operand and, transposed, of a right one, so that no value
    leaves its thread after the first product.
    """
    N: tl.constexpr = C // BLOCK
    i = tl.arange(0, C)
    same = tl.where((i // BLOCK)[:, None] == (i // BLOCK)[None, :], 1.0, 0.0)
    blocks = tl.sum(tl.reshape(a * same, [N, BLOCK, N, BLOCK]), axis=2)
    o_b = tl.arange(0, BLOCK)
    row = o_b[None, :, None]
    column = o_b[None, None, :]
    # A product with the identity transposes, and rounds no fp16 value.
    one = tl.where(row == column, 1.0, blocks * 0.0)
    flipped = tl.dot(one.to(tl.float16), tl.trans(blocks.to(tl.float16), (0, 2, 1)))
    right = tl.trans(flipped.to(tl.float16), (0, 2, 1))
    inverse = one - blocks * tl.where(_partner(row, 0) == column, 1.0, 0.0)
    other = one - flipped * tl.where(_partner(column, 0) == row, 1.0, 0.0)
    for level in tl.static_range(1, 4):
        own_flipped = other.to(tl.float16)
        pair = _partner(row, level) == (column >> level)
        moved = tl.dot(inverse.to(tl.float16), right) * tl.where(pair, -1.0, 0.0)
        moved = moved.to(tl.float16)
        inverse = tl.dot(moved, tl.trans(own_flipped, (0, 2, 1)), acc=inverse)
        other = tl.dot(own_flipped, tl.trans(moved, (0, 2, 1)), acc=other)
    return inverse


@triton.jit
def lower_inverse_fp16(a, C: tl.constexpr):
    """(I + a)^-1 of a [C, C] of which only what lies below the diagonal counts; 16-bit operands, fp32 sums.

    For entries of at most 1. Row i depends on rows up to i alone, bit for bit.
    """
    N: tl.constexpr = C // BLOCK
    i = tl.arange(0, C)
    block = block_inverse(a, C)
    full = tl.broadcast_to(block[:, :, None, :], [N, BLOCK, N, BLOCK])
    # The product with zero keeps the layout of a, which is that of the products.
    same = tl.where((i // BLOCK)[:, None] == (i // BLOCK)[None, :], 1.0, a * 0.0)
    inverse = tl.reshape(full, [C, C]) * same
    right = a.to(tl.float16)
    for level in tl.static_range(4, 6):
        if (1 << level) < C:
            own = inverse.to(tl.float16)
            pair = _partner(i, level)[:, None] == (i >> level)[None, :]
            moved = tl.dot(own, right) * tl.where(pair, -1.0, 0.0)
            inverse = tl.dot(moved.to(tl.float16), own, acc=inverse)
    return inverse
