"""Triton kernels of the causal depthwise convolution in front of the gated delta rule."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.kernels.launch_overlap_kernels import after_previous


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
    OVERLAP: tl.constexpr,
):
    """A few tokens a request. RECORD leaves the state alone and stores windows.

    Grid (dim blocks, requests, tokens) with RECORD, where no token waits for another; else (dim blocks,
    requests, 1), since the state is written once all are read. Windows that overlap in memory get one
    value from several programs.
    """
    after_previous(OVERLAP)
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

    t = tl.program_id(2)
    end = num_tokens
    if RECORD:
        end = t + 1
    while t < end:
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
def _prompt_rows(p_x, first_row, length, in_d, stride, ROWS: tl.constexpr):
    """Rows first_row.. of a prompt as a tuple; zeros from `length` on."""
    rows = ()
    for i in tl.static_range(ROWS):
        inside = in_d & (first_row + i < length)
        rows = rows + (tl.load(p_x + i * stride, mask=inside, other=0.0),)
    return rows


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
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Packed prompts. Grid (dim blocks, token blocks of the longest prompt, prompts).

    A program slides down BLOCK_T tokens of BLOCK channels; each row is loaded once, ROWS of them at a time,
    and the last WIDTH-1 stay in registers.
    """
    i_n = tl.program_id(2)
    first = tl.load(cu_seqlens + i_n).to(tl.int64)
    length = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - first).to(tl.int32)
    begin = tl.program_id(1) * BLOCK_T
    if begin < length:
        o_d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        in_d = o_d < dim
        slot = tl.cast(0, tl.int64)
        readable = slot < 0
        live = slot >= 0
        if HAS_STATE:
            slot = tl.load(slots + i_n).to(tl.int64)
            live = (slot != pad_slot) & (slot >= 0) & (slot < num_slots)
            readable = live
            if HAS_MASK:
                readable = readable & (tl.load(has_initial_state + i_n).to(tl.int32) != 0)
        start = tl.zeros([BLOCK], dtype=tl.float32)
        if HAS_BIAS:
            start += tl.load(bias + o_d, mask=in_d, other=0.0).to(tl.float32)
        p_x = x + (first + begin) * x_stride_token + o_d * x_stride_dim
        p_out = out + (first + begin) * out_stride_token + o_d * out_stride_dim
        window = ()
        taps = ()
        for tap in tl.static_range(WIDTH):
            taps = taps + (
                tl.load(weight + o_d * weight_stride + tap, mask=in_d, other=0.0).to(tl.float32),
            )
            if tap > 0:
                cur = begin - WIDTH + tap
                value = tl.load(
                    p_x + (tap - WIDTH) * x_stride_token, mask=in_d & (cur >= 0), other=0.0
                ).to(tl.float32)
                if HAS_STATE:
                    p_past = conv_state + slot * state_stride_slot + o_d * state_stride_dim
                    value += tl.load(
                        p_past + (WIDTH - 1 + cur) * state_stride_col,
                        mask=in_d & (cur < 0) & readable,
                        other=0.0,
                    ).to(tl.float32)
                window = window + (value,)
        for t in range(begin, tl.minimum(begin + BLOCK_T, length), ROWS):
            rows = _prompt_rows(p_x, t, length, in_d, x_stride_token, ROWS)
            for i in tl.static_range(ROWS):
                window = window + (rows[i].to(tl.float32),)
                acc = start
                for tap in tl.static_range(WIDTH):
                    acc += window[tap] * taps[tap]
                if SILU:
                    acc = acc / (1.0 + tl.exp(-acc))
                acc = tl.where(live, acc, 0.0)
                inside = in_d & (t + i < length)
                tl.store(p_out + i * out_stride_token, acc.to(out.dtype.element_ty), mask=inside)
                window = window[1:]
            p_x += ROWS * x_stride_token
            p_out += ROWS * out_stride_token


@triton.jit
def _window_after(
    p_x,
    p_state,
    count,
    live,
    readable,
    in_d,
    x_stride_token,
    state_stride_col,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """[BLOCK, BLOCK_W] fp32: the last WIDTH-1 inputs after `count` tokens; below the first, the old window's."""
    o_c = tl.arange(0, BLOCK_W)
    cur = count - (WIDTH - 1) + o_c
    inside = in_d[:, None] & (o_c < WIDTH - 1)[None, :]
    p_new = p_x[:, None] + cur[None, :] * x_stride_token
    p_old = p_state[:, None] + (o_c + count)[None, :] * state_stride_col
    value = tl.load(p_new, mask=inside & live & (cur >= 0)[None, :], other=0.0).to(tl.float32)
    old = inside & readable & (cur < 0)[None, :]
    return value + tl.load(p_old, mask=old, other=0.0).to(tl.float32)


@triton.jit
def conv_window_kernel(
    x,
    conv_state,
    slots,
    track_dests,
    track_rows,
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
    HAS_TRACK: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Store the window after `track_rows` tokens of a prompt at its destination, then the last one in its slot.

    Grid (dim blocks, prompts).
    """
    i_n = tl.program_id(1)
    first = tl.load(cu_seqlens + i_n).to(tl.int64)
    length = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - first).to(tl.int32)
    slot = tl.load(slots + i_n).to(tl.int64)
    live = (slot >= 0) & (slot < num_slots) & (length > 0)
    readable = live
    if HAS_MASK:
        readable = readable & (tl.load(has_initial_state + i_n).to(tl.int32) != 0)
    o_d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_d = o_d < dim
    p_x = x + first * x_stride_token + o_d * x_stride_dim
    p_channel = conv_state + o_d * state_stride_dim
    p_state = p_channel + slot * state_stride_slot
    o_c = tl.arange(0, BLOCK_W)
    inside = in_d[:, None] & (o_c < WIDTH - 1)[None, :]
    last = _window_after(
        p_x, p_state, length, live, readable, in_d, x_stride_token, state_stride_col, WIDTH, BLOCK_W
    )
    element = conv_state.dtype.element_ty
    if HAS_TRACK:
        count = tl.load(track_rows + i_n).to(tl.int32)
        dest = tl.load(track_dests + i_n).to(tl.int64)
        track = live & (dest >= 0) & (dest < num_slots) & (count > 0) & (count <= length)
        wanted = _window_after(
            p_x,
            p_state,
            count,
            track,
            readable & track,
            in_d,
            x_stride_token,
            state_stride_col,
            WIDTH,
            BLOCK_W,
        )
        tl.debug_barrier()
        p_to = (p_channel + dest * state_stride_slot)[:, None] + o_c[None, :] * state_stride_col
        tl.store(p_to, wanted.to(element), mask=inside & track)
    # A new window may overlap the old one in memory: all reads come before any write.
    tl.debug_barrier()
    p_to = p_state[:, None] + o_c[None, :] * state_stride_col
    tl.store(p_to, last.to(element), mask=inside & live)
