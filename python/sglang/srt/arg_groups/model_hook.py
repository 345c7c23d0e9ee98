"""Arguments that have to agree with the checkpoint's config.json."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.speculative_hook import MTP_ALGORITHMS
from sglang.srt.configs.model_config import ModelConfig

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def handle_model(args: ServerArgs) -> ServerArgs:
    """Bound the context by the model's, and refuse what the checkpoint does not have."""
    model = ModelConfig.from_path(args.model_path)
    context = args.context_length or model.max_position_embeddings
    if context > model.max_position_embeddings:
        raise ValueError(
            f"--context-length {context} is beyond the {model.max_position_embeddings} positions "
            "that the model was made for; give at most that, or raise max_position_embeddings (and "
            "rope scaling) in its config.json"
        )
    if args.quantization is not None and model.quantization is None:
        raise ValueError(
            f"--quantization {args.quantization}: the weights in {args.model_path} are not "
            "quantized; leave the flag out"
        )
    own_draft = args.speculative_draft_model_path is None
    needs_mtp = args.speculative_algorithm in MTP_ALGORITHMS and own_draft
    if needs_mtp and model.mtp_num_hidden_layers == 0:
        raise ValueError(
            f"--speculative-algorithm {args.speculative_algorithm}: {args.model_path} has no "
            "multi-token-prediction layer; leave the flag out"
        )
    return replace(args, context_length=context)
