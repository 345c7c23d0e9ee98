"""Bodies of the OpenAI routes, and what they mean in native terms."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import orjson

from sglang.srt.entrypoints.http_io import id_keys
from sglang.srt.managers.errors import RequestError

FIELD_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "top_logprobs_num": "logprobs",
    "input_ids": "prompt",
}
"""Native sampling names that the OpenAI routes spell differently."""
MAX_TOP_LOGPROBS = 20
_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "regex",
    "ebnf",
    "json_schema",
)
_ANY_OBJECT_SCHEMA = '{"type": "object"}'

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream says about usage."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class CommonRequest(msgspec.Struct, kw_only=True):
    """Options of both completion routes. `user`, `metadata` and `store` have no effect."""

    model: str | None = None
    n: PositiveInt = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | None = None
    rid: str | None = None
    priority: int = 0
    return_token_ids: bool = False
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None


class CompletionRequest(CommonRequest, kw_only=True):
    """POST /v1/completions. `prompt`: text, texts, ids, or lists of ids."""

    prompt: Any
    max_tokens: Count | None = None
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None


class ChatCompletionRequest(CommonRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    separate_reasoning: bool = True
    stream_reasoning: bool = True


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize. One of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize. `tokens`: ids or lists of ids."""

    model: str | None = None
    tokens: Any
    skip_special_tokens: bool = True


def field_names(request: CommonRequest) -> dict[str, str]:
    """FIELD_NAMES, and the name under which the request gave its JSON schema."""
    if request.response_format is None:
        return FIELD_NAMES
    return {**FIELD_NAMES, "json_schema": "response_format"}


def sampling_values(request: CommonRequest) -> dict[str, Any]:
    """The given sampling options under their native names. Raises: RequestError 400."""
    values = {
        name: value for name in _SAMPLING_FIELDS if (value := getattr(request, name)) is not None
    }
    if request.min_tokens is not None:
        values["min_new_tokens"] = request.min_tokens
    if request.seed is not None:
        values["sampling_seed"] = request.seed
    if request.logit_bias is not None:
        values["logit_bias"] = id_keys(request.logit_bias, "logit_bias")
    if isinstance(values.get("json_schema"), dict):
        values["json_schema"] = orjson.dumps(values["json_schema"]).decode()
    if request.response_format is not None:
        values.update(_response_format(request.response_format))
    return values


def _response_format(given: dict[str, Any]) -> dict[str, str]:
    kind = given.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": _ANY_OBJECT_SCHEMA}
    if kind != "json_schema":
        raise RequestError(
            f"response_format.type must be text, json_object or json_schema, got {kind!r}",
            param="response_format",
        )
    inner = given.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict | bool):
        raise RequestError(
            "response_format.json_schema.schema must be a JSON schema", param="response_format"
        )
    return {"json_schema": orjson.dumps(schema).decode()}
