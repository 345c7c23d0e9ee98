"""The ordered list of steps that turn arguments as given into arguments as used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.attention_hook import (
    handle_attention_backend,
    handle_linear_attn_backend,
    validate_linear_lossless_verify,
)
from sglang.srt.arg_groups.basic_hook import (
    handle_cuda_graphs,
    handle_device,
    handle_names,
    handle_page_and_chunk,
)
from sglang.srt.arg_groups.check_values import check_values
from sglang.srt.arg_groups.hicache_hook import handle_hierarchical_cache
from sglang.srt.arg_groups.mamba_hook import handle_mamba_radix_cache
from sglang.srt.arg_groups.model_hook import handle_model
from sglang.srt.arg_groups.no_effect_hook import name_what_has_no_effect
from sglang.srt.arg_groups.not_in_this_build import refuse_what_is_not_in_this_build
from sglang.srt.arg_groups.speculative_hook import handle_speculative_decoding
from sglang.srt.installation import refuse_stock_sglang

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

    Hook = Callable[[ServerArgs], ServerArgs | None]

logger = logging.getLogger(__name__)

PLACEHOLDER_MODELS = ("none", "dummy")
"""Model paths that stand for no model; tests build arguments with them."""

STEPS: tuple[Hook, ...] = (
    check_values,
    refuse_what_is_not_in_this_build,
    name_what_has_no_effect,
    handle_names,
    handle_device,
    handle_attention_backend,
    # Before speculation: it must not depend on numbers that are decided below.
    handle_linear_attn_backend,
    handle_model,
    handle_page_and_chunk,
    handle_speculative_decoding,
    handle_mamba_radix_cache,
    handle_hierarchical_cache,
    handle_cuda_graphs,
    # After speculation, because topk is final only there.
    validate_linear_lossless_verify,
)


def run_hook(hook: Hook, server_args: ServerArgs) -> ServerArgs:
    """Run one step. A step returns the new record, or None if it only checks."""
    result = hook(server_args)
    return server_args if result is None else result


def run_resolution_pipeline(server_args: ServerArgs) -> ServerArgs:
    """Decide everything that was left open, check it, and return a read-only record.

    The record passed in is not changed; a resolved one is returned as it is. With a placeholder
    for a model path only the values by themselves are checked.
    Raises: ValueError naming the flag, its value and the way out; RuntimeError if stock SGLang is
    installed in the same environment.
    """
    if server_args.is_resolved:
        return server_args
    refuse_stock_sglang()
    resolved = replace(server_args)
    if server_args.model_path in PLACEHOLDER_MODELS:
        resolved = run_hook(check_values, resolved)
    else:
        for hook in STEPS:
            resolved = run_hook(hook, resolved)
    resolved.mark_resolved()
    return resolved
