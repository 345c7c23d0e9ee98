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
from sglang.srt.utils.upload import upload, upload_ids


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
    table = req_pool.req_to_token
    num_requests, num_tokens = len(rows), sum(query_lens)
    host = np.empty(2 * num_tokens + 3 * num_requests, dtype=np.int64)
    lens = host[-num_requests:]
    lens[:] = query_lens
    starts = host[-2 * num_requests : -num_requests]
    starts[:] = prefix_lens
    host[-3 * num_requests : -2 * num_requests] = rows
    query_start = np.zeros(num_requests + 1, dtype=np.int32)
    np.cumsum(lens, out=query_start[1:])
    if num_requests == num_tokens:
        host[:num_tokens] = starts
        host[num_tokens : 2 * num_tokens] = rows
    else:
        host[:num_tokens] = np.arange(num_tokens)
        host[:num_tokens] += np.repeat(starts - query_start[:-1], lens)
        host[num_tokens : 2 * num_tokens] = np.repeat(rows, lens)
    # One upload for all int64 columns.
    columns = upload(host, table.device)
    positions, row_of_token, row_index, starts_column, lens_column = columns.split(
        [num_tokens, num_tokens, num_requests, num_requests, num_requests]
    )
    tracking = (
        track_slots is not None
        and track_rows is not None
        and any(slot >= 0 for slot in track_slots)
    )
    return ForwardBatch(
        forward_mode=mode,
        input_ids=input_ids,
        positions=positions,
        req_pool_indices=row_index,
        prefix_lens=starts_column,
        query_lens=lens_column,
        query_start_loc=upload(query_start, table.device),
        out_cache_loc=table[row_of_token, positions].long(),
        mamba_cache_indices=(
            req_pool.get_mamba_indices(row_index).to(torch.int32) if with_state else None
        ),
        mamba_track_indices=upload_ids(track_slots, table.device) if tracking else None,
        mamba_track_rows=upload_ids(track_rows, table.device) if tracking else None,
        mamba_track_rows_cpu=list(track_rows) if tracking else None,
        logits_rows=logits_rows,
        capture_hidden=capture_hidden,
        capture_layer_ids=capture_layer_ids,
        draft_token_num=query_lens[0] if mode.is_target_verify() else 0,
        spec_hidden=spec_hidden,
        prefix_lens_cpu=list(prefix_lens),
        query_lens_cpu=list(query_lens),
    )
