"""Triton kernels of the stable counting sort by expert."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.kernels.launch_overlap_kernels import after_previous


@triton.jit
def count_pairs(p_chosen, start, end, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr):
    """How many of the pairs [start, end), at most BLOCK, chose each expert: [BLOCK_E] int32."""
    pair = start + tl.arange(0, BLOCK)
    chosen = tl.load(p_chosen + pair, mask=pair < end, other=-1)
    return tl.histogram(tl.maximum(chosen, 0), BLOCK_E, mask=chosen >= 0)


@triton.jit(do_not_specialize=("num_pairs",))
def count_kernel(
    p_chosen, p_counts, num_pairs, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, OVERLAP: tl.constexpr
):
    """counts[block, expert] of BLOCK consecutive pairs. Grid (blocks,)."""
    after_previous(OVERLAP)
    start = tl.program_id(0) * BLOCK
    counts = count_pairs(p_chosen, start, num_pairs, BLOCK, BLOCK_E)
    tl.store(p_counts + tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E), counts)


@triton.jit(do_not_specialize=("num_pairs", "num_tiles", "num_blocks"))
def place_kernel(
    p_chosen,
    p_counts,
    p_pairs,
    p_tile_experts,
    num_pairs,
    num_experts,
    num_tiles,
    num_blocks,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Puts PART consecutive pairs behind their expert's earlier ones. Grid (parts or more,).

    Each expert's pairs ascend and are padded with -1 to whole tiles. Without COUNTED all pairs fit one
    BLOCK and every program counts them itself. The programs share out padding and marking of tiles.
    """
    after_previous(OVERLAP)
    start = tl.program_id(0) * PART
    pair = start + tl.arange(0, PART)
    chosen = tl.load(p_chosen + pair, mask=pair < num_pairs, other=-1)
    if COUNTED:
        own_block = start // BLOCK
        expert = tl.arange(0, BLOCK_E)
        before = count_pairs(p_chosen, own_block * BLOCK, start, BLOCK, BLOCK_E)
        total = tl.zeros([BLOCK_E], tl.int32)
        for first in range(0, num_blocks, BLOCK_B):
            block = first + tl.arange(0, BLOCK_B)
            p_from = p_counts + block[:, None] * BLOCK_E + expert[None, :]
            counts = tl.load(p_from, mask=(block < num_blocks)[:, None], other=0)
            total += tl.sum(counts, 0)
            before += tl.sum(tl.where((block < own_block)[:, None], counts, 0), 0)
        same = chosen[:, None] == chosen[None, :]
        rank = tl.sum((same & (pair[None, :] < pair[:, None])).to(tl.int32), 1)
        rank += tl.gather(before, tl.maximum(chosen, 0), 0)
    else:
        other = tl.arange(0, BLOCK)
        theirs = tl.load(p_chosen + other, mask=other < num_pairs, other=-1)
        total = tl.histogram(tl.maximum(theirs, 0), BLOCK_E, mask=theirs >= 0)
        same = chosen[:, None] == theirs[None, :]
        rank = tl.sum((same & (other[None, :] < pair[:, None])).to(tl.int32), 1)
    tiles = (total + BLOCK_M - 1) // BLOCK_M
    end_tile = tl.cumsum(tiles, 0)
    first_slot = (end_tile - tiles) * BLOCK_M

    slot = tl.gather(first_slot, tl.maximum(chosen, 0), 0) + rank
    tl.store(p_pairs + slot, pair, mask=chosen >= 0)

    step = tl.num_programs(0) * CHUNK
    for at in range(tl.program_id(0) * CHUNK, num_experts, step):
        padded = tl.minimum(at + tl.arange(0, CHUNK), BLOCK_E - 1)
        used = tl.gather(total, padded, 0)
        room = (used + BLOCK_M - 1) // BLOCK_M * BLOCK_M
        free = used[:, None] + tl.arange(0, BLOCK_M)[None, :]
        p_to = p_pairs + tl.gather(first_slot, padded, 0)[:, None] + free
        tl.store(p_to, tl.full([CHUNK, BLOCK_M], -1, tl.int32), mask=free < room[:, None])
    for at in range(tl.program_id(0) * CHUNK, num_tiles, step):
        tile = at + tl.arange(0, CHUNK)
        owner = tl.sum((end_tile[None, :] <= tile[:, None]).to(tl.int32), 1)
        owner = tl.where(tile < tl.max(end_tile, 0), owner, -1)
        tl.store(p_tile_experts + tile, owner, mask=tile < num_tiles)
