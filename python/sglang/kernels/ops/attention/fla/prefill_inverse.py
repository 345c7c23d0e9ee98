"""The inverse of a unit lower triangular matrix, inside a Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def diagonal_inverse(a, C: tl.constexpr, BASE: tl.constexpr):
    """Inverse of I + the diagonal blocks of a [C, C], column after column; exact zeros outside the blocks."""
    N: tl.constexpr = C // BASE
    i = tl.arange(0, C)
    same = (i // BASE)[:, None] == (i // BASE)[None, :]
    blocks = tl.reshape(tl.where(same, a, 0.0), [N, BASE, N, BASE])
    blocks = tl.sum(blocks, axis=2)
    o_b = tl.arange(0, BASE)
    row_of = o_b[None, :, None]
    column_of = o_b[None, None, :]
    # The product with zero keeps the layout of `blocks`, in which a warp holds a block of its own.
    inverse = tl.where(row_of == column_of, 1.0, blocks * 0.0)
    for r in range(BASE - 1):
        column = tl.sum(tl.where(column_of == r, blocks, 0.0), axis=2)
        row = tl.sum(tl.where(row_of == r, inverse, 0.0), axis=1)
        inverse -= column[:, :, None] * row[:, None, :]
    full = tl.broadcast_to(inverse[:, :, None, :], [N, BASE, N, BASE])
    return tl.where(same, tl.reshape(full, [C, C]), 0.0)


@triton.jit
def lower_inverse(a, C: tl.constexpr, BASE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 of a strictly lower a [C, C]: row i depends on rows up to i alone, bit for bit.

    PRECISION "fp16": 16-bit operands, for entries of at most 1; others are those of `tl.dot`.
    """
    i = tl.arange(0, C)
    HALF: tl.constexpr = PRECISION == "fp16"
    DOT: tl.constexpr = "ieee" if HALF else PRECISION
    operand = tl.float16 if HALF else tl.float32
    if BASE == 2:
        beside = i[:, None] == (i ^ 1)[None, :]
        inverse = tl.where(i[:, None] == i[None, :], 1.0, tl.where(beside, -a, 0.0))
    else:
        inverse = diagonal_inverse(a, C, BASE)
    right = a.to(operand)
    for level in tl.static_range(1, 6):
        if (1 << level) >= BASE and (1 << level) < C:
            # [[P, 0], [L, Q]] -> [[P, 0], [-Q L P, Q]]: of inverse @ a only Q L is kept.
            own = inverse.to(operand)
            moved = tl.dot(own, right, input_precision=DOT)
            pair = (i >> level)[:, None] == ((i >> level) ^ 1)[None, :]
            moved = tl.where(pair, moved, 0.0).to(operand)
            inverse -= tl.dot(moved, own, input_precision=DOT)
    return inverse
