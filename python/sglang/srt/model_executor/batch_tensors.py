"""Build the ForwardBatch of a call from host-side row numbers and lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)


def make_forward_batch(
    mode: ForwardMode,
    *,
    req_pool: HybridReqToTokenPool,
    rows: Sequence[int],
    prefix_lens: Sequence[int],
    query_lens: Sequence[int],
    input_ids: Tensor,
    logits_rows: Tensor | None = None,
    capture_hidden: CaptureHiddenMode = CaptureHiddenMode.NULL,
    capture_layer_ids: tuple[int, ...] = (),
    spec_hidden: Tensor | None = None,
    track_slots: Sequence[int] | None = None,
    track_rows: Sequence[int] | None = None,
    with_state: bool = True,
) -> ForwardBatch:
    """Return the batch whose request r covers positions ``prefix_lens[r] ..`` of its row.

    input_ids    [T] int64 on the pools' device, requests one after the other
    track_slots  state slot per request for a boundary state, -1 none; with ``track_rows``
    with_state   False for a draft model without recurrent layers
    """
    device = req_pool.req_to_token.device
    starts = np.asarray(prefix_lens, dtype=np.int64)
    lens = np.asarray(query_lens, dtype=np.int64)
    ends = np.cumsum(lens)
    positions_np = np.arange(ends[-1]) + np.repeat(starts - (ends - lens), lens)
    row_of_token = np.repeat(np.asarray(rows, dtype=np.int64), lens)
    query_start = np.zeros(len(lens) + 1, dtype=np.int32)
    query_start[1:] = ends

    def upload(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    positions = upload(positions_np)
    row_index = upload(np.asarray(rows, dtype=np.int64))
    tracking = track_slots is not None and any(slot >= 0 for slot in track_slots)
    return ForwardBatch(
        forward_mode=mode,
        input_ids=input_ids,
        positions=positions,
        req_pool_indices=row_index,
        prefix_lens=upload(starts),
        query_lens=upload(lens),
        query_start_loc=upload(query_start),
        out_cache_loc=req_pool.req_to_token[upload(row_of_token), positions].long(),
        mamba_cache_indices=(
            req_pool.get_mamba_indices(row_index).to(torch.int32) if with_state else None
        ),
        mamba_track_indices=(upload(np.asarray(track_slots, dtype=np.int64)) if tracking else None),
        mamba_track_rows=upload(np.asarray(track_rows, dtype=np.int64)) if tracking else None,
        logits_rows=logits_rows,
        capture_hidden=capture_hidden,
        capture_layer_ids=capture_layer_ids,
        draft_token_num=int(lens[0]) if mode.is_target_verify() else 0,
        spec_hidden=spec_hidden,
        prefix_lens_cpu=starts.tolist(),
        query_lens_cpu=lens.tolist(),
    )
