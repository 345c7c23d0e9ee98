"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import orjson

from sglang.srt.entrypoints.front_end import FrontEnd
from sglang.srt.entrypoints.openai.errors import error_event
from sglang.srt.entrypoints.openai.logprobs import LogprobWriter
from sglang.srt.entrypoints.openai.protocol import (
    MAX_TOP_LOGPROBS,
    CompletionRequest,
    field_names,
    sampling_values,
)
from sglang.srt.entrypoints.openai.usage import usage_of
from sglang.srt.managers.errors import RequestError
from sglang.srt.managers.request_state import GenerateReqInput, ReqState, RequestGroup
from sglang.srt.managers.tokenizer_manager import new_rid

DEFAULT_MAX_TOKENS = 16
MAX_SEQUENCES = 1024
"""Prompts times `n` of one request."""


@dataclass
class _Progress:
    """How much of each sequence a stream has sent."""

    num_ids: int = 0
    num_logprobs: int = 0
    offset: int = 0
    started: bool = False


@dataclass
class _Job:
    """One checked request."""

    request: CompletionRequest
    rid: str
    inputs: list[GenerateReqInput]
    created: int = field(default_factory=lambda: int(time.time()))


class CompletionServing:
    """Runs completion requests on a front end."""

    def __init__(self, front_end: FrontEnd) -> None:
        self._front = front_end
        self._manager = front_end.manager
        self._logprobs = LogprobWriter(front_end.tokenizer)

    def prepare(self, request: CompletionRequest, *, rid: str | None) -> _Job:
        """Check a request. Raises: RequestError 400 naming the field."""
        self._check(request)
        rid = request.rid or rid or new_rid()
        values = sampling_values(request)
        asked = request.max_tokens
        values["max_new_tokens"] = DEFAULT_MAX_TOKENS if asked is None else asked
        params = self._manager.sampling_params(values, field_names=field_names(request))
        prompts = split_prompts(request.prompt, "prompt")
        if len(prompts) * request.n > MAX_SEQUENCES:
            raise RequestError(
                f"n times the number of prompts must be <= {MAX_SEQUENCES}, got "
                f"{len(prompts) * request.n}",
                param="n",
            )
        inputs: list[GenerateReqInput] = []
        for prompt in prompts:
            for choice in range(request.n):
                own = params
                if request.n > 1 and params.sampling_seed is not None:
                    own = self._manager.sampling_params(
                        {**values, "sampling_seed": params.sampling_seed + choice}
                    )
                inputs.append(self._input(request, own, prompt, f"{rid}-{len(inputs)}"))
        if len(inputs) == 1:
            inputs[0].rid = rid
        return _Job(request, rid, inputs)

    def _check(self, request: CompletionRequest) -> None:
        if request.best_of is not None and request.best_of != request.n:
            raise RequestError("best_of other than n is not supported", param="best_of")
        if request.suffix:
            raise RequestError("suffix is not supported", param="suffix")
        if request.logprobs is not None and not 0 <= request.logprobs <= MAX_TOP_LOGPROBS:
            raise RequestError(
                f"logprobs must be in [0, {MAX_TOP_LOGPROBS}], got {request.logprobs}",
                param="logprobs",
            )
        if request.stream_options is not None and not request.stream:
            raise RequestError("stream_options needs stream true", param="stream_options")

    def _input(
        self, request: CompletionRequest, params: Any, prompt: str | list[int], rid: str
    ) -> GenerateReqInput:
        wants = request.logprobs is not None
        return GenerateReqInput(
            rid=rid,
            sampling_params=params,
            text=prompt if isinstance(prompt, str) else None,
            input_ids=None if isinstance(prompt, str) else prompt,
            return_logprob=wants,
            logprob_start_len=0 if wants and request.echo else -1,
            top_logprobs_num=request.logprobs or 0,
            priority=request.priority,
            stream=request.stream,
            echo=request.echo,
            prompt_field="prompt",
            field_names=field_names(request),
        )

    # --- whole answers --------------------------------------------------------------------

    async def answer(self, job: _Job) -> dict[str, Any]:
        """The reply once all sequences have ended."""
        with await self._manager.start(job.rid, job.inputs) as group:
            states = await group.finish()
        reply = self._frame(job)
        reply["choices"] = [self._choice(job, state) for state in states]
        reply["usage"] = usage_of(states, n=job.request.n)
        return reply

    def _choice(self, job: _Job, state: ReqState) -> dict[str, Any]:
        request = job.request
        text = self._echo_text(job, state) + state.text
        choice: dict[str, Any] = {"index": state.index, "text": text, "logprobs": None}
        if request.logprobs is not None:
            positions = state.input_logprobs + state.output_logprobs
            choice["logprobs"] = self._logprobs.completion(
                positions, num_top=request.logprobs, offset=0
            )
        _set_finish(choice, state)
        if request.return_token_ids:
            choice["prompt_token_ids"] = state.prompt_ids
            choice["token_ids"] = state.output_ids
        return choice

    def _echo_text(self, job: _Job, state: ReqState) -> str:
        if not job.request.echo:
            return ""
        given = job.inputs[state.index].text
        return given if given is not None else self._front.tokenizer.decode(state.prompt_ids)

    def _frame(self, job: _Job) -> dict[str, Any]:
        return {
            "id": job.rid,
            "object": "text_completion",
            "created": job.created,
            "model": self._front.config.served_model_name,
        }

    # --- streams --------------------------------------------------------------------------

    async def stream(self, job: _Job) -> AsyncGenerator[bytes, None]:
        """Server-sent events. An error after the first event becomes an event of its own."""
        options = job.request.stream_options
        with_usage = options is not None and bool(options.include_usage)
        continuous = options is not None and bool(options.continuous_usage_stats)
        started = False
        try:
            with await self._manager.start(job.rid, job.inputs) as group:
                progress = [_Progress() for _ in group.states]
                while news := await group.next_news():
                    events = [
                        self._event(
                            job, group, state, progress[state.index], with_usage, continuous
                        )
                        for state in news
                    ]
                    if data := b"".join(events):
                        started = True
                        yield data
                if with_usage:
                    tail = {**self._frame(job), "choices": []}
                    tail["usage"] = usage_of(group.states, n=job.request.n)
                    yield b"data: " + orjson.dumps(tail) + b"\n\n"
        except RequestError as error:
            if not started:
                raise
            yield error_event(error)
        yield b"data: [DONE]\n\n"

    def _event(
        self,
        job: _Job,
        group: RequestGroup,
        state: ReqState,
        progress: _Progress,
        with_usage: bool,
        continuous: bool,
    ) -> bytes:
        request = job.request
        text = state.detokenizer.take_delta()
        if not progress.started:
            text = self._echo_text(job, state) + text
        choice: dict[str, Any] = {"index": state.index, "text": text, "logprobs": None}
        news = bool(text) or state.is_done
        if request.logprobs is not None:
            positions = (state.input_logprobs + state.output_logprobs)[progress.num_logprobs :]
            if positions:
                news = True
                choice["logprobs"] = self._logprobs.completion(
                    positions, num_top=request.logprobs, offset=progress.offset
                )
                progress.num_logprobs += len(positions)
                progress.offset += sum(map(len, choice["logprobs"]["tokens"]))
        if request.return_token_ids:
            news = news or len(state.output_ids) > progress.num_ids
            choice["token_ids"] = state.output_ids[progress.num_ids :]
            progress.num_ids = len(state.output_ids)
            if not progress.started:
                choice["prompt_token_ids"] = state.prompt_ids
        if not news:
            return b""
        progress.started = True
        _set_finish(choice, state)
        chunk = self._frame(job)
        chunk["choices"] = [choice]
        if continuous:
            chunk["usage"] = usage_of(group.states, n=request.n)
        elif with_usage:
            chunk["usage"] = None
        return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _set_finish(choice: dict[str, Any], state: ReqState) -> None:
    reason = state.finish_reason
    choice["finish_reason"] = reason.type if reason else None
    choice["matched_stop"] = reason.matched if reason and reason.type == "stop" else None


def split_prompts(prompt: Any, name: str) -> list[str | list[int]]:
    """One entry for each prompt of a text, a list of texts, ids, or lists of ids.

    Raises: RequestError 400 for any other form, and for empty ones.
    """
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return prompt
        if all(_is_id(item) for item in prompt):
            return [prompt]
        if all(isinstance(item, list) and all(map(_is_id, item)) for item in prompt):
            return prompt
    raise RequestError(
        f"{name} must be a text, a non-empty list of texts, a non-empty list of token ids, or a "
        f"list of such lists",
        param=name,
    )


def _is_id(value: Any) -> bool:
    return type(value) is int
