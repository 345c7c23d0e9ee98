"""Rules about verify scratch: when windows overlap, what lossless verify refuses, bytes per row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import sglang.srt.mem_cache.pool as pool_package
from sglang.srt.mem_cache.state_layout import (
    MAX_RING_CELLS,
    SNAPSHOTS,
    UPDATE_TUPLES,
    StateLayout,
)

if TYPE_CHECKING:
    from sglang.srt.configs.mamba_utils import BaseLinearStateParams


def get_tensor_size_bytes(t: torch.Tensor | list[torch.Tensor]) -> int:
    """Logical bytes of a tensor, or of all tensors of a list.

    An overlapping view counts every element it shows, so this may exceed its storage.
    """
    if isinstance(t, (list, tuple)):
        return sum(get_tensor_size_bytes(item) for item in t)
    return t.numel() * t.element_size()


def conv_window_dedup_enabled(
    is_npu: bool, is_cpu: bool, speculative_eagle_topk: int | None, is_kda: bool
) -> bool:
    """Whether successive conv windows of one verify may share columns: chains only, GPU layouts only."""
    is_chain = speculative_eagle_topk is None or speculative_eagle_topk <= 1
    return not is_npu and not is_cpu and not is_kda and is_chain


def check_linear_lossless_verify(
    *, speculative_eagle_topk: int | None, is_kda: bool, enable_linear_replayssm_spec: bool
) -> None:
    """Raise ValueError unless the pool can hold update tuples."""
    flag = "--enable-linear-lossless-verify"
    if speculative_eagle_topk != 1:
        raise ValueError(
            f"{flag} replays a linear draft chain: set --speculative-eagle-topk 1, "
            f"got {speculative_eagle_topk}"
        )
    if is_kda:
        raise ValueError(f"{flag} covers Gated-DeltaNet layers only, and this model has KDA layers")
    if enable_linear_replayssm_spec:
        raise ValueError(
            f"{flag} and --enable-linear-replayssm-spec are two kinds of verify scratch: drop one"
        )


def check_ring_cells(cells: int | None, draft_tokens: int) -> None:
    """Raise ValueError unless a tuple ring of ``cells`` can hold two verifies of ``draft_tokens``."""
    if cells is not None and not 2 * draft_tokens <= cells <= MAX_RING_CELLS:
        raise ValueError(
            f"a tuple ring of {cells} cells cannot serve --linear-lossless-commit deferred with "
            f"{draft_tokens} draft tokens: it must have {2 * draft_tokens} .. {MAX_RING_CELLS}; lower "
            f"--speculative-num-draft-tokens to at most {MAX_RING_CELLS // 2}, or use "
            "--linear-lossless-commit immediate"
        )


def platform_layout(params: BaseLinearStateParams, topk: int | None, axis: int = -1) -> StateLayout:
    """Layout of ``params`` on this platform for drafts of branching ``topk``."""
    dedup = conv_window_dedup_enabled(
        pool_package._is_npu, pool_package._is_cpu, topk, params.is_kda
    )
    return StateLayout.from_cache_params(params, dedup=dedup, conv_window_axis=axis)


def spec_intermediate_bytes_per_req(
    cache_params: BaseLinearStateParams,
    speculative_num_draft_tokens: int,
    *,
    speculative_eagle_topk: int | None = None,
    enable_linear_lossless_verify: bool = False,
) -> int:
    """Bytes of one verify-scratch row over all layers.

    A pool with ``spec_state_size`` rows allocates this times ``spec_state_size + 1``. Not defined for
    ReplaySSM, whose scratch is a ring per state slot.
    """
    layout = platform_layout(cache_params, speculative_eagle_topk)
    kind = UPDATE_TUPLES if enable_linear_lossless_verify else SNAPSHOTS
    return layout.scratch_row_bytes(kind=kind, draft_tokens=speculative_num_draft_tokens)
