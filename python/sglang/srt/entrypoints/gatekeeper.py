"""What every HTTP request passes before a route sees it: keys, body size, draining, counting."""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang.srt.entrypoints.openai.errors import error_response
from sglang.srt.entrypoints.status_page import PATHS as STATUS_PAGE_PATHS
from sglang.srt.managers.errors import RequestError, unavailable

OPEN_PATHS = frozenset({"/health", "/health_generate", "/ready", "/metrics", *STATUS_PAGE_PATHS})
"""Served without a key, for probes and scrapers; the page asks for the key itself."""
ADMIN_PATHS = frozenset({"/flush_cache"})
"""Routes that change the server for everyone."""


@dataclass
class GateState:
    """Shared with the server: `num_inflight` counts requests with a body that are being answered."""

    draining: bool = False
    num_inflight: int = 0


class Gatekeeper:
    """Pure ASGI middleware; costs a stream nothing per chunk."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        state: GateState,
        api_key: str | None,
        admin_api_key: str | None,
        max_body_bytes: int,
    ) -> None:
        self._app = app
        self._state = state
        self._api_key = api_key
        self._admin_api_key = admin_api_key or api_key
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        error = self._refusal(scope, headers)
        if error is not None:
            await error_response(error)(scope, receive, send)
            return
        request_id = headers.get(b"x-request-id")
        if request_id is not None:
            send = _echoing(send, request_id)
        if scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        self._state.num_inflight += 1
        try:
            await self._app(scope, self._limited(receive), send)
        finally:
            self._state.num_inflight -= 1

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> RequestError | None:
        path = scope["path"]
        if path not in OPEN_PATHS:
            key = self._admin_api_key if path in ADMIN_PATHS else self._api_key
            if key is not None and not _has_key(headers, key):
                return RequestError(
                    "the Authorization header lacks a valid key: send 'Bearer KEY'",
                    status=401,
                    code="invalid_api_key",
                )
        if scope["method"] == "POST" and self._state.draining:
            return unavailable("the server is shutting down", code="draining")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> RequestError:
        return RequestError(
            f"the body is larger than {self._max_body_bytes} bytes; see --max-request-body-mb",
            status=413,
            code="body_too_large",
        )

    def _limited(self, receive: Receive) -> Receive:
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_body_bytes:
                raise self._too_large()
            return message

        return limited


def _echoing(send: Send, request_id: bytes) -> Send:
    """`send` that repeats a router's request id in the reply's headers."""

    async def echoing(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (b"x-request-id", request_id)]
            message = {**message, "headers": headers}
        await send(message)

    return echoing


def _has_key(headers: dict[bytes, bytes], key: str) -> bool:
    """Whether the bearer token, or `x-api-key` as Anthropic's clients send it, is the key."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    bearer = token.strip() if scheme.lower() == b"bearer" else b""
    wanted = key.encode()
    return hmac.compare_digest(bearer, wanted) | hmac.compare_digest(
        headers.get(b"x-api-key", b""), wanted
    )
