"""How recurrent states get into the prefix cache."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

DEFAULT_MAMBA_FULL_MEMORY_RATIO = 0.9


def handle_mamba_radix_cache(args: ServerArgs) -> ServerArgs:
    """Choose the strategy and check that pages, track grid and draft width go together."""
    if args.mamba_full_memory_ratio is None:
        args = replace(args, mamba_full_memory_ratio=DEFAULT_MAMBA_FULL_MEMORY_RATIO)
    if args.disable_radix_cache:
        return _without_prefix_cache(args)
    if args.mamba_radix_cache_strategy == "auto":
        args = replace(args, mamba_radix_cache_strategy=_choose_strategy(args))
    if args.mamba_radix_cache_strategy == "no_buffer":
        return _check_no_buffer(args)
    _check_extra_buffer(args)
    return args


def _without_prefix_cache(args: ServerArgs) -> ServerArgs:
    strategy = args.mamba_radix_cache_strategy
    if strategy not in ("auto", "no_buffer"):
        raise ValueError(
            f"--mamba-radix-cache-strategy {strategy} needs the prefix cache; leave it out, or "
            "leave out --disable-radix-cache"
        )
    return replace(args, mamba_radix_cache_strategy="no_buffer")


def _choose_strategy(args: ServerArgs) -> str:
    wants_overlap_or_paging = not args.disable_overlap_schedule or args.page_size != 1
    can_track = args.device == "cpu" or args.linear_attn_backend == "triton"
    return "extra_buffer" if wants_overlap_or_paging and can_track else "no_buffer"


def _check_no_buffer(args: ServerArgs) -> ServerArgs:
    if args.page_size != 1:
        raise ValueError(
            f"--mamba-radix-cache-strategy no_buffer needs --page-size 1, got {args.page_size}; "
            "leave one of them out"
        )
    if not args.disable_overlap_schedule:
        logger.info("--mamba-radix-cache-strategy no_buffer: overlap scheduling is off")
    return replace(args, disable_overlap_schedule=True)


def _check_extra_buffer(args: ServerArgs) -> None:
    strategy, interval = args.mamba_radix_cache_strategy, args.mamba_track_interval
    if args.device != "cpu" and args.linear_attn_backend != "triton":
        raise ValueError(
            f"--mamba-radix-cache-strategy {strategy} needs --linear-attn-backend triton, got "
            f"{args.linear_attn_backend}; use no_buffer with it"
        )
    if args.page_size is not None and interval % args.page_size != 0:
        raise ValueError(
            f"--mamba-track-interval {interval} must be a multiple of --page-size {args.page_size}"
        )
    rows = args.speculative_num_draft_tokens
    if args.is_speculative and rows is not None and interval < rows:
        raise ValueError(
            f"--mamba-track-interval {interval} must be at least the {rows} rows of a verify step, or "
            "one step could pass two boundaries; raise it, or lower --speculative-num-draft-tokens "
            "(a chain's are --speculative-num-steps + 1)"
        )
    if strategy == "extra_buffer_lazy" and args.disaggregation_mode != "null":
        raise ValueError(
            "--mamba-radix-cache-strategy extra_buffer_lazy does not work with "
            f"--disaggregation-mode {args.disaggregation_mode}; use extra_buffer"
        )
