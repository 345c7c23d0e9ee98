"""POST /v1/messages and /v1/messages/count_tokens, on top of the chat route."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from typing import Any

import orjson

from sglang.srt.entrypoints.anthropic.protocol import (
    SPELLING,
    CountTokensRequest,
    MessagesRequest,
    to_chat,
)
from sglang.srt.entrypoints.front_end import FrontEnd
from sglang.srt.entrypoints.openai.chat_prompt import check_tools
from sglang.srt.entrypoints.openai.serving_chat import ChatJob, ChatServing
from sglang.srt.managers.errors import RequestError
from sglang.srt.managers.request_state import ReqState
from sglang.srt.parser.events import CallArguments, CallStart, Content, Event

MESSAGES_PATH = "/v1/messages"
ERROR_TYPES = {404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


def anthropic_error(error: RequestError) -> dict[str, Any]:
    """`{type: error, error: {type, message}}`."""
    kind = "invalid_request_error" if error.status < 500 else "api_error"
    kind = "overloaded_error" if error.status == 503 else ERROR_TYPES.get(error.status, kind)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


class _Blocks:
    """Cuts events into content blocks: (opened block or None, its index, delta)."""

    def __init__(self) -> None:
        self.index = -1
        self.num_calls = 0
        self._kind: tuple[str, int] | None = None

    def place(self, event: Event) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """The block that `event` opens, if any, and what it adds."""
        if isinstance(event, CallStart):
            self.num_calls += 1
            call_id = f"toolu_{uuid.uuid4().hex[:24]}"
            block = {"type": "tool_use", "id": call_id, "name": event.name, "input": {}}
            return self._open(("tool_use", event.index), block), {}
        if isinstance(event, CallArguments):
            return None, {"type": "input_json_delta", "partial_json": event.text}
        if isinstance(event, Content):
            opened = self._open(("text", 0), {"type": "text", "text": ""})
            return opened, {"type": "text_delta", "text": event.text}
        opened = self._open(("thinking", 0), {"type": "thinking", "thinking": "", "signature": ""})
        return opened, {"type": "thinking_delta", "thinking": event.text}

    def _open(self, kind: tuple[str, int], block: dict[str, Any]) -> dict[str, Any] | None:
        if self._kind == kind:
            return None
        self._kind = kind
        self.index += 1
        return block


class MessagesServing:
    """Runs Anthropic requests on a front end."""

    def __init__(self, front_end: FrontEnd, chat: ChatServing) -> None:
        self._front = front_end
        self._chat = chat

    def prepare(self, request: MessagesRequest, *, rid: str | None) -> ChatJob:
        """Check a request. Raises: RequestError 400 naming the field."""
        return self._chat.prepare(to_chat(request), rid=rid, spelling=SPELLING)

    def count_tokens(self, request: CountTokensRequest) -> dict[str, int]:
        """Ids of the prompt that the same request would run. Raises: RequestError."""
        chat = to_chat(request)
        prompt = self._chat.render(chat, check_tools(chat))
        ids = self._front.tokenizer.encode(prompt, add_special_tokens=False)
        return {"input_tokens": len(ids)}

    async def answer(self, job: ChatJob) -> dict[str, Any]:
        """The whole message."""
        blocks, content = _Blocks(), []
        last: ReqState | None = None
        async for events, state in self._chat.events(job):
            last = state
            for event in events:
                opened, delta = blocks.place(event)
                if opened is not None:
                    content.append(opened)
                _add(content[-1], delta)
        assert last is not None
        for block in content:
            if block["type"] == "tool_use":
                block["input"] = _parsed(block.pop("json", ""))
        return {
            **self._frame(job),
            "content": content,
            **_stop(last, blocks.num_calls),
            "usage": _usage(last),
        }

    async def stream(self, job: ChatJob) -> AsyncGenerator[bytes, None]:
        """Server-sent events with names. An error after the first is an event of its own."""
        blocks = _Blocks()
        started = False
        chat_events = self._chat.events(job)
        try:
            async for events, state in chat_events:
                parts = [] if started else [self._message_start(job, state)]
                started = True
                for event in events:
                    before = blocks.index
                    opened, delta = blocks.place(event)
                    if opened is not None:
                        if before >= 0:
                            parts.append(_event("content_block_stop", index=before))
                        parts.append(
                            _event("content_block_start", index=blocks.index, content_block=opened)
                        )
                    if delta:
                        parts.append(_event("content_block_delta", index=blocks.index, delta=delta))
                if state.is_done:
                    if blocks.index >= 0:
                        parts.append(_event("content_block_stop", index=blocks.index))
                    delta = _stop(state, blocks.num_calls)
                    parts.append(_event("message_delta", delta=delta, usage=_usage(state)))
                    parts.append(_event("message_stop"))
                if parts:
                    yield b"".join(parts)
        except RequestError as error:
            if not started:
                raise
            yield _event("error", error=anthropic_error(error)["error"])
        finally:
            await chat_events.aclose()

    def _message_start(self, job: ChatJob, state: ReqState) -> bytes:
        usage = {**_usage(state), "output_tokens": 0}
        message = {**self._frame(job), "content": [], "stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**message, "usage": usage})

    def _frame(self, job: ChatJob) -> dict[str, Any]:
        return {
            "id": f"msg_{job.rid}",
            "type": "message",
            "role": "assistant",
            "model": self._front.config.served_model_name,
        }


def _add(block: dict[str, Any], delta: dict[str, Any]) -> None:
    if "text" in delta:
        block["text"] += delta["text"]
    elif "thinking" in delta:
        block["thinking"] += delta["thinking"]
    elif "partial_json" in delta:
        block["json"] = block.get("json", "") + delta["partial_json"]


def _parsed(text: str) -> Any:
    """Arguments as an object; those of a call that was cut off as their text."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return {"partial_json": text}


def _stop(state: ReqState, num_calls: int) -> dict[str, Any]:
    reason = state.finish_reason
    assert reason is not None
    if reason.type == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if reason.type == "abort":
        return {"stop_reason": "refusal", "stop_sequence": None}
    if num_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(reason.matched, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": reason.matched}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(state: ReqState) -> dict[str, int]:
    return {
        "input_tokens": state.prompt_tokens - state.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": state.cached_tokens,
        "output_tokens": state.completion_tokens,
    }


def _event(name: str, **fields: Any) -> bytes:
    data = orjson.dumps({"type": name, **fields})
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
