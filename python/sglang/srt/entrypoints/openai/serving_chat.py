"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from sglang.srt.constrained.format_or_calls import format_or_calls
from sglang.srt.entrypoints.front_end import FrontEnd
from sglang.srt.entrypoints.openai.chat_prompt import check_tools, clean_messages, forced_choice
from sglang.srt.entrypoints.openai.errors import error_event
from sglang.srt.entrypoints.openai.logprobs import LogprobWriter
from sglang.srt.entrypoints.openai.protocol import (
    MAX_TOP_LOGPROBS,
    ChatCompletionRequest,
    field_names,
    sampling_values,
)
from sglang.srt.entrypoints.openai.serving_completions import MAX_SEQUENCES
from sglang.srt.entrypoints.openai.usage import usage_of
from sglang.srt.managers.errors import RequestError
from sglang.srt.managers.request_state import GenerateReqInput, ReqState
from sglang.srt.managers.tokenizer_manager import new_rid
from sglang.srt.parser.chat_output import ChatOutputParser
from sglang.srt.parser.events import CallArguments, CallStart, Content, Event, Reasoning
from sglang.srt.parser.qwen3_coder import CALL_CLOSE, CALL_OPEN
from sglang.srt.parser.reasoning import CLOSE_TAG, ReasoningSplitter, opens_reasoning
from sglang.srt.parser.tool_calls import (
    PARSERS,
    ForcedCallsParser,
    ToolCallParser,
    forced_calls_schema,
    parser_for_template,
)

CALL_TAGS = (CALL_OPEN, CALL_CLOSE)
_AS_CHAT: Mapping[str, str] = {}


@dataclass
class ChatJob:
    """One checked request."""

    request: ChatCompletionRequest
    rid: str
    prompt: str
    tools: list[dict[str, Any]]
    is_forced: bool
    inputs: list[GenerateReqInput]
    created: int = field(default_factory=lambda: int(time.time()))


def parse_news(parser: ChatOutputParser, state: ReqState) -> list[Event]:
    """Events for the text that is new; with the last text, what the parser still held."""
    events: list[Event] = []
    if text := state.detokenizer.take_delta():
        events += parser.push(text)
    if state.finish_reason is not None:
        events += parser.finish(complete=state.finish_reason.type == "stop")
    return _merge(events)


class _Choice:
    """What a stream has sent of one sequence."""

    def __init__(self, parser: ChatOutputParser) -> None:
        self.parser = parser
        self.num_calls = 0
        self.num_ids = 0
        self.num_logprobs = 0

    def deltas(self, state: ReqState) -> list[dict[str, Any]]:
        """OpenAI deltas for what is new."""
        return [self._delta(event) for event in parse_news(self.parser, state)]

    def _delta(self, event: Event) -> dict[str, Any]:
        if isinstance(event, Content):
            return {"content": event.text}
        if isinstance(event, Reasoning):
            return {"reasoning_content": event.text}
        if isinstance(event, CallStart):
            self.num_calls += 1
            call = {
                "index": event.index,
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": event.name, "arguments": ""},
            }
            return {"tool_calls": [call]}
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}


def _merge(events: list[Event]) -> list[Event]:
    """Join neighbours of one kind."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, Content | Reasoning) and type(last) is type(event):
            merged[-1] = type(event)(last.text + event.text)
        elif (
            isinstance(event, CallArguments)
            and isinstance(last, CallArguments)
            and last.index == event.index
        ):
            merged[-1] = CallArguments(event.index, last.text + event.text)
        else:
            merged.append(event)
    return merged


def _respelled(error: RequestError, spelling: Mapping[str, str]) -> RequestError:
    """The same error with another name of its field, which its message begins with."""
    if error.param is None or error.param not in spelling:
        return error
    name = spelling[error.param]
    message = error.message
    if message.startswith(error.param):
        message = name + message.removeprefix(error.param)
    return RequestError(
        message,
        status=error.status,
        param=name,
        code=error.code,
        retry_after_s=error.retry_after_s,
    )


class ChatServing:
    """Runs chat requests on a front end."""

    def __init__(self, front_end: FrontEnd) -> None:
        self._front = front_end
        self._manager = front_end.manager
        self._logprobs = LogprobWriter(front_end.tokenizer)
        args = front_end.server_args
        self._splits_reasoning = args.reasoning_parser is not None
        self._tool_format = args.tool_call_parser
        if self._tool_format is None and front_end.template is not None:
            self._tool_format = parser_for_template(front_end.template.source)
        self._has_call_tags = front_end.tokenizer.added_texts.issuperset(CALL_TAGS)

    def prepare(
        self,
        request: ChatCompletionRequest,
        *,
        rid: str | None,
        spelling: Mapping[str, str] = _AS_CHAT,
    ) -> ChatJob:
        """Check a request and render its prompt.

        spelling  this route's fields under the names that another route has for them, where they differ

        Raises: RequestError 400 naming the client's field.
        """
        try:
            return self._prepare(request, rid=rid, spelling=spelling)
        except RequestError as error:
            raise _respelled(error, spelling) from error

    def _prepare(
        self, request: ChatCompletionRequest, *, rid: str | None, spelling: Mapping[str, str]
    ) -> ChatJob:
        self._check(request)
        rid = request.rid or rid or new_rid()
        tools = check_tools(request)
        must_call, name = forced_choice(request)
        values = sampling_values(request)
        if must_call:
            single = request.parallel_tool_calls is False
            schema = forced_calls_schema(tools, name=name, single=single)
            values["json_schema"] = orjson.dumps(schema).decode()
        elif self._may_call(request, tools):
            single = request.parallel_tool_calls is False
            schema = orjson.loads(values.pop("json_schema"))
            values["ebnf"] = format_or_calls(schema, tags=CALL_TAGS, single=single)
        asked = request.max_completion_tokens
        asked = request.max_tokens if asked is None else asked
        if asked is not None:
            values["max_new_tokens"] = asked
        own_names = self._names(request)
        names = {**spelling, **{key: spelling.get(name, name) for key, name in own_names.items()}}
        params = self._manager.sampling_params(values, field_names=names)
        prompt = self.render(request, tools)
        inputs = []
        for choice in range(request.n):
            own = params
            if request.n > 1 and params.sampling_seed is not None:
                own = self._manager.sampling_params(
                    {**values, "sampling_seed": params.sampling_seed + choice}
                )
            own_rid = rid if request.n == 1 else f"{rid}-{choice}"
            inputs.append(self._input(request, own, prompt, own_rid, names))
        return ChatJob(request, rid, prompt, tools, must_call, inputs)

    def render(self, request: ChatCompletionRequest, tools: list[dict[str, Any]]) -> str:
        """The prompt. Raises: RequestError 400."""
        template = self._front.template
        if template is None:
            raise RequestError(
                "this model has no chat template; start the server with --chat-template, or use "
                "/v1/completions",
                param="messages",
            )
        extra = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            extra.setdefault("reasoning_effort", request.reasoning_effort)
            if request.reasoning_effort == "none":
                extra.setdefault("enable_thinking", False)
        return template.render(
            clean_messages(request.messages),
            tools=tools or None,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            extra=extra,
        )

    def _may_call(self, request: ChatCompletionRequest, tools: list[dict[str, Any]]) -> bool:
        """Whether a ``response_format`` must leave room for calls, and the vocabulary has their tags."""
        given = (request.response_format or {}).get("type")
        if given not in ("json_object", "json_schema") or request.regex or request.ebnf:
            return False
        return bool(tools) and self._tool_format is not None and self._has_call_tags

    def _names(self, request: ChatCompletionRequest) -> dict[str, str]:
        names = {
            **field_names(request),
            "input_ids": "messages",
            "top_logprobs_num": "top_logprobs",
        }
        if request.max_completion_tokens is not None:
            names["max_new_tokens"] = "max_completion_tokens"
        if forced_choice(request)[0]:
            names["json_schema"] = "tool_choice"
        elif request.response_format is not None and request.ebnf is None:
            names["ebnf"] = "response_format"
        return names

    def _check(self, request: ChatCompletionRequest) -> None:
        if request.n > MAX_SEQUENCES:
            raise RequestError(f"n must be <= {MAX_SEQUENCES}, got {request.n}", param="n")
        top = request.top_logprobs
        if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
            raise RequestError(
                f"top_logprobs must be in [0, {MAX_TOP_LOGPROBS}], got {top}", param="top_logprobs"
            )
        if top and not request.logprobs:
            raise RequestError("top_logprobs needs logprobs true", param="top_logprobs")
        if request.stream_options is not None and not request.stream:
            raise RequestError("stream_options needs stream true", param="stream_options")

    def _input(
        self,
        request: ChatCompletionRequest,
        params: Any,
        prompt: str,
        rid: str,
        names: dict[str, str],
    ) -> GenerateReqInput:
        return GenerateReqInput(
            rid=rid,
            sampling_params=params,
            text=prompt,
            return_logprob=bool(request.logprobs),
            top_logprobs_num=request.top_logprobs or 0,
            priority=request.priority,
            stream=request.stream,
            add_special_tokens=False,
            prompt_field=names["input_ids"],
            field_names=names,
            grammar_after=CLOSE_TAG if self._thinks_first(prompt) else None,
        )

    def _thinks_first(self, prompt: str) -> bool:
        """Whether the answer begins with reasoning, which no grammar constrains."""
        return self._splits_reasoning and opens_reasoning(prompt)

    def _parser(self, job: ChatJob) -> ChatOutputParser:
        splitter = None
        if self._splits_reasoning and (job.request.separate_reasoning or job.is_forced):
            splitter = ReasoningSplitter.for_prompt(job.prompt)
        parser: ToolCallParser | None = None
        if job.is_forced:
            parser = ForcedCallsParser()
        elif job.tools and self._tool_format is not None:
            parser = PARSERS[self._tool_format](job.tools)
        return ChatOutputParser(
            splitter=splitter, tools=parser, stream_reasoning=job.request.stream_reasoning
        )

    # --- whole answers --------------------------------------------------------------------

    async def answer(self, job: ChatJob) -> dict[str, Any]:
        """The reply once all sequences have ended."""
        with await self._manager.start(job.rid, job.inputs) as group:
            states = await group.finish()
        reply = self._frame(job, "chat.completion")
        reply["choices"] = [self._whole_choice(job, state) for state in states]
        reply["usage"] = usage_of(states, n=job.request.n)
        return reply

    def _whole_choice(self, job: ChatJob, state: ReqState) -> dict[str, Any]:
        request = job.request
        progress = _Choice(self._parser(job))
        message = _join_deltas(progress.deltas(state))
        choice: dict[str, Any] = {"index": state.index, "message": message, "logprobs": None}
        if request.logprobs:
            choice["logprobs"] = self._logprobs.chat(
                state.output_logprobs, num_top=request.top_logprobs or 0
            )
        _set_finish(choice, state, progress)
        if request.return_token_ids:
            choice["prompt_token_ids"] = state.prompt_ids
            choice["token_ids"] = state.output_ids
        return choice

    def _frame(self, job: ChatJob, kind: str) -> dict[str, Any]:
        return {
            "id": job.rid,
            "object": kind,
            "created": job.created,
            "model": self._front.config.served_model_name,
        }

    # --- for routes with another shape -----------------------------------------------------

    async def events(self, job: ChatJob) -> AsyncGenerator[tuple[list[Event], ReqState], None]:
        """What is new of the one sequence of `job`, as it comes. Raises: RequestError."""
        parser = self._parser(job)
        with await self._manager.start(job.rid, job.inputs) as group:
            while news := await group.next_news():
                (state,) = news
                yield parse_news(parser, state), state

    # --- streams --------------------------------------------------------------------------

    async def stream(self, job: ChatJob) -> AsyncGenerator[bytes, None]:
        """Server-sent events. An error after the first event becomes an event of its own."""
        request = job.request
        options = request.stream_options
        with_usage = options is not None and bool(options.include_usage)
        continuous = options is not None and bool(options.continuous_usage_stats)
        started = False
        try:
            with await self._manager.start(job.rid, job.inputs) as group:
                choices = [_Choice(self._parser(job)) for _ in group.states]
                greeted: set[int] = set()
                while news := await group.next_news():
                    usage = usage_of(group.states, n=request.n) if continuous else None
                    chunks = []
                    for state in news:
                        if state.index not in greeted:
                            greeted.add(state.index)
                            chunks.append(self._greeting(job, state))
                        chunks += self._chunks(job, state, choices[state.index])
                    if chunks:
                        started = True
                        has_usage = with_usage or continuous
                        yield b"".join(self._event(job, c, usage, has_usage) for c in chunks)
                if with_usage:
                    tail = self._frame(job, "chat.completion.chunk")
                    tail["choices"] = []
                    tail["usage"] = usage_of(group.states, n=request.n)
                    yield b"data: " + orjson.dumps(tail) + b"\n\n"
        except RequestError as error:
            if not started:
                raise
            yield error_event(error)
        yield b"data: [DONE]\n\n"

    def _event(
        self, job: ChatJob, choice: dict[str, Any], usage: dict[str, Any] | None, has_usage: bool
    ) -> bytes:
        chunk = self._frame(job, "chat.completion.chunk")
        chunk["choices"] = [choice]
        if has_usage:
            chunk["usage"] = usage
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    def _greeting(self, job: ChatJob, state: ReqState) -> dict[str, Any]:
        choice = {
            "index": state.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if job.request.return_token_ids:
            choice["prompt_token_ids"] = state.prompt_ids
        return choice

    def _chunks(self, job: ChatJob, state: ReqState, progress: _Choice) -> list[dict[str, Any]]:
        """Choices of the chunks for what is new; log probabilities and ids ride on the first."""
        request = job.request
        deltas = progress.deltas(state)
        logprobs = None
        if request.logprobs:
            positions = state.output_logprobs[progress.num_logprobs :]
            progress.num_logprobs += len(positions)
            if positions:
                logprobs = self._logprobs.chat(positions, num_top=request.top_logprobs or 0)
        ids = state.output_ids[progress.num_ids :] if request.return_token_ids else []
        progress.num_ids += len(ids)
        if not deltas and (logprobs or ids or state.is_done):
            deltas = [{}]
        choices: list[dict[str, Any]] = [
            {"index": state.index, "delta": delta, "logprobs": None, "finish_reason": None}
            for delta in deltas
        ]
        if choices:
            choices[0]["logprobs"] = logprobs
            if request.return_token_ids:
                choices[0]["token_ids"] = ids
        if state.is_done:
            _set_finish(choices[-1], state, progress)
        return choices


def _join_deltas(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the deltas of a whole answer add up to."""
    content = "".join(delta.get("content", "") for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                calls.append({key: value for key, value in piece.items() if key != "index"})
            else:
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
    return {
        "role": "assistant",
        "content": content if content or not (calls or reasoning) else None,
        "reasoning_content": reasoning or None,
        "tool_calls": calls or None,
    }


def _set_finish(choice: dict[str, Any], state: ReqState, progress: _Choice) -> None:
    reason = state.finish_reason
    if reason is None:
        return
    choice["finish_reason"] = reason.type
    if reason.type == "stop" and progress.num_calls:
        choice["finish_reason"] = "tool_calls"
    choice["matched_stop"] = reason.matched if reason.type == "stop" else None
