"""The arguments and model facts that the front end works with, read only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sglang.bundled import resolve_model_path
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.tokenizer import NoTokenizer, Tokenizer
from sglang.srt.server_args import ServerArgs

_SAMPLING_DEFAULT_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class FrontEndConfig:
    """What the tokenizer manager needs to know.

    vocab_size         rows of the embedding; bounds every token id
    context_length     positions of one request, prompt and output together
    model_context_length  positions that the model was made for
    eos_token_ids      union of generation config, model config and tokenizer
    sampling_defaults  values for sampling fields that a request leaves unset
    """

    model_path: str
    tokenizer_path: str
    served_model_name: str
    vocab_size: int
    context_length: int
    model_context_length: int
    eos_token_ids: frozenset[int]
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    allow_auto_truncate: bool = False
    max_queued_requests: int | None = None
    log_requests: bool = False


def load_tokenizer(server_args: ServerArgs) -> Tokenizer | NoTokenizer:
    """The tokenizer of `--tokenizer-path`, else of the model. Raises: ValueError."""
    if server_args.skip_tokenizer_init:
        return NoTokenizer()
    return Tokenizer(resolve_model_path(server_args.tokenizer_path or server_args.model_path))


def make_front_end_config(
    server_args: ServerArgs, tokenizer: Tokenizer | NoTokenizer
) -> FrontEndConfig:
    """Raises: FileNotFoundError or ValueError for a model that cannot be read."""
    model = ModelConfig.from_path(server_args.model_path)
    eos = model.eos_token_ids
    if tokenizer.eos_token_id is not None:
        eos = eos | {tokenizer.eos_token_id}
    defaults = model.generation_defaults if server_args.sampling_defaults == "model" else {}
    return FrontEndConfig(
        model_path=server_args.model_path,
        tokenizer_path=server_args.tokenizer_path or server_args.model_path,
        served_model_name=server_args.served_model_name or server_args.model_path,
        vocab_size=model.vocab_size,
        context_length=server_args.context_length or model.max_position_embeddings,
        model_context_length=model.max_position_embeddings,
        eos_token_ids=eos,
        sampling_defaults=pick_sampling_defaults(defaults),
        allow_auto_truncate=server_args.allow_auto_truncate,
        max_queued_requests=server_args.max_queued_requests,
        log_requests=server_args.log_requests,
    )


def pick_sampling_defaults(generation_config: dict[str, Any]) -> dict[str, Any]:
    """The values of a generation config that are sampling options here.

    A `top_k` of 0 means "all" there and -1 here; `do_sample` false makes no difference, as a
    server's users choose greedy decoding by their temperature.
    """
    picked = {
        name: generation_config[name]
        for name in _SAMPLING_DEFAULT_FIELDS
        if generation_config.get(name) is not None
    }
    if picked.get("top_k") == 0:
        picked["top_k"] = -1
    return picked
