"""Reading JSON bodies and writing answers, with clients that may leave at any time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
import orjson
from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from sglang.srt.managers.errors import RequestError

T = TypeVar("T")

NO_OPS = frozenset({"log_metrics", "prompt_cache_key", "safety_identifier", "service_tier"})
"""Options that clients and routers add to every request; accepted and without effect. What routers
add with the value false or null needs no entry."""


_TOKEN_ID = re.compile(r"[0-9]{1,10}")
_SHOWN_CHARS = 40

MAX_DEPTH = 200
"""Levels of nesting in a body. Reading allows 1,024, writing 254, and schemas and conversations are
written again inside other objects."""


class ClientGone(Exception):
    """The client closed the connection before there was an answer."""


async def read_json(request: Request) -> dict[str, Any]:
    """The body as an object, without the fields that are null.

    Raises: RequestError 400 if it is not a JSON object in UTF-8, or nested too deeply.
    """
    body = await request.body()
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _check_depth(value)
    return {key: item for key, item in value.items() if item is not None}


def _check_depth(value: dict[str, Any]) -> None:
    for key, item in value.items():
        level = [item]
        for _ in range(MAX_DEPTH):
            containers = [each for each in level if isinstance(each, dict | list)]
            level = [
                inner
                for each in containers
                for inner in (each.values() if isinstance(each, dict) else each)
            ]
            if not level:
                break
        else:
            raise RequestError(
                f"{key} is nested more than {MAX_DEPTH} levels deep; send it flatter",
                param=key,
                code="invalid_json",
            )


def decode_body(body: dict[str, Any], model: type[T]) -> T:
    """`body` as `model`.

    Raises: RequestError 400 naming the field, for a wrong type, a missing field, or an option
    that this server does not have (unless its value is false or it is a documented no-op).
    """
    known = set(model.__struct_fields__)  # type: ignore[attr-defined]
    unknown = [key for key in body if key not in known]
    for key in unknown:
        if body[key] is not False and key not in NO_OPS:
            raise RequestError(
                f"{key} is not supported by this server; leave it out or send null",
                param=key,
                code="unsupported_parameter",
            )
    given = {key: value for key, value in body.items() if key in known}
    try:
        return msgspec.convert(given, model)
    except msgspec.ValidationError as error:
        raise type_error(str(error)) from error


def id_keys(given: dict[Any, T], field: str) -> dict[Any, T]:
    """`given` with its keys, which JSON makes texts, as token ids. Raises: RequestError 400."""
    ids: dict[Any, T] = {}
    for key, item in given.items():
        if isinstance(key, str) and not _TOKEN_ID.fullmatch(key):
            shown = key if len(key) <= _SHOWN_CHARS else key[:_SHOWN_CHARS] + "..."
            raise RequestError(
                f"{field} has the key {shown!r}, which is no token id: keys are whole numbers from "
                "0, written in decimal digits",
                param=field,
            )
        token_id = int(key) if isinstance(key, str) else key
        if token_id in ids:
            raise RequestError(f"{field} names token {token_id} twice", param=field)
        ids[token_id] = item
    return ids


def type_error(text: str) -> RequestError:
    """The 400 for a msgspec message such as "Expected `int`, got `str` - at `$.n`"."""
    what, _, where = text.partition(" - at `$.")
    path = where.rstrip("`")
    if not path and "required field `" in what:
        path = what.split("`")[1]
    name = path.split("[")[0].split(".")[0] or None
    return RequestError(f"{path}: {what}" if path else what, param=name)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, and cancel it when the client leaves. The body must have been read.

    Raises: ClientGone; whatever `work` raises.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


def json_response(value: Any, status_code: int = 200) -> Response:
    """A JSON reply."""
    return Response(
        orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS),
        status_code=status_code,
        media_type="application/json",
    )


async def stream_response(request: Request, events: AsyncGenerator[bytes, None]) -> Response:
    """A reply of server-sent events. Waits for the first, so that a request which is refused
    gets a plain error; closing the connection closes `events`.

    Raises: ClientGone; RequestError from before the first event.
    """
    try:
        first = await until_disconnect(request, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events)


class EventStream(Response):
    """Sends `first`, then every event, as they come."""

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not pump.done():
                pump.cancel()
                await asyncio.wait({pump})
            await self._events.aclose()
        if not pump.cancelled():
            pump.result()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
