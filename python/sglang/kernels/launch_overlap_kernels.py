"""What a Triton kernel does first if it may be launched before the kernel in front of it has ended."""

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
