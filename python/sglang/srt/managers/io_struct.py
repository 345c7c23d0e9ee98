"""Messages between the front end and the scheduler (msgpack over ZMQ, one message a frame).

The front end binds both sockets, the scheduler connects; each direction is one PUSH/PULL pair.
Every message is a tagged array, so the decoder of a direction knows its type.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sglang.srt.sampling.sampling_params import SamplingParams


class FinishReason(msgspec.Struct, array_like=True):
    """Why a request ended.

    type         "stop" | "length" | "abort"
    matched      the stop token id or the stop string that ended it; None otherwise
    message      for "abort": a sentence for the user
    status_code  for "abort": the HTTP status of an answer that has not started (400, 499, 503)
    """

    type: str
    matched: int | str | None = None
    message: str | None = None
    status_code: int | None = None


class TokenLogprob(msgspec.Struct, array_like=True):
    """Natural-log probabilities at one position.

    logprob    of `token_id`; None for the first prompt token, which nothing predicts
    top        the `top_logprobs_num` most likely as (logprob, token id), most likely first
    selected   the `token_ids_logprob` of the request as (logprob, token id), in their order
    """

    logprob: float | None
    token_id: int
    top: list[tuple[float, int]] | None = None
    selected: list[tuple[float, int]] | None = None


class TokenizedGenerateReqInput(msgspec.Struct, array_like=True, tag=True):
    """One sequence to generate. `n` in `sampling_params` is already expanded and reads 1.

    input_ids          prompt, at least one id, each in [0, vocab_size)
    sampling_params    normalized and verified, `max_new_tokens` an int that fits the context
    logprob_start_len  first prompt position whose logprob is wanted; -1 for none of the prompt
    priority           larger runs earlier where the policy looks at it
    stream             False: the scheduler may send the tokens at the end only
    return_state_digest  the last output carries a digest of the recurrent state
    grammar_after      text of the output after which the request's grammar begins; None: at once
    """

    rid: str
    input_ids: list[int]
    sampling_params: SamplingParams
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    priority: int = 0
    stream: bool = False
    return_state_digest: bool = False
    grammar_after: str | None = None


class AbortReq(msgspec.Struct, array_like=True, tag=True):
    """End one request, or all. Each ended request answers with finish type "abort"; an unknown
    or finished rid is ignored."""

    rid: str = ""
    abort_all: bool = False
    reason: str | None = None


class FlushCacheReqInput(msgspec.Struct, array_like=True, tag=True):
    """Empty the prefix cache; answered by FlushCacheReqOutput."""

    req_id: str


class GetInternalStateReq(msgspec.Struct, array_like=True, tag=True):
    """Ask for effective sizes and counters; answered by GetInternalStateReqOutput."""

    req_id: str


class HealthCheckReq(msgspec.Struct, array_like=True, tag=True):
    """Ask the scheduler loop for a sign of life; answered between two steps."""

    req_id: str


class ShutdownReq(msgspec.Struct, array_like=True, tag=True):
    """Leave the loop and exit 0."""


class SchedulerStats(msgspec.Struct, array_like=True):
    """Gauges of the moment, and totals since start (`*_ct`)."""

    num_running_reqs: int = 0
    num_queue_reqs: int = 0
    num_used_tokens: int = 0
    max_total_num_tokens: int = 0
    token_usage: float = 0.0
    mamba_usage: float = 0.0
    gen_throughput: float = 0.0
    cache_hit_rate: float = 0.0
    spec_accept_length: float = 0.0
    spec_accept_rate: float = 0.0
    verify_scratch_bytes: int = 0
    lossless_bytes_freed: int = 0
    replayed_steps_ct: int = 0
    num_retracted_ct: int = 0


class TokenOutput(msgspec.Struct, array_like=True):
    """What one request gained since its last output.

    new_token_ids         the new ids only; ends exactly at the token that finished the request
    prompt_tokens         length of the prompt as run
    completion_tokens     ids so far, this output included
    cached_tokens         prompt tokens taken from the prefix cache
    spec_verify_ct        verify steps so far; 0 without speculation
    spec_accepted_tokens  ids that came out of them, bonus tokens included
    output_logprobs       one per new id, when asked for
    input_logprobs        prompt positions from `logprob_start_len`; once, with the first output
    queue_time_s          seconds from arrival to first admission, with the first output
    state_digest          hex, with the last output, when asked for
    """

    rid: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    spec_verify_ct: int = 0
    spec_accepted_tokens: int = 0
    output_logprobs: list[TokenLogprob] | None = None
    input_logprobs: list[TokenLogprob] | None = None
    queue_time_s: float | None = None
    state_digest: str | None = None


class ReadyOutput(msgspec.Struct, array_like=True, tag=True):
    """First message of a scheduler. `info` has at least `max_req_input_len`,
    `max_total_num_tokens`, `max_running_requests`, `context_length`."""

    info: dict[str, Any]


class BatchTokenIDOutput(msgspec.Struct, array_like=True, tag=True):
    """The outputs of one step, all requests together; may be empty when only `stats` changed."""

    items: list[TokenOutput]
    stats: SchedulerStats | None = None


class FlushCacheReqOutput(msgspec.Struct, array_like=True, tag=True):
    """`success` False with a reason when the cache could not be emptied."""

    req_id: str
    success: bool
    message: str = ""


class GetInternalStateReqOutput(msgspec.Struct, array_like=True, tag=True):
    """`state`: JSON-compatible values."""

    req_id: str
    state: dict[str, Any]


class HealthCheckOutput(msgspec.Struct, array_like=True, tag=True):
    """The scheduler loop is turning."""

    req_id: str


class FatalErrorOutput(msgspec.Struct, array_like=True, tag=True):
    """Last words of a scheduler that cannot go on."""

    message: str


ToScheduler = (
    TokenizedGenerateReqInput
    | AbortReq
    | FlushCacheReqInput
    | GetInternalStateReq
    | HealthCheckReq
    | ShutdownReq
)
FromScheduler = (
    ReadyOutput
    | BatchTokenIDOutput
    | FlushCacheReqOutput
    | GetInternalStateReqOutput
    | HealthCheckOutput
    | FatalErrorOutput
)

_ENCODER = msgspec.msgpack.Encoder()
_TO_SCHEDULER = msgspec.msgpack.Decoder(ToScheduler)
_FROM_SCHEDULER = msgspec.msgpack.Decoder(FromScheduler)


def encode_message(message: ToScheduler | FromScheduler) -> bytes:
    """One frame. Raises: TypeError for values msgpack cannot hold."""
    return _ENCODER.encode(message)


def decode_to_scheduler(frame: bytes) -> ToScheduler:
    """Raises: msgspec.ValidationError for a frame of another shape."""
    return _TO_SCHEDULER.decode(frame)


def decode_from_scheduler(frame: bytes) -> FromScheduler:
    """Raises: msgspec.ValidationError for a frame of another shape."""
    return _FROM_SCHEDULER.decode(frame)
