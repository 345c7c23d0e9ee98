"""Triton kernels that move whole state entries between slots; pure copies, no arithmetic."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.kernels.launch_overlap_kernels import after_previous


@triton.jit
def is_committed_slot(dest, slots, steps, n, num_steps, BLOCK_N: tl.constexpr):
    """1 if `dest` is the slot of any of the n rows whose step is valid, else 0."""
    found = 0
    start = 0
    while start < n:
        offs = start + tl.arange(0, BLOCK_N)
        inside = offs < n
        slot = tl.load(slots + offs, mask=inside, other=-1).to(tl.int64)
        step = tl.load(steps + offs, mask=inside, other=-1).to(tl.int64)
        hit = inside & (slot == dest) & (step >= 0) & (step < num_steps)
        found = found | tl.max(hit.to(tl.int32), axis=0)
        start += BLOCK_N
    return found


@triton.jit
def scatter_entries_kernel(
    dst,
    src,
    dests,
    steps,
    src_rows,
    track_dests,
    track_steps,
    n,
    num_slots,
    num_src_rows,
    num_steps,
    entry_len,
    dst_stride_layer,
    dst_stride_slot,
    src_stride_layer,
    src_stride_row,
    src_stride_step,
    src_stride_dim,
    HAS_SRC_ROWS: tl.constexpr,
    HAS_TRACK: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """dst[l, dest] = src[l, row, step] for the accept set and, with HAS_TRACK, the track set.

    Grid (entry blocks, rows x sets, layers). WINDOW 0 copies a contiguous entry; otherwise the source entry
    is [dim, WINDOW] with its own dim stride (windows that overlap in memory).
    """
    after_previous(OVERLAP)
    i_block = tl.program_id(0)
    i_row = tl.program_id(1)
    i_layer = tl.program_id(2).to(tl.int64)
    i_req = i_row
    dest = tl.cast(-1, tl.int64)
    step = tl.cast(-1, tl.int64)
    if HAS_TRACK:
        i_req = i_row % n
        if i_row < n:
            step = tl.load(track_steps + i_req).to(tl.int64)
            dest = tl.load(track_dests + i_req).to(tl.int64)
            if is_committed_slot(dest, dests, steps, n, num_steps, BLOCK_N) != 0:
                step = tl.cast(-1, tl.int64)
        else:
            step = tl.load(steps + i_req).to(tl.int64)
            dest = tl.load(dests + i_req).to(tl.int64)
    else:
        step = tl.load(steps + i_req).to(tl.int64)
        dest = tl.load(dests + i_req).to(tl.int64)
    row = i_req.to(tl.int64)
    if HAS_SRC_ROWS:
        row = tl.load(src_rows + i_req).to(tl.int64)
    valid = (step >= 0) & (step < num_steps) & (dest >= 0) & (dest < num_slots)
    valid = valid & (row >= 0) & (row < num_src_rows)
    if valid:
        offs = i_block * BLOCK + tl.arange(0, BLOCK)
        inside = offs < entry_len
        p_src = src + i_layer * src_stride_layer + row * src_stride_row + step * src_stride_step
        if WINDOW > 0:
            p_entry = p_src + (offs // WINDOW).to(tl.int64) * src_stride_dim + offs % WINDOW
        else:
            p_entry = p_src + offs
        value = tl.load(p_entry, mask=inside)
        p_dst = dst + i_layer * dst_stride_layer + dest * dst_stride_slot + offs
        tl.store(p_dst, value.to(dst.dtype.element_ty), mask=inside)


@triton.jit
def copy_slots_kernel(
    pool,
    src_slots,
    dest_slots,
    mask,
    num_slots,
    entry_len,
    stride_layer,
    stride_slot,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """pool[l, dest] = pool[l, src] for rows whose mask is set. Grid (entry blocks, rows, layers)."""
    after_previous(OVERLAP)
    i_row = tl.program_id(1)
    i_layer = tl.program_id(2).to(tl.int64)
    source = tl.load(src_slots + i_row).to(tl.int64)
    dest = tl.load(dest_slots + i_row).to(tl.int64)
    wanted = tl.load(mask + i_row).to(tl.int32) != 0
    inside_pool = (source >= 0) & (source < num_slots) & (dest >= 0) & (dest < num_slots)
    if wanted & inside_pool & (source != dest):
        offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = offs < entry_len
        base = pool + i_layer * stride_layer
        value = tl.load(base + source * stride_slot + offs, mask=inside)
        tl.store(base + dest * stride_slot + offs, value, mask=inside)
