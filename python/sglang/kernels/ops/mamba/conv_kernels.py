"""Triton kernels of the causal depthwise convolution in front of the gated delta rule."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def conv_update_kernel(
    x,
    out,
    weight,
    bias,
    conv_state,
    slots,
    windows,
    rows,
    parents,
    dim,
    num_tokens,
    num_slots,
    num_rows,
    num_steps,
    pad_slot,
    x_stride_batch,
    x_stride_dim,
    x_stride_token,
    out_stride_batch,
    out_stride_dim,
    out_stride_token,
    weight_stride,
    state_stride_slot,
    state_stride_dim,
    state_stride_col,
    window_stride_row,
    window_stride_step,
    window_stride_dim,
    window_stride_col,
    parent_stride,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    RECORD: tl.constexpr,
    TREE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """A few tokens a request. Grid (dim blocks, requests). RECORD leaves the state alone and stores windows."""
    i_n = tl.program_id(1)
    o_d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_d = o_d < dim
    n64 = i_n.to(tl.int64)
    slot = n64
    if HAS_SLOTS:
        slot = tl.load(slots + i_n).to(tl.int64)
    live = (slot != pad_slot) & (slot >= 0) & (slot < num_slots)
    p_x = x + n64 * x_stride_batch + o_d * x_stride_dim
    p_out = out + n64 * out_stride_batch + o_d * out_stride_dim
    p_state = conv_state + slot * state_stride_slot + o_d * state_stride_dim
    row = tl.cast(-1, tl.int64)
    if RECORD:
        row = tl.load(rows + i_n).to(tl.int64)
    record = (row >= 0) & (row < num_rows)

    t = 0
    while t < num_tokens:
        acc = tl.zeros([BLOCK], dtype=tl.float32)
        if HAS_BIAS:
            acc += tl.load(bias + o_d, mask=in_d, other=0.0).to(tl.float32)
        # cur is the token WIDTH-1-tap places before t along its ancestors; below zero it counts into
        # the state.
        for tap in tl.static_range(WIDTH):
            cur = t - (WIDTH - 1 - tap)
            if TREE:
                cur = t
                for _ in tl.static_range(WIDTH - 1 - tap):
                    if cur >= 0:
                        up = tl.load(parents + n64 * parent_stride + cur).to(tl.int32)
                        cur = tl.where((up >= 0) & (up < cur), up, -1)
                    else:
                        cur = cur - 1
            value = tl.load(p_x + cur * x_stride_token, mask=in_d & (cur >= 0), other=0.0)
            past = tl.load(
                p_state + (WIDTH - 1 + cur) * state_stride_col,
                mask=in_d & (cur < 0) & live,
                other=0.0,
            )
            value = value.to(tl.float32) + past.to(tl.float32)
            tap_weight = tl.load(weight + o_d * weight_stride + tap, mask=in_d, other=0.0)
            acc += value * tap_weight.to(tl.float32)
            if RECORD:
                # Column tap-1 of the window after t is the input WIDTH-1-tap tokens before t.
                if tap > 0:
                    p_window = windows + row * window_stride_row + t * window_stride_step
                    p_window += o_d * window_stride_dim + (tap - 1) * window_stride_col
                    keep = in_d & record & live & (t < num_steps)
                    tl.store(p_window, value.to(windows.dtype.element_ty), mask=keep)
        if SILU:
            acc = acc / (1.0 + tl.exp(-acc))
        acc = tl.where(live, acc, 0.0)
        tl.store(p_out + t * out_stride_token, acc.to(out.dtype.element_ty), mask=in_d)
        t += 1

    if not RECORD:
        # The new window may overlap the old one in memory: all reads come before any write.
        o_c = tl.arange(0, BLOCK_W)
        cur = num_tokens - (WIDTH - 1) + o_c
        inside = in_d[:, None] & (o_c < WIDTH - 1)[None, :]
        new = (cur >= 0)[None, :]
        p_new = p_x[:, None] + cur[None, :] * x_stride_token
        p_old = p_state[:, None] + (o_c + num_tokens)[None, :] * state_stride_col
        moved = tl.load(p_new, mask=inside & new, other=0.0).to(tl.float32)
        moved += tl.load(p_old, mask=inside & (cur < 0)[None, :] & live, other=0.0).to(tl.float32)
        tl.debug_barrier()
        p_to = p_state[:, None] + o_c[None, :] * state_stride_col
        tl.store(p_to, moved.to(conv_state.dtype.element_ty), mask=inside & live)


@triton.jit
def conv_prefill_kernel(
    x,
    out,
    weight,
    bias,
    conv_state,
    slots,
    has_initial_state,
    cu_seqlens,
    dim,
    num_slots,
    pad_slot,
    x_stride_dim,
    x_stride_token,
    out_stride_dim,
    out_stride_token,
    weight_stride,
    state_stride_slot,
    state_stride_dim,
    state_stride_col,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Packed prompts. Grid (token blocks of the longest prompt, dim blocks, prompts)."""
    i_n = tl.program_id(2)
    first = tl.load(cu_seqlens + i_n).to(tl.int64)
    length = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - first).to(tl.int32)
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    if tl.program_id(0) * BLOCK_T < length:
        o_d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        in_d = o_d < dim
        in_t = o_t < length
        slot = tl.cast(0, tl.int64)
        readable = slot < 0
        live = slot >= 0
        if HAS_STATE:
            slot = tl.load(slots + i_n).to(tl.int64)
            live = (slot != pad_slot) & (slot >= 0) & (slot < num_slots)
            readable = live
            if HAS_MASK:
                readable = readable & (tl.load(has_initial_state + i_n).to(tl.int32) != 0)
        acc = tl.zeros([BLOCK_T, BLOCK], dtype=tl.float32)
        if HAS_BIAS:
            acc += tl.load(bias + o_d, mask=in_d, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(WIDTH):
            cur = o_t - (WIDTH - 1 - tap)
            here = in_t[:, None] & in_d[None, :]
            p_x = x + (first + cur)[:, None] * x_stride_token + o_d[None, :] * x_stride_dim
            value = tl.load(p_x, mask=here & (cur >= 0)[:, None], other=0.0).to(tl.float32)
            if HAS_STATE:
                p_past = conv_state + slot * state_stride_slot + o_d[None, :] * state_stride_dim
                p_past += (WIDTH - 1 + cur)[:, None] * state_stride_col
                old = here & (cur < 0)[:, None] & readable
                value += tl.load(p_past, mask=old, other=0.0).to(tl.float32)
            tap_weight = tl.load(weight + o_d * weight_stride + tap, mask=in_d, other=0.0)
            acc += value * tap_weight.to(tl.float32)[None, :]
        if SILU:
            acc = acc / (1.0 + tl.exp(-acc))
        acc = tl.where(live, acc, 0.0)
        p_out = out + (first + o_t)[:, None] * out_stride_token + o_d[None, :] * out_stride_dim
        tl.store(p_out, acc.to(out.dtype.element_ty), mask=in_t[:, None] & in_d[None, :])


@triton.jit
def conv_window_kernel(
    x,
    conv_state,
    slots,
    dests,
    counts,
    has_initial_state,
    cu_seqlens,
    dim,
    num_slots,
    x_stride_dim,
    x_stride_token,
    state_stride_slot,
    state_stride_dim,
    state_stride_col,
    WIDTH: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """conv_state[dest] = the last WIDTH-1 inputs after `count` tokens of the prompt. Grid (dim blocks, prompts)."""
    i_n = tl.program_id(1)
    first = tl.load(cu_seqlens + i_n).to(tl.int64)
    length = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - first).to(tl.int32)
    count = length
    if HAS_COUNTS:
        count = tl.load(counts + i_n).to(tl.int32)
    slot = tl.load(slots + i_n).to(tl.int64)
    dest = tl.load(dests + i_n).to(tl.int64)
    live = (slot >= 0) & (slot < num_slots) & (dest >= 0) & (dest < num_slots)
    live = live & (count > 0) & (count <= length)
    readable = live
    if HAS_MASK:
        readable = readable & (tl.load(has_initial_state + i_n).to(tl.int32) != 0)
    o_d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_d = o_d < dim
    p_from = conv_state + slot * state_stride_slot + o_d * state_stride_dim
    p_to = conv_state + dest * state_stride_slot + o_d * state_stride_dim
    # In place, the new window may overlap the old one: all reads come before any write.
    o_c = tl.arange(0, BLOCK_W)
    cur = count - (WIDTH - 1) + o_c
    inside = in_d[:, None] & (o_c < WIDTH - 1)[None, :]
    p_new = x + (first + cur)[None, :] * x_stride_token + o_d[:, None] * x_stride_dim
    p_old = p_from[:, None] + (o_c + count)[None, :] * state_stride_col
    value = tl.load(p_new, mask=inside & live & (cur >= 0)[None, :], other=0.0).to(tl.float32)
    old = inside & readable & (cur < 0)[None, :]
    value += tl.load(p_old, mask=old, other=0.0).to(tl.float32)
    tl.debug_barrier()
    p_store = p_to[:, None] + o_c[None, :] * state_stride_col
    tl.store(p_store, value.to(conv_state.dtype.element_ty), mask=inside & live)
