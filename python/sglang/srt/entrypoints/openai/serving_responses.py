"""POST /v1/responses without storage, on top of the chat route."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Any

import orjson

from sglang.srt.entrypoints.front_end import FrontEnd
from sglang.srt.entrypoints.openai.errors import error_object
from sglang.srt.entrypoints.openai.responses_protocol import SPELLING, ResponsesRequest, to_chat
from sglang.srt.entrypoints.openai.serving_chat import ChatJob, ChatServing
from sglang.srt.managers.errors import RequestError
from sglang.srt.managers.request_state import ReqState
from sglang.srt.parser.events import CallArguments, CallStart, Content, Event


class _Writer:
    """Builds the output items of one response, and the events that tell of it."""

    def __init__(self, frame: dict[str, Any], count_tokens: Callable[[str], int]) -> None:
        self.frame = frame
        self._count_tokens = count_tokens
        self.items: list[dict[str, Any]] = []
        self._sequence = 0
        self._open = False

    def event(self, name: str, **fields: Any) -> bytes:
        data = {"type": name, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"

    def add(self, event: Event) -> list[bytes]:
        """Events for one piece of the answer."""
        parts: list[bytes] = []
        if isinstance(event, CallStart):
            return self._begin(_call_item(event.name))
        if isinstance(event, CallArguments):
            item = self.items[-1]
            item["arguments"] += event.text
            return [self._delta("response.function_call_arguments.delta", event.text)]
        kind = "message" if isinstance(event, Content) else "reasoning"
        if not self._open or self.items[-1]["type"] != kind:
            parts += self._begin(_message_item() if kind == "message" else _reasoning_item())
            part = self.items[-1]["content"][0]
            parts.append(self._part("response.content_part.added", part))
        self.items[-1]["content"][0]["text"] += event.text
        name = "output_text" if kind == "message" else "reasoning_text"
        parts.append(self._delta(f"response.{name}.delta", event.text, content_index=0))
        return parts

    def _begin(self, item: dict[str, Any]) -> list[bytes]:
        parts = self.end_item("completed")
        self.items.append(item)
        self._open = True
        index = len(self.items) - 1
        return [*parts, self.event("response.output_item.added", output_index=index, item=item)]

    def end_item(self, status: str) -> list[bytes]:
        """Close the item that is open, if any."""
        if not self._open:
            return []
        self._open = False
        item = self.items[-1]
        item["status"] = status
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        if item["type"] == "function_call":
            name = "response.function_call_arguments.done"
            parts = [self.event(name, **place, arguments=item["arguments"])]
        else:
            part = item["content"][0]
            name = f"response.{part['type']}.done"
            parts = [
                self.event(name, **place, content_index=0, text=part["text"]),
                self._part("response.content_part.done", part),
            ]
        index = place["output_index"]
        return [*parts, self.event("response.output_item.done", output_index=index, item=item)]

    def _delta(self, name: str, text: str, **fields: Any) -> bytes:
        item_id, index = self.items[-1]["id"], len(self.items) - 1
        return self.event(name, item_id=item_id, output_index=index, delta=text, **fields)

    def _part(self, name: str, part: dict[str, Any]) -> bytes:
        item_id, index = self.items[-1]["id"], len(self.items) - 1
        return self.event(name, item_id=item_id, output_index=index, content_index=0, part=part)

    def response(self, state: ReqState | None) -> dict[str, Any]:
        """The response object as it stands."""
        if state is None or state.finish_reason is None:
            return {**self.frame, "status": "in_progress", "output": [], "usage": None}
        cut = state.finish_reason.type != "stop"
        why = {"length": "max_output_tokens"}.get(state.finish_reason.type, "content_filter")
        return {
            **self.frame,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": why} if cut else None,
            "output": self.items,
            "usage": self._usage(state),
        }

    def _usage(self, state: ReqState) -> dict[str, Any]:
        """Delivered ids; of them, as many as the reasoning text alone takes."""
        reasoning = [i["content"][0]["text"] for i in self.items if i["type"] == "reasoning"]
        num_reasoning = sum(self._count_tokens(text) for text in reasoning)
        return {
            "input_tokens": state.prompt_tokens,
            "input_tokens_details": {"cached_tokens": state.cached_tokens},
            "output_tokens": state.completion_tokens,
            "output_tokens_details": {
                "reasoning_tokens": min(num_reasoning, state.completion_tokens)
            },
            "total_tokens": state.prompt_tokens + state.completion_tokens,
        }


class ResponsesServing:
    """Runs Responses requests on a front end."""

    def __init__(self, front_end: FrontEnd, chat: ChatServing) -> None:
        self._front = front_end
        self._chat = chat

    def _count_tokens(self, text: str) -> int:
        return len(self._front.tokenizer.encode(text, add_special_tokens=False))

    def prepare(self, request: ResponsesRequest, *, rid: str | None) -> ChatJob:
        """Check a request. Raises: RequestError 400 naming the field."""
        return self._chat.prepare(to_chat(request), rid=rid, spelling=SPELLING)

    async def answer(self, request: ResponsesRequest, job: ChatJob) -> dict[str, Any]:
        """The whole response."""
        writer = _Writer(self._frame(request, job), self._count_tokens)
        last: ReqState | None = None
        async for events, state in self._chat.events(job):
            last = state
            for event in events:
                writer.add(event)
        writer.end_item(_item_status(last))
        return writer.response(last)

    async def stream(self, request: ResponsesRequest, job: ChatJob) -> AsyncGenerator[bytes, None]:
        """Server-sent events with names. An error after the first is an event of its own."""
        writer = _Writer(self._frame(request, job), self._count_tokens)
        started = False
        chat_events = self._chat.events(job)
        try:
            async for events, state in chat_events:
                parts: list[bytes] = []
                if not started:
                    started = True
                    for name in ("created", "in_progress"):
                        parts.append(
                            writer.event(f"response.{name}", response=writer.response(None))
                        )
                for event in events:
                    parts += writer.add(event)
                if state.is_done:
                    parts += writer.end_item(_item_status(state))
                    response = writer.response(state)
                    parts.append(writer.event(f"response.{response['status']}", response=response))
                if parts:
                    yield b"".join(parts)
        except RequestError as error:
            if not started:
                raise
            yield writer.event("error", **error_object(error)["error"])
        finally:
            await chat_events.aclose()

    def _frame(self, request: ResponsesRequest, job: ChatJob) -> dict[str, Any]:
        return {
            "id": f"resp_{job.rid}",
            "object": "response",
            "created_at": job.created,
            "model": self._front.config.served_model_name,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": request.reasoning or {"effort": None, "summary": None},
            "store": False,
            "temperature": request.temperature,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_p": request.top_p,
            "truncation": "disabled",
            "user": request.user,
        }


def _item_status(state: ReqState | None) -> str:
    reason = state.finish_reason if state is not None else None
    return "completed" if reason is not None and reason.type == "stop" else "incomplete"


def _item(kind: str, prefix: str) -> dict[str, Any]:
    return {"type": kind, "id": f"{prefix}_{uuid.uuid4().hex[:24]}", "status": "in_progress"}


def _call_item(name: str) -> dict[str, Any]:
    call_id = f"call_{uuid.uuid4().hex[:24]}"
    return {**_item("function_call", "fc"), "call_id": call_id, "name": name, "arguments": ""}


def _message_item() -> dict[str, Any]:
    part = {"type": "output_text", "text": "", "annotations": []}
    return {**_item("message", "msg"), "role": "assistant", "content": [part]}


def _reasoning_item() -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": ""}
    return {**_item("reasoning", "rs"), "summary": [], "content": [part]}
