"""Make verified state permanent: snapshot scatter, conv-window scatter, track copies.

Accelerator tensors run the Triton kernels, CPU tensors the PyTorch form; both follow the skip rules of
`row_rules`. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from sglang.kernels import triton_support
from sglang.kernels.launch_overlap import overlapping
from sglang.kernels.ops.mamba.row_rules import (
    check_index_vectors,
    drop_committed_targets,
    valid_rows,
)

if triton_support.AVAILABLE:
    from sglang.kernels.ops.mamba import scatter_kernels

_BLOCK = 2048
_BLOCK_N = 64


class SpeculativeCaches(Protocol):
    """What a commit reads of the pool: lists of conv tensors and whole-pool state tensors."""

    conv: Sequence[torch.Tensor]
    temporal: torch.Tensor
    intermediate_ssm: torch.Tensor | None
    intermediate_conv_window: Sequence[torch.Tensor]


def _check_pair(dst: torch.Tensor, src: torch.Tensor, *, contiguous_src: bool) -> None:
    if src.device != dst.device:
        raise ValueError(f"src is on {src.device}, dst is on {dst.device}")
    if dst.dim() < 3:
        raise ValueError(f"dst must be [L, S, *entry], got shape {tuple(dst.shape)}")
    if src.dim() != dst.dim() + 1:
        raise ValueError(
            f"src must be [L, R, D, *entry] for dst {tuple(dst.shape)}, got {tuple(src.shape)}"
        )
    if src.shape[0] != dst.shape[0]:
        raise ValueError(f"src has {src.shape[0]} layers, dst has {dst.shape[0]}")
    if src.shape[3:] != dst.shape[2:]:
        raise ValueError(
            f"entry of src {tuple(src.shape[3:])} differs from entry of dst {tuple(dst.shape[2:])}"
        )
    if contiguous_src and not src.is_contiguous():
        raise ValueError(f"src must be contiguous, got strides {src.stride()}")
    if not _entry_is_contiguous(dst, 2):
        raise ValueError(f"entry dims of dst must be contiguous, got strides {dst.stride()}")


def _entry_is_contiguous(tensor: torch.Tensor, first_dim: int) -> bool:
    expected = 1
    for size, stride in zip(
        reversed(tensor.shape[first_dim:]), reversed(tensor.stride()[first_dim:])
    ):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _scatter_cpu(
    dst: torch.Tensor,
    src: torch.Tensor,
    dests: torch.Tensor,
    steps: torch.Tensor,
    src_rows: torch.Tensor | None,
) -> None:
    if src_rows is None:
        src_rows = torch.arange(steps.numel(), device=steps.device)
    keep = valid_rows(
        steps,
        dests,
        src_rows,
        num_steps=src.shape[2],
        num_slots=dst.shape[1],
        num_src_rows=src.shape[1],
    )
    rows = keep.nonzero().flatten()
    if rows.numel() == 0:
        return
    picked = src[:, src_rows[rows].long(), steps[rows].long()]
    dst[:, dests[rows].long()] = picked.to(dst.dtype)


def _scatter(
    dst: torch.Tensor,
    src: torch.Tensor,
    dests: torch.Tensor,
    steps: torch.Tensor,
    src_rows: torch.Tensor | None,
    track_dests: torch.Tensor | None,
    track_steps: torch.Tensor | None,
    *,
    windows: bool,
) -> None:
    _check_pair(dst, src, contiguous_src=not windows)
    vectors = {"dst_indices_raw": dests, "step_indices_raw": steps}
    if src_rows is not None:
        vectors["src_indices_raw"] = src_rows
    has_track = track_dests is not None and track_steps is not None
    if has_track:
        vectors |= {"dst_indices2_raw": track_dests, "step_indices2_raw": track_steps}
    n = check_index_vectors(device=dst.device, **vectors)
    if n == 0 or dst.numel() == 0:
        return
    if not triton_support.runs_on(dst):
        if has_track:
            track_steps = drop_committed_targets(
                track_steps, track_dests, steps, dests, num_steps=src.shape[2]
            )
            _scatter_cpu(dst, src, track_dests, track_steps, src_rows)
        _scatter_cpu(dst, src, dests, steps, src_rows)
        return
    entry_len = dst[0, 0].numel()
    window = 0
    if windows and not _entry_is_contiguous(src, 3):
        if src.dim() != 5 or src.stride(-1) != 1:
            raise ValueError(
                "conv windows must be [L, R, D, dim, width] with a contiguous width axis, "
                f"got shape {tuple(src.shape)} strides {src.stride()}"
            )
        window = src.shape[-1]
    grid = (-(-entry_len // _BLOCK), 2 * n if has_track else n, dst.shape[0])
    scatter_kernels.scatter_entries_kernel[grid](
        dst,
        src,
        dests,
        steps,
        src_rows,
        track_dests if has_track else None,
        track_steps if has_track else None,
        n,
        dst.shape[1],
        src.shape[1],
        src.shape[2],
        entry_len,
        dst.stride(0),
        dst.stride(1),
        src.stride(0),
        src.stride(1),
        src.stride(2),
        src.stride(3),
        HAS_SRC_ROWS=src_rows is not None,
        HAS_TRACK=has_track,
        WINDOW=window,
        BLOCK=_BLOCK,
        BLOCK_N=_BLOCK_N,
        **overlapping(dst),
        num_warps=8,
    )


def fused_mamba_state_scatter_with_mask(
    dst: torch.Tensor,
    src: torch.Tensor,
    dst_indices_raw: torch.Tensor,
    step_indices_raw: torch.Tensor,
    src_indices_raw: torch.Tensor | None = None,
) -> None:
    """dst[:, dst_indices[i]] = src[:, src_indices[i], step_indices[i]] for every valid row i, in place.

    Shapes: dst [L, S, *entry]; src [L, R, D, *entry], contiguous; indices [n], any integer dtype;
    src_indices_raw None means row i. Layer and slot strides of dst are free.
    Raises: ValueError on a wrong rank, device, layer count, entry shape or index length.
    """
    _scatter(
        dst, src, dst_indices_raw, step_indices_raw, src_indices_raw, None, None, windows=False
    )


def fused_conv_window_scatter_with_mask(
    dst: torch.Tensor,
    src: torch.Tensor,
    dst_indices_raw: torch.Tensor,
    step_indices_raw: torch.Tensor,
    src_indices_raw: torch.Tensor | None = None,
) -> None:
    """As `fused_mamba_state_scatter_with_mask`, for src windows [L, R, D, dim, width] that may overlap."""
    _scatter(dst, src, dst_indices_raw, step_indices_raw, src_indices_raw, None, None, windows=True)


def fused_conv_window_scatter_multi(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    dst_indices_raw: torch.Tensor,
    step_indices_raw: torch.Tensor,
    dst_indices2_raw: torch.Tensor | None = None,
    step_indices2_raw: torch.Tensor | None = None,
) -> None:
    """Scatter the accept set and the second (track) set of every (dst, src) pair, one launch a pair.

    A slot named by both sets keeps the accept set's entry.
    """
    for dst, src in pairs:
        _scatter(
            dst,
            src,
            dst_indices_raw,
            step_indices_raw,
            None,
            dst_indices2_raw,
            step_indices2_raw,
            windows=True,
        )


def scatter_mamba_states_after_mtp_verify(
    mamba_caches: SpeculativeCaches,
    state_indices_tensor: torch.Tensor,
    last_correct_step_indices: torch.Tensor,
    mamba_track_indices: torch.Tensor | None,
    mamba_steps_to_track: torch.Tensor | None,
    src_indices_raw: torch.Tensor | None = None,
    skip_ssm: bool = False,
) -> None:
    """Commit conv windows and, unless `skip_ssm`, state snapshots of a verify: track set and accept set.

    state_indices_tensor [n] working slots; last_correct_step_indices [n] accepted step, -1 none;
    mamba_track_indices / mamba_steps_to_track [n] destination and step of a boundary state, or None;
    src_indices_raw [n] scratch rows, None means row i. Writes `conv` and `temporal` in place.
    Raises: ValueError if snapshots are wanted and the pool has none.
    """
    track_dests = mamba_track_indices if mamba_steps_to_track is not None else None
    track_steps = mamba_steps_to_track if track_dests is not None else None
    if not skip_ssm:
        if mamba_caches.intermediate_ssm is None:
            raise ValueError("the pool records no state snapshots; commit it with skip_ssm=True")
        _scatter(
            mamba_caches.temporal,
            mamba_caches.intermediate_ssm,
            state_indices_tensor,
            last_correct_step_indices,
            src_indices_raw,
            track_dests,
            track_steps,
            windows=False,
        )
    for dst, src in zip(mamba_caches.conv, mamba_caches.intermediate_conv_window):
        _scatter(
            dst,
            src,
            state_indices_tensor,
            last_correct_step_indices,
            src_indices_raw,
            track_dests,
            track_steps,
            windows=True,
        )


def fused_commit_track_indices(
    accept_index: torch.Tensor,
    accept_lens: torch.Tensor,
    seq_lens: torch.Tensor | None,
    draft_token_num: int,
    mamba_track_interval: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Accepted step and track step of each request.

    accept_index [n, A] flat draft positions, -1 unused; accept_lens [n] accepted tokens, bonus included;
    seq_lens [n] lengths before the verify, or None for no tracking. Returns int64 [n] steps, -1 for none.
    """
    n = accept_lens.numel()
    rows = torch.arange(n, device=accept_lens.device)
    lens = accept_lens.long()

    def step_at(position: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        flat = accept_index.long().gather(1, position.clamp(min=0)[:, None])[:, 0]
        step = flat - rows * draft_token_num
        return torch.where(wanted & (flat >= 0), step, torch.full_like(step, -1))

    last_step = step_at(lens - 1, lens > 0)
    if seq_lens is None:
        return last_step, None
    before = seq_lens.long()
    after = before + lens
    boundary = after // mamba_track_interval * mamba_track_interval
    crossed = before // mamba_track_interval != after // mamba_track_interval
    position = torch.where(crossed, boundary - before - 1, torch.zeros_like(before))
    return last_step, step_at(position, crossed & (lens > 0))


def _copy_slots(
    pool: torch.Tensor, src: torch.Tensor, dest: torch.Tensor, mask: torch.Tensor
) -> None:
    if not triton_support.runs_on(pool):
        num_slots = pool.shape[1]
        inside = (src >= 0) & (src < num_slots) & (dest >= 0) & (dest < num_slots)
        rows = (mask.bool() & inside).nonzero().flatten()
        if rows.numel():
            pool[:, dest[rows].long()] = pool[:, src[rows].long()]
        return
    if not _entry_is_contiguous(pool, 2):
        raise ValueError(f"entry dims of the pool must be contiguous, got strides {pool.stride()}")
    entry_len = pool[0, 0].numel()
    grid = (-(-entry_len // _BLOCK), src.numel(), pool.shape[0])
    scatter_kernels.copy_slots_kernel[grid](
        pool,
        src,
        dest,
        mask,
        pool.shape[1],
        entry_len,
        pool.stride(0),
        pool.stride(1),
        BLOCK=_BLOCK,
        **overlapping(pool),
        num_warps=8,
    )


def track_mamba_states_all_layers(
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Copy the working state of masked requests into their track slots, all layers.

    conv_states [L, S, ...], ssm_states [L, S, ...]; the three vectors hold at least `batch_size` rows.
    A destination below 0 marks a freed request and is skipped whatever `check_freed_slots` says.
    """
    if batch_size == 0:
        return
    src = cache_indices[:batch_size]
    dest = mamba_track_indices[:batch_size]
    mask = mamba_track_mask[:batch_size]
    _copy_slots(conv_states, src, dest, mask)
    _copy_slots(ssm_states, src, dest, mask)


def track_mamba_states_if_needed(
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """`track_mamba_states_all_layers` for one layer: conv_states [S, ...], ssm_states [S, ...]."""
    track_mamba_states_all_layers(
        conv_states.unsqueeze(0),
        ssm_states.unsqueeze(0),
        cache_indices,
        mamba_track_mask,
        mamba_track_indices,
        batch_size,
        check_freed_slots,
    )
