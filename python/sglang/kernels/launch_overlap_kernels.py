"""What a Triton kernel does first if it may be launched before the kernel in front of it has ended.

Weights may be fetched towards the kernel while it waits: no kernel of a step writes them, and a fetch into the
L2 cache, which all multiprocessors share, returns nothing that could be out of date.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def after_previous(OVERLAP: tl.constexpr):
    """Wait until the kernel in front has ended, then let the next one be set up. Nothing without OVERLAP.

    The next kernel waits in turn, so this may be said at once. Both are harmless in an ordinary launch.
    """
    if OVERLAP:
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def fetch_rows(
    p_rows, first, num_rows, stride, start, end, ROWS: tl.constexpr, PIECE: tl.constexpr
):  # fmt: skip
    """Columns [start, end) of ROWS rows from ``first`` on, as far as there are, towards the L2 cache.

    PIECE columns are 512 bytes; rows begin at multiples of 16 bytes and start and end at whole pieces.
    """
    row = first + tl.arange(0, ROWS)
    piece = tl.arange(0, 4) * PIECE
    p_row = p_rows + row.to(tl.int64)[:, None] * stride
    for at in range(start, end, 4 * PIECE):
        column = at + piece[None, :]
        wanted = (row < num_rows)[:, None] & (column < end)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; "
            "@p cp.async.bulk.prefetch.L2.global [$1], 512; mov.u32 $0, 0; }",
            "=r,l,r",
            [(p_row + column).to(tl.int64), wanted.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
